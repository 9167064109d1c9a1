"""One step looked into: memory and communication out of the profiler's events, and of a real step against the plan."""

from pathlib import Path

import pytest
from soak import soaked_after
from trainer_ranks import VOCABULARY, run_ranks, train, write_config, write_dataset

from resilient.worker import load_config, settle
from trainer.inspection import communication, peak, under_way_ns
from trainer.memory import memory
from trainer.shape import shape_of


def test_the_peak_counts_what_is_there_at_one_time_also_where_memory_is_freed_without_an_event():
    assert peak([(3, -30, 2), (1, 70, 1), (2, 30, 2), (4, 20, 2)]) == 100
    assert peak([(1, 70, 1), (2, 80, 1), (3, 60, 1)]) == 80  # each time the one before was freed by another thread
    assert peak([(1, -400, 9), (2, 100, 1)]) == 100  # what was there before does not count
    assert peak([]) == 0


def test_what_is_under_way_at_the_same_time_counts_once():
    assert under_way_ns([(0, 10), (5, 12), (20, 25), (21, 22)]) == 17
    assert under_way_ns([]) == 0


@pytest.mark.parametrize(
    ("name", "transfer"),
    [
        ("gloo:all_reduce", False),
        ("gloo:recv", True),
        ("gloo:send", True),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", False),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", True),
        ("aten::mm", None),
        ("c10d::allreduce_", None),
        ("nccl:all_reduce", None),  # the host's side of it
    ],
)
def test_collectives_and_transfers_are_told_apart_by_their_names(name: str, transfer: bool | None):
    assert communication(name) is transfer


@pytest.mark.parametrize(("tp", "pp"), soaked_after(1, [(1, 1), (1, 2), (2, 1)]))
def test_the_memory_of_a_step_that_is_looked_into_is_what_was_planned(tmp_path: Path, tp: int, pp: int):
    path = write_config(
        tmp_path,
        write_dataset(tmp_path / "walks"),
        model={"layers": 2, "hidden": 128, "heads": 4, "seq_len": 128},
        train={"steps": 3, "global_batch_size": 8, "micro_batch_size": 4, "eval_interval": 0},
        parallel={"tp": tp, "pp": pp},
        checkpoint={"every_steps": 1000},
        logging={"inspect_step": 2},
    )
    told = run_ranks(2, train, path)[0]
    lines = [line for line in told if line["event"] == "step"]
    assert ["inspected" in line for line in lines] == [False, True, False]
    seen = lines[1]["inspected"]
    config = load_config(path)
    planned = memory(config, shape_of(config, VOCABULARY), settle(config, 2), 0)
    assert seen["state_bytes"] == pytest.approx(planned.parameters + planned.gradients + planned.optimizer, rel=0.15)
    assert seen["tensor_bytes"] == pytest.approx(planned.peak, rel=0.25)
    assert 0 < seen["collective_s"] < seen["step_s"]
    assert (seen["transfer_s"] > 0) == (pp > 1)
