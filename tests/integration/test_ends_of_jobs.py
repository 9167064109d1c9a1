"""Jobs that are stopped, or whose driver ends: nothing of them is left, and the next job goes on where they were."""

import json
import os
import random
import signal
from collections.abc import Callable

import pytest
from campaigns import Campaign, regions, wait_for, whole
from soak import soaked

Counting = Callable[..., Campaign]


SIGNALS = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]


def test_stop_signals_at_random_moments_stop_all_ranks_at_one_step_and_the_next_run_goes_on_there(counting: Counting, rounds: int):
    sent = SIGNALS[:2] if rounds == 1 else SIGNALS * rounds
    run = counting(steps=100_000, every_steps=100_000, args={"step_s": 0.001})  # it never comes to the end between two looks
    chance = random.Random(rounds)
    for sig in sent:
        run.start()
        run.reach(run.step() + chance.randrange(1, 30))
        run.signal(sig)
        assert run.wait() == 75, run.output + run.logs()
        drain = run.events("drain")[-1]
        stopped_at = json.loads((run.run_dir / "state.json").read_text())["step"]
        assert (drain["step"], drain["signal"]) == (stopped_at, sig.name) and stopped_at == run.step()
    steps = run.step() + 200
    assert run.run(f"train.steps={steps}") == 0, run.output + run.logs()
    assert [event["resumed_step"] for event in run.events("generation_started")] == [
        0,
        *(each["step"] for each in run.events("drain")),
    ]
    whole(run, steps)
    assert len(run.metrics()) == steps  # not one step twice


STAGES: dict[str, Callable[[Campaign], int]] = {
    "the driver has started": lambda run: len(run.events("run_started")),
    "its agent starts": lambda run: len(regions(run)),
    "its agent has started": lambda run: run.logs().count("watching the links"),
}


@pytest.mark.soak
@pytest.mark.parametrize("stages", [["the driver has started", "its agent has started"], soaked(["its agent starts"])], ids=str)
def test_a_stop_during_the_start_leaves_nothing_and_loses_nothing(counting: Counting, stages: list[str]):
    run = counting(steps=80)
    for stage in stages:
        before = STAGES[stage](run) if run.run_dir.exists() else 0
        run.start()
        wait_for(lambda stage=stage, before=before: STAGES[stage](run) > before, stage)
        run.signal(signal.SIGTERM)
        assert run.wait() == 75, (stage, run.output + run.logs())
        assert not run.processes() and not regions(run), stage
    assert run.run() == 0, run.output + run.logs()
    whole(run, 80)


@pytest.mark.soak
def test_a_stop_that_every_process_of_the_job_is_sent_is_one_stop(counting: Counting):
    """A scheduler signals them all: snapshot daemon, fork server, standbys and workers leave it to the driver."""
    run = counting(steps=100_000, every_steps=1000).start()
    run.reach(12)
    agents = {process.pid for process in run.agents().values()}
    for process in run.processes():
        if process.pid not in agents:
            process.send_signal(signal.SIGTERM)
    run.reach(run.step() + 5)
    run.signal(signal.SIGTERM)
    assert run.wait() == 75, run.output + run.logs()
    assert not run.events("fault")
    assert "the snapshot daemon (process" not in run.logs()
    assert json.loads((run.run_dir / "state.json").read_text())["step"] == run.step()


def test_a_second_ctrl_c_stops_at_once(counting: Counting):
    run = counting(steps=1000, args={"deaf": True}).start()  # one rank never asks whether to stop
    run.reach(5)
    run.signal(signal.SIGINT)
    wait_for(lambda: "once more" in run._printed(), "the word on a second Ctrl-C")
    run.signal(signal.SIGINT)
    assert run.wait() == 75
    assert "stopped at once by a second SIGINT" in run.output


@pytest.mark.soak
def test_a_drain_that_workers_do_not_follow_ends_at_its_deadline(counting: Counting):
    run = counting(steps=1000, args={"deaf": True}, resilience={"drain_s": 2.0}).start()
    run.reach(5)
    run.signal(signal.SIGTERM)
    assert run.wait() == 75
    assert "took longer" in run.output


@pytest.mark.soak
def test_a_worker_killed_while_stopping_ends_the_run_with_what_is_durable(counting: Counting):
    run = counting(steps=200, args={"deaf": True, "holds": 150}).start()
    run.reach(12)
    pids = run.workers()
    run.signal(signal.SIGTERM)
    os.kill(pids[1], signal.SIGKILL)
    assert run.wait() == 75
    run.go_on()
    durable = json.loads((run.run_dir / "state.json").read_text())["step"]
    assert 10 <= durable < 200 and durable % 10 == 0
    assert run.run() == 0
    whole(run, 200)


def test_a_driver_killed_at_any_moment_leaves_no_process_and_no_gap_and_no_double_in_the_metrics(counting: Counting, rounds: int):
    run = counting(steps=100_000, every_steps=5, args={"step_s": 0.001})
    chance = random.Random(rounds)
    for _ in range(rounds):
        run.start()
        run.reach(run.step() + chance.randrange(20, 60))
        assert len(run.processes()) >= 4  # agent, fork server, two workers
        run.kill()
        wait_for(lambda: not run.processes(), "everything below the driver is gone")
    run.start()
    wait_for(lambda: len(run.events("generation_started")) > rounds, "the last generation")
    run.reach(run.step() + 20)
    run.signal(signal.SIGTERM)
    assert run.wait() == 75
    whole(run, max(run.losses()))
    keys = [(line["generation"], line["step"]) for line in run.metrics()]
    assert len(set(keys)) == len(keys)
    assert not list(run.run_dir.glob(".spill/*"))
    assert not regions(run)


@pytest.mark.soak
def test_a_second_driver_is_refused_and_one_whose_run_directory_was_taken_over_stops_at_once_and_writes_no_more(counting: Counting):
    run = counting(steps=100_000).start()
    run.reach(5)
    other = counting(steps=100_000)
    assert other.run() == 69
    assert f"pid {run.process.pid}" in other.output
    (run.run_dir / ".lease").write_text(
        json.dumps({"host": "n7", "pid": 4711, "job": "42", "machine": "another", "token": "other"})
    )
    assert run.wait() == 69
    assert "was taken over by pid 4711 on n7 (job 42)" in run.output
    assert not run.events("run_finished")
    assert "4711" in (run.run_dir / ".lease").read_text()
    wait_for(lambda: not run.processes(), "the end of all its processes")
