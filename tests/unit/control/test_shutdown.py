"""Stops, drains, and how long they may take."""

from dataclasses import replace

import pytest
from control_play import flush, shard

from checkpoint.protocol import Inventory, Sync
from resilient.config.timeouts import SETTLE_S
from resilient.control.coordinator import State
from resilient.control.shutdown import ASK_S
from resilient.exits import Exit
from resilient.outbox import Finish
from resilient.protocol.messages import (
    Arm,
    Propose,
    Proposed,
    Record,
    ReplaceDaemon,
    Shutdown,
    Started,
)
from resilient.recovery.faults import Raised

BUG = Raised("ValueError", "boom", "culprit's traceback", 9.2)


def test_a_stop_is_proposed_to_all_then_armed_beyond_every_checked_boundary(play):
    effects = play.do("stop", "SIGTERM")
    assert [send.node for send in play.sent(Propose, effects)] == [0, 1]
    assert not play.deliver(0, Proposed(generation=5, checked=41))
    effects = play.deliver(1, Proposed(generation=5, checked=42))
    assert [(send.node, send.message.target) for send in play.sent(Arm, effects)] == [(0, 43), (1, 43)]
    assert not play.deliver(1, Proposed(generation=5, checked=50))  # armed once and for all
    for rank in (0, 1):
        play.exit(rank, 0, stopped=True, step=43)
    assert play.finish().code is Exit.STOPPED
    assert play.events("drain")[0]["step"] == 43


def test_ranks_that_reach_the_target_while_a_stop_is_under_way_have_succeeded(play):
    play.do("stop", "SIGTERM")
    for rank in (0, 1):
        play.exit(rank, 0, stopped=False, step=300)
    assert play.finish().code is Exit.OK


def test_a_run_that_ends_before_the_last_heartbeat_names_the_step_of_the_last_metrics(play):
    play.beat(0, 41)
    play.report(0, records=(Record(0, 1001.0, None, {"step": 42, "loss": 1.0}),))
    play.beat(0, 41)
    play.do("run_out", "time_limit", "0 s are left", until_t=play.now - 5.0)
    play.wait(1)
    assert play.finish().code is Exit.STOPPED
    assert play.events("drain")[0]["step"] == 42
    assert play.events("run_finished")[0]["step"] == 42


def test_a_second_stop_ends_at_once(play):
    play.do("stop", "SIGINT")
    play.do("stop", "SIGINT")
    assert play.finish().code is Exit.STOPPED
    assert len(play.sent(Shutdown)) == 2


def test_a_run_that_is_given_up_is_no_stop_however_often_one_is_asked_for_while_it_saves(play):
    play.silent_daemons = {0, 1}
    for node in (0, 1):
        play.held(node, 7)
    play.exit(0, 1, replace(BUG, final=int(Exit.GAVE_UP)))
    assert play.coordinator.state is State.SAVING
    for _ in range(2):
        play.do("stop", "SIGINT")
    end = play.finish()
    assert end.code is Exit.GAVE_UP
    assert "a second SIGINT" in end.message and "boom" in end.message


def test_a_stop_between_generations_ends_at_once(play):
    play.exit(1)
    play.do("stop", "SIGTERM")
    assert play.finish().code is Exit.STOPPED


def test_a_stop_asked_for_before_the_workers_exist_is_proposed_to_them_once_they_do(play):
    play.do("stop", "SIGTERM")
    assert [send.node for send in play.sent(Propose, play.deliver(1, Started(generation=5, pids={})))] == [1]


def test_a_drain_that_takes_too_long_is_cut(play):
    play.do("stop", "SIGTERM")
    assert not play.wait(19)
    play.wait(2)
    assert play.finish().code is Exit.STOPPED
    assert 20.0 <= play.events("drain")[0]["took_s"] <= 20.5


