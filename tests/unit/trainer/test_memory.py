"""What ranks hold at their most, measured, against what the plan says: a small twin of the run of 13.6 billion parameters."""

import os
from pathlib import Path
from unittest import mock

import pytest
from allocations import Allocations
from layouts import Sections, merged, reduction
from soak import soaked, soaked_after
from trainer_ranks import VOCABULARY, run_ranks, steps, textbook, train, trained, write_config

from resilient.worker import load_config, settle
from trainer.memory import memory
from trainer.shape import shape_of

# examples/13b-juwels.yaml: two pipeline stages, six micro batches of two samples for each replica, layers computed again.
TWIN: Sections = {
    "parallel": {"pp": 2},
    "model": {
        **{"layers": 4, "hidden": 128, "heads": 4, "ffn_hidden": 512, "seq_len": 64, "vocab_size": 512, "vocab_multiple": 128},
        **{"norm": "layernorm", "mlp": "gelu", "bias": True},
    },
    "train": {"micro_batch_size": 2, "precision": "bf16", "steps": 2, "recompute": "full"},
    "checkpoint": {"every_steps": 1000},
}
WAYS = [(reduce, dtype) for reduce in ("last", "every") for dtype in ("fp32", "bf16")]


def twin(dp: int) -> Sections:
    return merged(TWIN, {"train": {"global_batch_size": 12 * dp}})


def peak(config: Path) -> tuple[int, int]:
    """This pipeline rank, and the most bytes of tensors that were alive in its second step."""
    from resilient import worker

    allocations, found = Allocations(), list[int]()
    beat = worker.beat

    def told(step: int) -> None:
        found.append(allocations.peak_bytes)
        allocations.peak_bytes = 0
        beat(step)

    with mock.patch.object(worker, "beat", told), allocations:
        train(config)
    return load_config(config, []).parallel.pp * int(os.environ["RANK"]) // int(os.environ["WORLD_SIZE"]), found[1]


CASES = [(2, "last", "bf16"), (2, "every", "fp32"), *(soaked(4, *way) for way in WAYS)]


@pytest.mark.parametrize(("dp", "reduce", "dtype"), soaked_after(1, CASES))
def test_ranks_hold_at_their_most_what_the_plan_says(dataset: Path, tmp_path: Path, dp: int, reduce: str, dtype: str):
    path = write_config(tmp_path, dataset, **merged(twin(dp), reduction(reduce, dtype)))
    config = load_config(path, [])
    layout = settle(config, 2 * dp)
    assert (layout.pp, layout.dp, layout.accumulation) == (2, dp, 6)
    found = run_ranks(2 * dp, peak, path)
    for pp_rank in (0, 1):
        planned = memory(config, shape_of(config, 512), layout, pp_rank).peak
        measured = [size for rank, size in found if rank == pp_rank]
        assert len(measured) == dp
        assert measured == [pytest.approx(planned, rel=0.15)] * dp


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["full", "selective", "none"])
def test_what_ranks_hold_between_the_halves_of_a_backward_pass_is_planned(dataset: Path, tmp_path: Path, mode: str):
    size = {"micro_batch_size": 8, "global_batch_size": 48, "recompute": mode}
    path = write_config(tmp_path, dataset, **merged(TWIN, {"parallel": {"schedule": "zero_bubble"}, "train": size}))
    config = load_config(path, [])
    planned = memory(config, shape_of(config, 512), settle(config, 2), 1).peak
    assert dict(run_ranks(2, peak, path))[1] == pytest.approx(planned, rel=0.15)


@pytest.mark.soak
@pytest.mark.parametrize("reduce", ["last", "every"])
def test_the_twin_has_the_losses_of_one_process(dataset: Path, tmp_path: Path, reduce: str):
    model = {"vocab_size": VOCABULARY, "init_std": 0.1}
    path = write_config(tmp_path, dataset, **merged(twin(4), reduction(reduce), {"train": {"precision": "fp32"}, "model": model}))
    expected = textbook(load_config(path, []))  # a plain loop
    found = steps(trained(path, 8))
    assert [line[:2] for line in found] == [(step, pytest.approx(loss, abs=1e-5)) for step, loss, *_ in expected]
