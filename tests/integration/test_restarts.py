"""Ranks, agents and fork servers that end or stand still: each is told and started again, and nothing that is computed is lost."""

import os
import random
import re
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from campaigns import Campaign, alive, regions, wait_for, whole

from resilient.account import account

Counting = Callable[..., Campaign]


def test_killed_workers_are_named_and_cost_a_generation_each_and_nothing_else(counting: Counting, rounds: int):
    kills, chance = 1 + rounds, random.Random(rounds)
    ranks = [1, 0, *(chance.randrange(2) for _ in range(rounds - 1))]
    steps = 100 + 15 * kills
    run = counting(steps=steps, args={"holds": steps - 10}, resilience={"give_up_after_same_step": 9}).start()
    for kill, rank in enumerate(ranks):
        run.reach(8 + 15 * kill)
        wait_for(lambda kill=kill: len(run.events("recovered")) >= kill, "recovery from the kill before")
        pids = wait_for(lambda: len(found := run.workers()) == 2 and found, "two workers")
        os.kill(pids[rank], signal.SIGKILL)
    run.go_on()
    assert run.wait() == 0, run.output + run.logs()
    whole(run, steps)
    faults = run.events("fault")
    assert [(fault["kind"], fault["ranks"], fault["detail"]) for fault in faults] == [("exit", [rank], "SIGKILL") for rank in ranks]
    assert len(run.events("recovered")) == kills
    assert run.events("generation_started")[-1]["generation"] == kills + 1
    found, events = account(run.events(), run.metrics()), run.events()
    assert found.rank_s == pytest.approx(2 * (events[-1]["t"] - events[0]["t"]), rel=0.005)
    assert [incident.fault_id for incident in found.incidents] == [fault["fault_id"] for fault in faults]
    assert all(incident.lost_steps is not None and incident.seconds["restart"] > 0 for incident in found.incidents)


def test_a_rank_that_lost_its_peer_is_not_blamed_however_it_ends(counting: Counting):
    """As torch's pipeline wraps the error, as a script's clean-up fails after it, as a script that catches it leaves."""
    ends = ["wraps", "cleans up", "exits"]
    run = counting("bereft", steps=6, args={"ends": ends}, resilience={"give_up_after_same_step": 9})
    assert run.run() == 0, run.output + run.logs()
    told = [(fault["kind"], fault["ranks"], fault["detail"]) for fault in run.events("fault")]
    assert told == [("exit", [1], "SIGKILL")] * len(ends)


def test_workers_killed_at_once_and_again_while_they_recover_are_recovered(counting: Counting, rounds: int):
    run = counting(steps=200, args={"holds": 150}, resilience={"give_up_after_same_step": 99}).start()
    run.reach(12)
    gone: set[int] = set()

    def strike(pid: int) -> bool:
        """Whether it was still there: a recovery, which ends all ranks, may have been quicker."""
        gone.add(pid)
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    first, second = wait_for(lambda: len(found := run.workers()) == 2 and found, "two workers").values()
    assert strike(first)
    strike(second)
    struck = 0
    while struck < 2 * rounds:
        pids = wait_for(lambda: [pid for pid in run.workers().values() if pid not in gone], "a worker that is new")
        struck += strike(pids[0])
    run.go_on()
    assert run.wait() == 0, run.output + run.logs()
    whole(run, 200)
    assert len(run.events("fault")) >= rounds + 1  # two that fall within one generation are one fault
    assert {event["fault_id"] for event in run.events("recovered")} == {event["fault_id"] for event in run.events("fault")}


def test_what_a_worker_had_started_goes_with_it_and_a_killed_fork_server_is_survived(counting: Counting):
    run = counting("with_children", steps=100, args={"holds": 80}).start()
    run.reach(12)
    pids = run.workers()
    children = psutil.Process(pids[0]).children() + psutil.Process(pids[1]).children()
    assert len(children) == 4
    os.kill(pids[0], signal.SIGKILL)
    wait_for(lambda: run.events("recovered"), "recovery")
    assert not [child for child in children if alive(child)]
    run.reach(min(run.step() + 5, 80))
    next(process for process in run.processes() if process.name() == "forkserver").kill()
    run.go_on()
    assert run.wait() == 0, run.output + run.logs()
    whole(run, 100)
    assert not run.processes()


def test_exceptions_and_exits_are_told_as_what_they_are_and_recovered_from(counting: Counting):
    words = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus."
    run = counting(args={"turns": [{"raise_at": 15}, {"exit_at": 25}, {"exit_at": 35, "last_words": words}]})
    assert run.run() == 0, run.output + run.logs()
    whole(run, 60)
    raised, ended, fallen = run.events("fault")
    assert (raised["kind"], raised["ranks"], raised["step"]) == ("exception", [1], 15)
    assert "bad sample at step 15" in raised["evidence"]
    assert [event["lost_steps"] for event in run.events("recovered")] == [4, 4, 4]
    assert (ended["kind"], ended["ranks"], ended["detail"]) == ("exit", [1], "exit code 3")
    # The last lines of its log explain a rank that left without an exception.
    assert (fallen["class"], fallen["ranks"]) == ("node", [1])
    assert fallen["detail"] == "exit code 3; a GPU has fallen off the bus (Xid 79)"
    assert fallen["evidence"].endswith(words)


