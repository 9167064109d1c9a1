"""The quickstart as the README has it, from nothing to a trained model."""

import contextlib
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from campaigns import ROOT, Campaign, wait_for

QUICKSTART = ROOT / "examples/quickstart.yaml"


def peak_bytes(pid: int) -> int:
    """The most memory that a process has had in use, as the kernel says."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@pytest.mark.soak
def test_the_quickstart_learns_two_nats_within_its_memory(campaign: Callable[..., Campaign]):
    config = yaml.safe_load(QUICKSTART.read_text())
    del config["run_dir"]
    run = campaign(**config).start()
    peaks: dict[int, int] = {}

    def ended() -> bool:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, StopIteration):
            for rank, pid in run.workers().items():
                peaks[rank] = max(peaks.get(rank, 0), peak_bytes(pid))
        assert run.process is not None
        return run.process.poll() is not None

    wait_for(ended, "the end of the quickstart", 900.0)
    assert run.wait() == 0, run.output + run.logs()
    losses = [event["val_loss"] for event in run.events("validation")]
    assert losses[0] - losses[-1] >= 2.0
    assert len(run.metrics()) == config["train"]["steps"]
    assert set(peaks) == {0, 1}
    assert max(peaks.values()) < 1.5 * 2**30
    print("peak memory of each worker, MiB:", {rank: peak >> 20 for rank, peak in peaks.items()})


@pytest.mark.soak
@pytest.mark.alone
def test_the_quickstart_as_shipped_loses_no_more_than_what_it_has_measured_to_each_of_ten_kills(campaign: Callable[..., Campaign]):
    config = yaml.safe_load(QUICKSTART.read_text())
    del config["run_dir"]
    run = campaign(**config).start("train.steps=400")
    chance, last = random.Random(1), 0
    for number in range(10):
        last = run.step() + chance.randint(8, 20)
        run.reach(last)
        os.kill(run.workers()[chance.randrange(2)], signal.SIGKILL)
        wait_for(lambda number=number: len(run.events("recovered")) > number, run.logs)
    lost = [event["lost_steps"] for event in run.events("recovered")]
    told = [event["every_steps"] for event in run.events("cadence")]
    print("steps computed again:", lost, "intervals:", told)
    assert max(lost) <= max([1, *told])  # on a machine that has nothing else to do: 1
    assert all(len(values) == 1 for values in run.losses().values())
    run.kill()
