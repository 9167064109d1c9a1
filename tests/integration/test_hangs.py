"""Workers that do not die but do not get on: found, told apart, the right one named, and what is well is left alone."""

import os
import pickle
import random
import signal
import time
from collections.abc import Callable

import pytest
from campaigns import Campaign, wait_for

Counting = Callable[..., Campaign]

SOON = {"hang_floor_s": 3.0}  # sooner than by default, and later than a busy machine lets a rank wait


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
        files = sorted(path.name for path in evidence.iterdir())
        assert files == [f"gloo_trace_rank_{1 - rank}", "node0.txt", "rank0.txt", "rank1.txt"]
        said = (evidence / "node0.txt").read_text().splitlines()
        assert said[rank] == f"rank {rank}: flight recorder: not asked, the process is stopped"
        assert "state T" in (evidence / f"rank{rank}.txt").read_text()
        assert "toys.py" in (evidence / f"rank{rank}.txt").read_text()  # where it was stopped
    run.signal(signal.SIGTERM)
    assert run.wait() == 75, run.output


HANGS = {"loader": "wait_for_a_sample", "spin": "_hang", "collective": "waiting in a collective"}


def test_workers_that_hang_in_the_loader_in_python_and_in_a_collective_are_found_and_named(counting: Counting):
    turns = [{"hang_at": 105 + 110 * number, "hang": how} for number, how in enumerate(HANGS)]
    run = counting(steps=350, args={"turns": turns}, resilience=SOON)
    assert run.run() == 0, run.output + run.logs()
    assert [event["lost_steps"] for event in run.events("recovered")] == [4, 4, 4]
    assert len(run.events("fault")) == len(turns), run.events("fault")
    for fault, turn in zip(run.events("fault"), turns, strict=True):
        step, how = turn["hang_at"], turn["hang"]
        assert fault["kind"] == ("collective_timeout" if how == "collective" else "hang"), fault
        assert fault["ranks"] == [1], fault
        assert (how == "collective") == ("gloo:broadcast [[1]] (number" in fault["detail"]), fault
        assert fault["step"] == step and HANGS[how] in fault["detail"] + fault["evidence"], fault
        evidence = run.run_dir / "incidents" / fault["fault_id"]
        record = pickle.loads((evidence / "gloo_trace_rank_0").read_bytes())
        (pending,) = [entry for entry in record["entries"] if not entry["retired"]]
        assert pending["profiling_name"] == "gloo:all_reduce"
        waits = f"1 not finished, the first: number {pending['collective_seq_id']} of group 0 (default_pg), gloo:all_reduce [[1]]"
        said = (evidence / "node0.txt").read_text().splitlines()
        assert len(said) == 2 and said[0].endswith(waits)
        assert ("1 not finished, the first: " in said[1]) == (how == "collective")


@pytest.mark.soak
def test_a_stopped_worker_alone_on_its_node_says_where_it_was(counting: Counting):
    run = counting(steps=10_000, cluster={"nodes": 2, "procs_per_node": 1}).start()
    run.reach(10)
    os.kill(run.workers()[1], signal.SIGSTOP)
    wait_for(lambda: run.events("recovered"), f"a recovery\n{run.logs()}")
    run.signal(signal.SIGTERM)
    assert run.wait() == 75, run.output
    (fault,) = run.events("fault")
    evidence = run.run_dir / "incidents" / fault["fault_id"]
    assert (fault["kind"], fault["ranks"], fault["nodes"]) == ("stopped", [1], [1]), fault
    assert "toys.py" in (evidence / "rank1.stopped.txt").read_text()
    assert (evidence / "node0.txt").exists() and "rank1.stopped.txt" in (evidence / "node1.txt").read_text()


def test_a_job_that_is_suspended_as_a_whole_goes_on_without_a_fault(counting: Counting):
    run = counting(steps=200, args={"holds": 150}, resilience=SOON).start()
    run.reach(20)
    workers = run.workers().values()
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(5.0)
    for pid in workers:
        os.kill(pid, signal.SIGCONT)
    run.go_on()
    assert run.wait() == 0, run.output + run.logs()
    assert not run.events("fault")


@pytest.mark.soak
def test_a_step_that_takes_long_now_and_then_is_no_hang(counting: Counting):
    run = counting(steps=60, args={"slow_every": 10, "slow_s": 2.4}, resilience=SOON)
    assert run.run() == 0, run.output + run.logs()
    assert not run.events("fault")