def test_the_end_of_the_jobs_time_is_a_fault_of_its_own_and_drains_until_then(play):
    effects = play.do("run_out", "time_limit", "20 s are left", until_t=play.now + 15)
    assert [send.node for send in play.sent(Propose, effects)] == [0, 1]
    (fault,), (action,) = play.events("fault"), play.events("action")
    assert (fault["kind"], fault["ranks"], action["name"]) == ("time_limit", [], "finish_drain")
    play.wait(16)
    assert play.finish().code is Exit.STOPPED
    assert {"signal": "time_limit", "deadline_s": 15.0}.items() <= play.events("drain")[0].items()


def test_a_drain_that_is_under_way_hurries_when_there_is_less_time_and_never_takes_longer(play):
    play.do("stop", "SIGTERM")
    assert not play.do("run_out", "preempted", "the nodes are wanted", until_t=play.now + 10)
    play.coordinator.hurry(play.now + 100)
    play.wait(9)
    assert play.coordinator.state is not State.FINISHED
    play.wait(2)
    assert play.finish().code is Exit.STOPPED
    assert play.events("fault") == []


def test_what_a_drain_takes_is_known_once_a_step_a_copy_and_a_flush_were_measured(play):
    assert play.coordinator.drain_estimate_s() is None
    for step in (1, 2):
        play.wait(3)
        for node in (0, 1):
            play.beat(node, step)
            play.held(node, step)
    assert play.coordinator.drain_estimate_s() is None  # nothing was ever flushed
    flush(play, 3, seconds=2.0)  # 200 bytes
    assert play.coordinator.drain_estimate_s() == pytest.approx(3.0 + 0.01 + 2.0)


def test_a_fault_during_a_drain_ends_with_what_is_durable(play):
    play.do("stop", "SIGTERM")
    play.exit(1)
    assert play.events("action")[0]["name"] == "finish_drain"
    assert play.finish().code is Exit.STOPPED


def ended_well(play, step: int) -> None:
    """All workers have ended, and the last snapshot is in memory alone."""
    for node in (0, 1):
        play.held(node, step)
    for rank in (0, 1):
        play.exit(rank, 0, stopped=False, step=step)


def inventory(play, node: int, step: int):
    """What another daemon of a node finds."""
    return play.news(node, Inventory(generation=5, address=f"10.0.0.{node}:9", shards=(shard(step, node),)))


def test_a_daemon_that_is_silent_at_the_end_is_replaced_and_what_it_held_is_flushed(play):
    play.silent_daemons = {1}
    ended_well(play, 60)
    assert not play.sent(ReplaceDaemon, play.wait(SETTLE_S - 1))
    assert [send.node for send in play.sent(ReplaceDaemon, play.wait(2))] == [1]
    (fault,), (action,) = play.events("fault"), play.events("action")
    assert (fault["kind"], fault["nodes"], action["fault_id"]) == ("storage", [1], fault["fault_id"])
    assert "snapshot daemon of node 1 has not answered for 30 s" in fault["detail"]
    assert not play.jobs("flush")
    play.silent_daemons = set()
    inventory(play, 1, 60)
    assert [event["fault_id"] for event in play.events("recovered")] == [fault["fault_id"]]
    request = play.jobs("flush")[0][1]
    play.flushed(request)
    play.committed(request)
    assert play.finish().code is Exit.OK


def test_where_the_next_daemon_is_silent_too_the_job_ends_and_says_what_is_not_durable(play):
    play.silent_daemons = {0, 1}
    ended_well(play, 60)
    play.wait(2 * SETTLE_S + 2 + play.job.drain_s)
    finish = play.finish()
    assert finish.code is Exit.UNUSABLE and "step 60 could not be made durable" in finish.message
    assert {fault["kind"] for fault in play.events("fault")} == {"storage"}
    assert len(play.sent(ReplaceDaemon)) == 2, "once for each node"


