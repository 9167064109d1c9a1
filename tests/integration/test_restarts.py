"""Ranks, agents and fork servers that end or stand still: each is told and started again, and nothing that is computed is lost."""

import os
import random
import signal
from collections.abc import Callable

import psutil
import pytest
from campaigns import Campaign, alive, regions, wait_for, whole

from resilient.account import account

Counting = Callable[..., Campaign]


def test_killed_workers_cost_a_generation_each_and_nothing_else(counting: Counting, rounds: int):
    steps = 25 + 15 * rounds
    run = counting(steps=steps, resilience={"give_up_after_same_step": 9}).start()
    chance = random.Random(rounds)
    for kill in range(rounds):
        run.reach(8 + 15 * kill)
        wait_for(lambda kill=kill: len(run.events("recovered")) >= kill, "recovery from the kill before")
        pids = wait_for(lambda: len(found := run.workers()) == 2 and found, "two workers")
        os.kill(pids[chance.randrange(2)], signal.SIGKILL)
    assert run.wait() == 0, run.output + run.logs()
    whole(run, steps)
    faults = run.events("fault")
    assert [fault["kind"] for fault in faults] == ["exit"] * rounds
    assert all(fault["detail"] == "SIGKILL" for fault in faults)
    assert len(run.events("recovered")) == rounds
    assert run.events("generation_started")[-1]["generation"] == rounds + 1
    found, events = account(run.events(), run.metrics()), run.events()
    assert found.rank_s == pytest.approx(2 * (events[-1]["t"] - events[0]["t"]), rel=0.005)
    assert [incident.fault_id for incident in found.incidents] == [fault["fault_id"] for fault in faults]
    assert all(incident.lost_steps is not None and incident.seconds["restart"] > 0 for incident in found.incidents)


def test_the_rank_that_was_killed_is_the_one_that_is_named(counting: Counting):
    run = counting(steps=80).start()
    for kill, rank in enumerate((1, 0)):
        run.reach(10 + 30 * kill)
        pids = wait_for(lambda: len(found := run.workers()) == 2 and found, "two workers")
        os.kill(pids[rank], signal.SIGKILL)
        wait_for(lambda kill=kill: len(run.events("recovered")) > kill, "recovery")
    assert run.wait() == 0
    assert [fault["ranks"] for fault in run.events("fault")] == [[1], [0]]


@pytest.mark.parametrize("ends", ["wraps", "cleans up", "exits"])
def test_a_rank_that_lost_its_peer_is_not_blamed_however_it_ends(counting: Counting, ends: str):
    """As torch's pipeline wraps the error, as a script's clean-up fails after it, as a script that catches it leaves."""
    run = counting("bereft", steps=6, args={"ends": ends})
    assert run.run() == 0, run.output + run.logs()
    assert [(fault["kind"], fault["ranks"], fault["detail"]) for fault in run.events("fault")] == [("exit", [1], "SIGKILL")]


def test_both_workers_killed_at_once_is_survived(counting: Counting):
    run = counting().start()
    run.reach(15)
    for pid in run.workers().values():
        os.kill(pid, signal.SIGKILL)
    assert run.wait() == 0
    whole(run, 60)


def test_workers_killed_again_while_they_recover_are_recovered_again(counting: Counting, rounds: int):
    run = counting(steps=60, resilience={"give_up_after_same_step": 99}).start()
    run.reach(12)
    killed: set[int] = set()
    for _ in range(2 * rounds):
        pids = wait_for(lambda: [pid for pid in run.workers().values() if pid not in killed], "a worker that is new")
        os.kill(pids[0], signal.SIGKILL)
        killed.add(pids[0])
    assert run.wait() == 0, run.output + run.logs()
    whole(run, 60)
    assert len(run.events("fault")) >= rounds  # two that fall within one generation are one fault
    assert {event["fault_id"] for event in run.events("recovered")} == {event["fault_id"] for event in run.events("fault")}


def test_what_a_worker_had_started_goes_with_it(counting: Counting):
    run = counting("with_children", steps=60).start()
    run.reach(12)
    pids = run.workers()
    children = psutil.Process(pids[0]).children() + psutil.Process(pids[1]).children()
    assert len(children) == 4
    os.kill(pids[0], signal.SIGKILL)
    wait_for(lambda: run.events("recovered"), "recovery")
    assert not [child for child in children if alive(child)]
    run.signal(signal.SIGTERM)
    run.wait()
    assert not run.processes()


def test_an_exception_once_is_recovered_from(counting: Counting):
    run = counting(args={"raise_at": 15, "once": True})
    assert run.run() == 0
    whole(run, 60)
    (fault,) = run.events("fault")
    assert (fault["kind"], fault["ranks"], fault["step"]) == ("exception", [1], 15)
    assert "bad sample at step 15" in fault["evidence"]
    assert run.events("recovered")[0]["lost_steps"] == 4


