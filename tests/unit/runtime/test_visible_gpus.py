"""Which GPUs a process may use, and how the agents of one machine share them."""

from pathlib import Path

import pytest

from resilient.config import Config, ConfigError, layout
from resilient.visible_gpus import slices, visible


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        ("0,1,3", ("0", "1", "3")),
        (" 2 , 0", ("2", "0")),
        ("GPU-8d3c,MIG-22aa", ("GPU-8d3c", "MIG-22aa")),
        ("", ()),
        ("-1", ()),
        ("0,-1,1", ("0",)),
        (None, ("0", "1", "2")),
    ],
)
def test_visible_gpus_are_those_that_cuda_takes(tmp_path: Path, chosen: str | None, names: tuple[str, ...]):
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm", "nvidia-caps"):
        (tmp_path / name).touch()
    environ = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    assert visible(environ, tmp_path) == names


def test_agents_of_one_machine_share_its_gpus_and_none_belongs_to_two():
    eight = tuple(map(str, range(8)))
    assert slices(eight, 4, 2) == ("0,1", "2,3", "4,5", "6,7")
    assert slices(eight, 3, 1) == ("0,1", "2,3", "4,5"), "what does not come out even is left"
    assert slices(("GPU-a", "GPU-b"), 2, 1) == ("GPU-a", "GPU-b")
    assert slices(eight, 1, 2) == (), "a script of an only agent may use more than one for a rank"


@pytest.mark.parametrize(("gpus", "agents", "procs"), [(4, 3, 2), (1, 2, 1), (4, 1, 5)])
def test_two_ranks_never_share_a_gpu(gpus: int, agents: int, procs: int):
    with pytest.raises(ConfigError, match=rf"need {agents * procs} GPUs, and {gpus} can be seen"):
        slices(tuple(map(str, range(gpus))), agents, procs)


def test_spares_of_one_machine_need_gpus_as_well():
    config = Config.model_validate({"cluster": {"nodes": 2, "spares": 2}, "train": {"global_batch_size": 16}})
    assert layout(config, cpu_count=8, gpu_count=8).procs_per_node == 2
    assert layout(config, cpu_count=8, gpu_count=2, apart=True).procs_per_node == 2, "a spare is a machine of its own"
