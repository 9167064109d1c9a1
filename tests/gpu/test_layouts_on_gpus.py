"""The layouts' tests on GPUs, over NCCL: as many ranks as there are GPUs; and what only a GPU has."""

from itertools import product
from pathlib import Path

import pytest
import torch
from layouts import BASE, Sections, merged, name_of, spread
from trainer_ranks import steps, textbook, trained, write_config, write_dataset

from resilient.worker import load_config

LAYOUTS = [layout for layout in product((1, 2), repeat=3) if layout[0] * layout[1] * layout[2] <= max(1, torch.cuda.device_count())]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "walks")


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_every_layout_trains_on_gpus_like_one_process_on_the_cpu(dataset: Path, tmp_path: Path, layout: tuple[int, int, int]):
    tp, pp, dp = layout
    device: Sections = {"cluster": {"device": "cuda"}}
    config = write_config(tmp_path, dataset, **merged(BASE, spread(tp, pp), device))
    expected = textbook(load_config(config, ["parallel={}", "cluster={}"]))
    assert steps(trained(config, tp * pp * dp)) == [pytest.approx(line, rel=1e-4) for line in expected]


@pytest.mark.parametrize("kernel", ["auto", "sdpa_flash"])
def test_flash_attention_trains_like_math_in_bf16(dataset: Path, tmp_path: Path, kernel: str):
    device: Sections = {"cluster": {"device": "cuda"}, "train": {"precision": "bf16"}}
    found = {}
    for each in ("math", kernel):
        config = write_config(tmp_path / each, dataset, **merged(BASE, device, {"model": {"attention": each}}))
        found[each] = steps(trained(config, 1))
    assert found[kernel] == [pytest.approx(line, rel=2e-2) for line in found["math"]]


def test_deterministic_training_gives_the_same_bits_twice(dataset: Path, tmp_path: Path):
    device: Sections = {"cluster": {"device": "cuda"}, "train": {"precision": "bf16", "deterministic": True}}
    runs = [steps(trained(write_config(tmp_path / str(number), dataset, **merged(BASE, device)), 1)) for number in range(2)]
    assert runs[0] == runs[1]
