"""Memory that a step on a CPU has freed is there for the next one, without the kernel clearing it again."""

import platform
import resource
from pathlib import Path

import pytest
import torch
from trainer_ranks import run_ranks, train, write_config, write_dataset

PAGES = 12288  # of 4 KiB: a block of 48 MiB, above all that glibc would keep by itself


def faults() -> int:
    """Pages that the kernel had to find for a block that is taken and freed for the third time."""
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(PAGES * 1024)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    return after - before


def before_and_after_training(config: Path) -> tuple[int, int]:
    before = faults()
    train(config)
    return before, faults()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="NOT TESTED HERE: only glibc can be asked to keep freed memory")
def test_a_rank_keeps_what_its_steps_have_freed(tmp_path: Path):
    config = write_config(tmp_path, write_dataset(tmp_path / "walks"), train={"steps": 2})
    ((before, after),) = run_ranks(1, before_and_after_training, config)
    assert before > PAGES // 2
    assert after < PAGES // 100
