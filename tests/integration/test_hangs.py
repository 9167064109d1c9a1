"""Workers that do not die but do not get on: found, told apart, the right one named, and what is well is left alone."""

import os
import random
import signal
import time
from collections.abc import Callable

import pytest
from conftest import Campaign, wait_for

Counting = Callable[..., Campaign]

SOON = {"hang_floor_s": 1.5}


def test_a_stopped_worker_is_found_at_default_settings(counting: Counting, rounds: int):
    run = counting(steps=10_000).start()
    run.reach(5)
    for number in range(rounds):
        before = run.step()
        run.reach(before + 15)
        rank = random.randrange(2)
        os.kill(run.workers()[rank], signal.SIGSTOP)
        wait_for(lambda number=number: len(run.events("recovered")) > number, f"a recovery\n{run.logs()}")
        fault = run.events("fault")[-1]
        assert (fault["kind"], fault["ranks"]) == ("stopped", [rank]), fault
        evidence = run.run_dir / "incidents" / fault["fault_id"]
        assert sorted(path.name for path in evidence.iterdir()) == ["rank0.txt", "rank1.txt"]
        assert "state T" in (evidence / f"rank{rank}.txt").read_text()
        assert "toys.py" in (evidence / f"rank{rank}.txt").read_text()  # where it was stopped
    run.signal(signal.SIGTERM)
    assert run.wait() == 75, run.output


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("loader", "wait_for_a_sample"),
        ("spin", "_hang"),
        ("collective", "waiting in a collective"),
    ],
)
def test_a_hung_worker_is_found_and_named(counting: Counting, how: str, said: str):
    args = {"hang_at": 25, "hang": how, "bad_rank": 1, "once": True}
    run = counting(steps=40, args=args, resilience=SOON)
    assert run.run() == 0, run.output + run.logs()
    (fault,) = run.events("fault")
    assert fault["kind"] == ("collective_timeout" if how == "collective" else "hang"), fault
    assert 1 in fault["ranks"] and (how == "collective" or fault["ranks"] == [1]), fault
    assert fault["step"] == 25 and said in fault["detail"] + fault["evidence"], fault
    (recovered,) = run.events("recovered")
    assert recovered["lost_steps"] == 4


def test_a_job_that_is_suspended_as_a_whole_goes_on_without_a_fault(counting: Counting):
    run = counting(steps=200, resilience=SOON).start()
    run.reach(20)
    workers = run.workers().values()
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(5.0)
    for pid in workers:
        os.kill(pid, signal.SIGCONT)
    assert run.wait() == 0, run.output + run.logs()
    assert not run.events("fault")


def test_a_step_that_takes_long_now_and_then_is_no_hang(counting: Counting):
    run = counting(steps=60, args={"slow_every": 10, "slow_s": 1.2}, resilience=SOON)
    assert run.run() == 0, run.output + run.logs()
    assert not run.events("fault")