def test_the_same_exception_three_times_gives_up_with_the_culprits_traceback(counting: Counting):
    run = counting(args={"raise_at": 15})
    assert run.run() == 70
    assert "ValueError: bad sample at step 15" in run.output
    assert "Connection closed by peer" not in run.output  # the victim's
    assert [event["name"] for event in run.events("action")] == ["restart_workers", "restart_workers", "give_up"]
    assert all(fault["ranks"] == [1] for fault in run.events("fault"))


def test_an_exit_with_a_status_is_a_fault(counting: Counting):
    run = counting(args={"exit_at": 15, "once": True})
    assert run.run() == 0
    assert run.events("fault")[0]["detail"] == "exit code 3"


def test_the_last_lines_of_its_log_explain_a_rank_that_left_without_an_exception(counting: Counting):
    words = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus."
    run = counting(args={"exit_at": 15, "once": True, "last_words": words})
    assert run.run() == 0
    (fault,) = run.events("fault")
    assert (fault["class"], fault["ranks"]) == ("node", [1])
    assert fault["detail"] == "exit code 3; a GPU has fallen off the bus (Xid 79)"
    assert fault["evidence"].endswith(words)


def test_the_restart_budget_ends_the_run(counting: Counting):
    run = counting(args={"raise_at": 15}, resilience={"max_restarts_per_hour": 1, "give_up_after_same_step": 9})
    assert run.run() == 70
    assert "max_restarts_per_hour" in run.output


def test_an_error_before_the_first_step_gives_up_soon(counting: Counting):
    run = counting("no_such_module")
    assert run.run() == 70
    assert "a_module_that_is_not_there" in run.output


def test_a_killed_agent_is_started_again(counting: Counting):
    run = counting(steps=80).start()
    run.reach(12)
    agent = run.agents()[0]
    agent.kill()
    assert run.wait() == 0, run.output + run.logs()
    whole(run, 80)
    assert run.events("fault")[0]["kind"] == "node_lost"
    assert run.events("action")[0]["name"] == "replace_node"


def test_an_agent_killed_at_any_moment_leaves_no_gap_and_no_double_in_the_metrics(counting: Counting, rounds: int):
    run = counting(steps=2000, every_steps=5, args={"step_s": 0.001}, resilience={"give_up_after_same_step": 99}).start()
    chance = random.Random(rounds)
    for kill in range(rounds):
        run.reach(run.step() + chance.randrange(20, 60))
        wait_for(lambda: run.agents().get(0), "the agent").kill()
        wait_for(lambda kill=kill: len(run.events("recovered")) > kill, "recovery")
    run.reach(run.step() + 20)
    run.signal(signal.SIGTERM)
    assert run.wait() == 75, run.output + run.logs()
    whole(run, max(run.losses()))
    keys = [(line["generation"], line["step"]) for line in run.metrics()]
    assert len(set(keys)) == len(keys)
    assert not list(run.run_dir.glob(".spill/*"))
    assert not regions(run)


def test_a_killed_fork_server_is_survived(counting: Counting):
    run = counting(steps=80).start()
    run.reach(12)
    server = next(p for p in run.processes() if p.name() == "forkserver")
    server.kill()
    assert run.wait() == 0, run.output + run.logs()
    whole(run, 80)


def test_two_agents_on_one_machine_are_two_nodes(counting: Counting):
    run = counting(cluster={"nodes": 2, "procs_per_node": 1}, steps=80).start()
    run.reach(12)
    os.kill(run.workers()[1], signal.SIGKILL)
    wait_for(lambda: run.events("recovered"), "recovery")
    run.reach(run.step() + 5)
    run.agents()[1].kill()
    assert run.wait() == 0, run.output + run.logs()
    whole(run, 80)
    assert [fault["kind"] for fault in run.events("fault")] == ["exit", "node_lost"]
    assert [fault["nodes"] for fault in run.events("fault")] == [[1], [1]]


def test_an_agent_without_word_from_its_driver_ends_its_workers(counting: Counting):
    run = counting(steps=120, resilience={"fence_s": 2.0}).start()
    run.reach(12)
    run.signal(signal.SIGSTOP)
    wait_for(lambda: not run.workers(), "the fence", 20.0)
    run.signal(signal.SIGCONT)
    assert run.wait() == 0, run.output + run.logs()
    whole(run, 120)
    assert "fenced" in (run.run_dir / "logs/agent0.log").read_text()
    assert [fault["kind"] for fault in run.events("fault")] == ["node_lost"]


def test_an_agent_that_is_stopped_is_replaced(counting: Counting):
    run = counting(steps=120, resilience={"fence_s": 1.0}).start()
    run.reach(12)
    agent = run.agents()[0]
    agent.suspend()
    assert run.wait() == 0, run.output + run.logs()
    whole(run, 120)
    assert "silent for" in run.events("fault")[0]["detail"]
    assert not alive(agent)