def test_a_stop_whose_newest_step_cannot_be_made_durable_in_time_is_a_stop_and_says_which_step_is(play):
    play.do("stop", "SIGTERM")
    for node in (0, 1):
        play.held(node, 43)
    for rank in (0, 1):
        play.exit(rank, 0, stopped=True, step=43)
    assert play.coordinator.state is State.SAVING
    play.wait(play.job.drain_s + 1)
    end = play.finish()
    assert end.code is Exit.STOPPED
    assert "step 43 could not be made durable" in end.message and "where step 0 is the newest" in end.message


def test_a_daemon_that_stops_while_it_flushes_is_replaced(play):
    ended_well(play, 60)
    (_, request), *_ = play.jobs("flush")
    assert not play.sent(ReplaceDaemon, play.wait(10 * SETTLE_S)), "it may take as long as it takes while daemons answer"
    play.silent_daemons = {0}
    play.flushed(request, nodes=(1,))
    assert [send.node for send in play.sent(ReplaceDaemon, play.wait(2 * SETTLE_S + 2))] == [0]


def drained(play, step: int) -> None:
    """All workers have stopped at the step of which the last snapshot is in memory alone."""
    play.do("stop", "SIGTERM")
    for node in (0, 1):
        play.deliver(node, Proposed(generation=5, checked=step - 1))
        play.held(node, step)
    for rank in (0, 1):
        play.exit(rank, 0, stopped=True, step=step)


def test_after_a_drain_daemons_are_asked_at_once_for_no_worker_is_left(play):
    drained(play, 60)
    assert {node for node, _ in play.requests(Sync)} == {0, 1}
    (_, request), *_ = play.jobs("flush")
    play.flushed(request)
    play.committed(request)
    (finish,) = [effect for effect in play.effects if isinstance(effect, Finish)]
    assert finish.code is Exit.STOPPED, "and nobody waits for agents to be ready"


def test_a_daemon_is_asked_though_its_agent_never_says_that_the_workers_are_gone(play):
    for node in (0, 1):
        play.held(node, 60)
    play.do("stop", "SIGTERM")
    play.wait(play.job.drain_s - 6)  # the workers do not stop in time: they are ended
    assert play.coordinator.state is State.SAVING and not play.jobs("flush")
    play.wait(ASK_S + 1)
    (_, request), *_ = play.jobs("flush")
    play.flushed(request)
    play.committed(request)
    assert play.finish().code is Exit.STOPPED


def test_a_daemon_that_is_silent_in_a_drain_is_replaced_while_there_is_time(play):
    play.silent_daemons = {1}
    drained(play, 60)
    assert [send.node for send in play.sent(ReplaceDaemon, play.wait(play.job.drain_s / 2 + 1))] == [1]
    play.silent_daemons = set()
    inventory(play, 1, 60)
    (_, request), *_ = play.jobs("flush")
    play.flushed(request)
    play.committed(request)
    assert play.finish().code is Exit.STOPPED


def test_a_driver_that_was_away_while_it_drained_blames_no_daemon(play):
    play.silent_daemons = {1}
    drained(play, 60)
    play.now += 19.0
    play.do("tick")
    assert not play.sent(ReplaceDaemon) and not play.events("fault")


def test_what_a_node_held_whose_agent_is_replaced_at_the_end_is_waited_for(play):
    play.silent_daemons = {1}
    ended_well(play, 60)
    play.do("lost", 1, "killed")
    play.silent_daemons = set()
    play.hello(1)  # its checks take a while, until when nobody knows what it holds
    play.wait(ASK_S + 1)
    assert play.coordinator.state is State.SAVING, "what it holds is not known yet"
    play.ready(1, shards=[shard(60, 1)])
    (_, request), *_ = play.jobs("flush")
    play.flushed(request)
    play.committed(request)
    assert play.finish().code is Exit.OK


def test_a_target_whose_state_is_lost_with_a_node_at_the_end_is_not_reached(play):
    play.silent_daemons = {1}
    ended_well(play, 60)
    play.do("lost", 1, "its host is gone")
    play.wait(300)
    assert play.finish().code is Exit.UNUSABLE
    assert "node 1" in play.finish().message and "step 60" in play.finish().message, play.finish().message