def test_the_same_exception_three_times_gives_up_with_the_culprits_traceback_and_a_page_that_names_its_line(counting: Counting):
    run = counting(args={"raise_at": 15})
    assert run.run() == 70
    assert "ValueError: bad sample at step 15" in run.output
    assert "Connection closed by peer" not in run.output  # the victim's
    assert [event["name"] for event in run.events("action")] == ["restart_workers", "restart_workers", "give_up"]
    assert all(fault["ranks"] == [1] for fault in run.events("fault"))
    page = (run.run_dir / "diagnosis.md").read_text()
    line = 1 + Path(__file__).with_name("toys.py").read_text().split("raise ValueError")[0].count("\n")
    assert re.search(rf"raised in: \S*/toys.py:{line} in count", page)
    assert "Traceback (most recent call last)" in page
    assert "step 10 is the newest" in page
    assert f"toys.py:{line} in count" in run.output
    assert "raise ValueError" in run.output


def test_the_restart_budget_ends_the_run(counting: Counting):
    run = counting(args={"raise_at": 15}, resilience={"max_restarts_per_hour": 1, "give_up_after_same_step": 9})
    assert run.run() == 70
    assert "max_restarts_per_hour" in run.output


@pytest.mark.soak
def test_an_error_before_the_first_step_gives_up_soon(counting: Counting):
    run = counting("no_such_module")
    assert run.run() == 70
    assert "a_module_that_is_not_there" in run.output


@pytest.mark.soak
def test_an_agent_killed_at_any_moment_is_replaced_and_leaves_no_gap_and_no_double_in_the_metrics(counting: Counting, rounds: int):
    run = counting(steps=2000, every_steps=5, args={"step_s": 0.001}, resilience={"give_up_after_same_step": 99}).start()
    chance = random.Random(rounds)
    for kill in range(rounds):
        run.reach(run.step() + chance.randrange(20, 60))
        wait_for(lambda: run.agents().get(0), "the agent").kill()
        wait_for(lambda kill=kill: len(run.events("recovered")) > kill, "recovery")
    run.reach(run.step() + 20)
    run.signal(signal.SIGTERM)
    assert run.wait() == 75, run.output + run.logs()
    assert [fault["kind"] for fault in run.events("fault")] == ["node_lost"] * rounds
    assert [action["name"] for action in run.events("action")] == ["replace_node"] * rounds
    whole(run, max(run.losses()))
    keys = [(line["generation"], line["step"]) for line in run.metrics()]
    assert len(set(keys)) == len(keys)
    assert not list(run.run_dir.glob(".spill/*"))
    assert not regions(run)


@pytest.mark.soak
def test_two_agents_on_one_machine_are_two_nodes(counting: Counting):
    run = counting(cluster={"nodes": 2, "procs_per_node": 1}, steps=80, args={"holds": 60}).start()
    run.reach(12)
    os.kill(run.workers()[1], signal.SIGKILL)
    wait_for(lambda: run.events("recovered"), "recovery")
    run.reach(min(run.step() + 5, 60))
    wait_for(lambda: run.agents().get(1), "the agent").kill()
    run.go_on()
    assert run.wait() == 0, run.output + run.logs()
    whole(run, 80)
    assert [fault["kind"] for fault in run.events("fault")] == ["exit", "node_lost"]
    assert [fault["nodes"] for fault in run.events("fault")] == [[1], [1]]


@pytest.mark.soak
def test_an_agent_without_word_from_its_driver_ends_its_workers_and_one_that_is_stopped_is_replaced(counting: Counting):
    run = counting(steps=150, args={"holds": 120}, resilience={"fence_s": 5.0, "lost_s": 8.0}).start()
    run.reach(12)
    run.signal(signal.SIGSTOP)
    wait_for(lambda: not run.workers(), "the fence")
    run.signal(signal.SIGCONT)
    wait_for(lambda: run.events("recovered"), "recovery")
    assert "fenced" in (run.run_dir / "logs/agent0.log").read_text()
    run.reach(min(run.step() + 10, 120))
    agent = run.agents()[0]
    agent.suspend()
    run.go_on()
    assert run.wait() == 0, run.output + run.logs()
    whole(run, 150)
    assert [fault["kind"] for fault in run.events("fault")] == ["node_lost", "node_lost"]
    assert "silent for" in run.events("fault")[1]["detail"]
    assert not alive(agent)
