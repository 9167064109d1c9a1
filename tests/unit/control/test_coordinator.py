"""Courses of events played through the coordinator, without a process: generations, faults, the end."""

import pytest
from control_play import VICTIM, Play, beat

from checkpoint.protocol import Retain
from resilient import entries
from resilient.config.timeouts import FENCE_RAISE_S
from resilient.control.coordinator import State
from resilient.control.ends import ANSWER_S, FAILING_S, SETTLE_S
from resilient.control.membership import LAUNCH_ATTEMPTS, STUCK_S
from resilient.exits import Exit
from resilient.ledger import event_entry
from resilient.outbox import AcknowledgeRecords, Finish, Launch, RaiseFence, RequestDaemon, Send, WriteEvent, WriteMetrics
from resilient.protocol.messages import FindEnds, Propose, Record, Shutdown, SignalReceived, Start, Stop
from resilient.recovery.faults import Raised

BUG = Raised("ValueError", "boom", "culprit's traceback", 9.2)


def test_a_generation_starts_only_when_all_are_ready_and_the_data_is_prepared():
    play = Play()
    play.do("begin")
    play.join(0)
    assert not play.sent(Start)
    play.join(1)
    assert not play.sent(Start)
    play.do("prepared")
    assert [send.node for send in play.sent(Start)] == [0, 1]


def test_generations_count_on_from_the_last_one_and_raise_the_fence_first(play):
    fences = [i for i, e in enumerate(play.effects) if e == RaiseFence(5, FENCE_RAISE_S)]
    starts = [i for i, e in enumerate(play.effects) if isinstance(e, Send) and isinstance(e.message, Start)]
    assert len(fences) == 1
    assert fences[0] < starts[0]


def test_all_ranks_are_sent_to_the_store_of_node_rank_0(play):
    messages = [send.message for send in play.sent(Start)]
    assert {(m.master_addr, m.master_port) for m in messages} == {("10.0.0.0", 5000)}
    assert [m.node_rank for m in messages] == [0, 1]
    assert [m.collective_timeout_s for m in messages] == [620.0, 620.0]


def test_a_killed_worker_stops_all_nodes_and_the_next_generation_has_a_new_store(play):
    play.beat(0, 7)
    effects = play.exit(1)
    assert [send.node for send in play.sent(Stop, effects)] == [0, 1]
    play.ready(0, 6000)
    effects = play.ready(1, 6001)
    assert {m.message.generation for m in play.sent(Start, effects)} == {6}
    assert {m.message.master_port for m in play.sent(Start, effects)} == {6000}
    (fault,) = play.events("fault")
    assert (fault["kind"], fault["ranks"], fault["step"]) == ("exit", [1], 8)
    assert play.events("action")[0]["name"] == "restart_workers"


def test_a_victim_waits_for_the_culprit_and_the_culprit_is_blamed(play):
    assert not play.sent(Stop, play.exit(0, 1, VICTIM))
    play.wait(0.01)
    assert play.sent(Stop, play.exit(1, 1, BUG))
    assert play.events("fault")[0]["ranks"] == [1]
    assert play.events("fault")[0]["evidence"] == "culprit's traceback"


def test_a_rank_that_nccls_watchdog_ended_waits_for_the_culprit_as_well(play):
    log = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580)\n"
    assert not play.sent(Stop, play.exit(0, -6, log=log))
    assert play.sent(Stop, play.exit(1, -9))
    assert play.events("fault")[0]["ranks"] == [1]


def test_a_fault_is_written_with_the_class_of_its_cause(play):
    play.exit(1, -9, log="slurmstepd: error: Detected 1 oom_kill event in StepId=1130.0.\n")
    assert play.events("fault")[0]["class"] == "deterministic"


def test_a_rank_that_has_left_its_peers_with_status_0_is_blamed(play):
    play.exit(1, 0)
    play.exit(0, 1, VICTIM)
    assert play.sent(Stop, play.wait(SETTLE_S + 0.01))
    (fault,) = play.events("fault")
    assert (fault["ranks"], fault["class"]) == ([1], None) and fault["detail"].startswith("exit code 0")


def test_a_rank_that_has_ended_as_it_was_asked_to_is_not_blamed(play):
    play.exit(1, 0, stopped=True)
    play.exit(0, 1, VICTIM)
    play.wait(SETTLE_S + 0.01)
    assert play.events("fault")[0]["ranks"] == [0]


def test_a_victim_alone_is_blamed_after_a_moment(play):
    play.exit(0, 1, VICTIM)
    assert not play.sent(Stop, play.do("tick"))
    assert play.sent(Stop, play.wait(SETTLE_S + 0.01))
    assert play.events("fault")[0]["ranks"] == [0]


def test_nobody_is_blamed_before_all_nodes_have_said_which_of_their_workers_have_failed(play):
    play.slow_agents = {0, 1}
    asked = play.exit(0, 1, VICTIM)
    assert [send.node for send in play.sent(FindEnds, asked)] == [0, 1]
    assert not play.sent(FindEnds, play.ends_found(0))
    assert not play.sent(Stop, play.wait(SETTLE_S + 1.0))
    assert play.sent(Stop, play.exit(1, -9))
    assert play.events("fault")[0]["ranks"] == [1]


def test_once_all_nodes_have_told_of_no_other_end_the_victim_is_blamed_after_its_moment(play):
    play.slow_agents = {1}
    play.exit(0, 1, VICTIM)
    assert not play.sent(Stop, play.wait(SETTLE_S + 1.0))
    play.ends_found(1)
    assert play.sent(Stop, play.do("tick"))
    assert play.events("fault")[0]["ranks"] == [0]


def test_a_node_that_does_not_say_which_of_its_workers_have_failed_is_not_waited_for_for_ever(play):
    play.slow_agents = {1}
    play.exit(0, 1, VICTIM)
    assert not play.sent(Stop, play.wait(ANSWER_S - 0.1))
    assert play.sent(Stop, play.wait(0.3))
    assert play.events("fault")[0]["ranks"] == [0]


def test_the_peers_of_a_node_whose_agent_fails_are_not_blamed_while_it_ends_its_workers(play):
    play.do("failing", 1)
    play.exit(0, 1, VICTIM)
    assert not play.sent(Stop, play.wait(SETTLE_S + 5.0))
    play.do("lost", 1, "it has failed: OSError: no space")
    (fault,) = play.events("fault")
    assert (fault["kind"], fault["nodes"], fault["ranks"]) == ("node_lost", [1], [1])
    assert "no space" in fault["detail"]


def test_the_peers_of_a_node_whose_agent_never_goes_although_it_said_so_are_blamed_in_the_end(play):
    play.do("failing", 1)
    play.exit(0, 1, VICTIM)
    play.wait(FAILING_S + 1.0)
    assert [(fault["kind"], fault["ranks"]) for fault in play.events("fault")] == [("exception", [0])]


def test_a_node_that_answers_and_is_never_ready_is_lost_and_launched_again():
    play = Play()
    play.do("begin")
    play.do("prepared")
    play.join(0)
    play.hello(1)
    assert Launch(1) not in play.wait(STUCK_S - 1.0)
    assert Launch(1) in play.wait(2.0)
    (fault,) = play.events("fault")
    assert (fault["kind"], fault["nodes"]) == ("node_lost", [1])
    assert "was not ready within 600 s" in fault["detail"]
    play.join(1)
    assert [send.node for send in play.sent(Start)] == [0, 1]
    play.wait(2 * STUCK_S)
    assert len(play.events("fault")) == 1


def test_a_peer_that_was_blamed_is_not_heard_any_more_once_the_run_is_given_up():
    play = Play(give_up_after_same_step=1)
    play.start()
    play.exit(0, 1, VICTIM)
    play.do("lost", 1, "its connection was closed")
    play.wait(SETTLE_S + 5.0)
    assert [action["name"] for action in play.events("action")] == ["give_up"]
    assert len(play.events("fault")) == 1


def test_ends_after_the_decision_are_no_new_fault(play):
    play.exit(1)
    play.exit(0, 1, VICTIM)
    play.wait(1)
    assert len(play.events("fault")) == 1


def test_recovery_is_told_with_downtime_and_lost_steps_at_the_first_new_step(play):
    play.resumed(0)
    play.beat(0, 7)
    play.exit(1)
    for node in (0, 1):
        play.ready(node, 6000)
    play.resumed(5)
    play.wait(0.8)
    play.beat(0, 6)
    play.beat(1, 6)
    (recovered,) = play.events("recovered")
    assert recovered == {"fault_id": "g5-1", "incident_id": "g5-1", "step": 6, "downtime_s": 0.8, "lost_steps": 2}


def test_a_fault_during_recovery_is_a_fault_of_its_own_and_both_are_recovered(play):
    play.exit(1)
    for node in (0, 1):
        play.ready(node, 6000)
    play.exit(0, step=-1)
    for node in (0, 1):
        play.ready(node, 6000)
    play.wait(0.6)
    play.beat(0, 1)
    assert [e["fault_id"] for e in play.events("recovered")] == ["g5-1", "g6-2"]


def test_a_lost_node_is_launched_again_and_the_others_stop(play):
    effects = play.do("lost", 1, "process 9 ended by SIGKILL")
    assert Launch(1) in effects
    assert [send.node for send in play.sent(Stop, effects)] == [0]
    play.ready(0, 6000)
    assert not play.sent(Start)[2:]
    play.join(1)
    assert len(play.sent(Start)) == 4
    assert play.events("fault")[0]["kind"] == "node_lost"


def test_a_silent_node_is_lost(play):
    play.wait(29, silent=[1])
    assert not play.events("fault")
    play.wait(2, silent=[1])
    assert play.events("fault")[0]["nodes"] == [1]


def test_a_restart_without_progress_is_held_back_with_growing_pauses_until_the_step_is_finished(play):
    play.exit(1)
    assert play.sent(Start, play.again())
    for pause_s in (0.5, 1.0, 2.0):
        play.exit(1, -len(play.events("fault")))
        assert f"in {pause_s:g} s" in play.events("action")[-1]["reason"]
        assert not play.sent(Start, play.again())
        assert not play.sent(Start, play.wait(pause_s - 0.01))
        assert play.sent(Start, play.wait(0.02))
    play.exit(1, step=8)
    assert play.sent(Start, play.again())


def test_a_stop_does_not_wait_for_a_restart_that_is_held_back(play):
    for _ in range(2):
        play.exit(1)
        play.again()
    play.do("stop", "SIGTERM")
    assert play.finish().code is Exit.STOPPED


def test_the_same_failure_at_the_same_step_ends_with_the_culprits_traceback(play):
    for _ in range(3):
        play.exit(1, 1, BUG)
        play.again()
        play.wait(1.0)
    assert play.finish().code is Exit.GAVE_UP
    assert "culprit's traceback" in play.finish().message
    assert len(play.sent(Shutdown)) == 2
    assert play.events("run_finished")[0]["exit_code"] == 70


def test_what_trying_again_cannot_help_ends_at_once_with_its_message_alone(play):
    play.exit(1, 1, Raised("UnrecoverableError", "all checkpoints are damaged", "a traceback", 9.0, final=70))
    assert play.finish() == Finish(Exit.GAVE_UP, "all checkpoints are damaged")


def test_a_config_that_a_rank_finds_wrong_is_a_config_error(play):
    play.exit(1, 1, Raised("ConfigError", "model.attention = sdpa_flash: ...", "a traceback", 9.0, final=78))
    assert play.finish().code is Exit.CONFIG


def test_all_ranks_done_is_the_end_with_success(play):
    play.beat(0, 300)
    play.exit(0, 0, step=300)
    assert play.coordinator.state is State.RUNNING
    play.exit(1, 0, step=300)
    assert play.finish() == Finish(Exit.OK, "")
    assert play.events("run_finished") == [{"exit_code": 0, "step": 300}]


def test_an_agent_that_never_starts_makes_the_environment_unusable():
    play = Play()
    play.do("begin")
    for _ in range(LAUNCH_ATTEMPTS):
        play.do("lost", 0, "exit code 1")
    assert play.finish().code is Exit.UNUSABLE
    (fault,) = play.events("fault")
    assert (fault["kind"], fault["nodes"], fault["ranks"]) == ("node_lost", [0], [])
    assert fault["detail"] == "the agent of node 0 does not start: exit code 1"


def test_a_signal_that_an_agent_got_is_the_drivers(play):
    assert play.sent(Propose, play.deliver(0, SignalReceived(generation=5, name="SIGTERM")))


def test_metrics_and_events_of_workers_are_written_with_their_own_time_and_host(play):
    effects = play.report(1, records=(Record(1, 12.5, None, {"step": 3}), Record(1, 13.5, "committed", {"step": 3})))
    assert effects == [
        WriteMetrics({"step": 3}, 5, 12.5),
        WriteEvent("committed", {"step": 3}, 5, 13.5, "n1"),
        AcknowledgeRecords(1, 2),
    ]


def test_nothing_happens_after_the_end(play):
    play.do("stop", "SIGINT")
    play.do("stop", "SIGINT")
    count = len(play.effects)
    play.exit(1)
    play.do("lost", 0, "x")
    play.do("tick")
    play.do("stop", "SIGINT")
    assert len(play.effects) == count


def test_the_generation_is_announced_once_with_the_step_it_resumed_from(play):
    play.resumed(20, "scratch")
    play.beat(0, 21)
    (started,) = play.events("generation_started")
    assert (started["resumed_step"], started["tier"], started["world_size"]) == (20, "scratch", 2)


def test_a_script_that_attaches_after_optimizers_have_stepped_has_snapshots(play):
    """As after a search for the learning rate: its steps were taken for those of a script that says nothing."""
    play.resumed(0, "script")
    play.beat(0, 30)
    play.resumed(5, "ram")
    assert any(isinstance(each, RequestDaemon) and isinstance(each.request, Retain) for each in play.effects)
    play.beat(0, 6)
    play.exit(0, step=6)
    assert [fault["step"] for fault in play.events("fault")] == [7], "what came before it is counted on no more"


@pytest.mark.parametrize(("first", "newest", "resumed"), [(1, 3, 0), (101, 140, 100), (0, 2, 0), (-1, 3, 2)])
def test_a_script_that_beats_and_says_no_more_went_on_from_before_its_first_step(play, first: int, newest: int, resumed: int):
    """Short steps are over before the first heartbeat; an agent that does not know the first one tells the newest alone."""
    play.report(0, heartbeats={0: beat(newest, play.now, first=(first, play.now))})
    (started,) = play.events("generation_started")
    assert started["resumed_step"] == resumed
    assert entries.is_event(event_entry("generation_started", started, generation=5, t=1.0, host="n0"))


def test_where_a_generation_goes_on_from_is_not_guessed_from_a_beat_that_overtakes_the_word_of_rank_0(play):
    play.beat(0, 9)
    play.exit(1, step=9)
    play.ready(0, 6000)
    play.ready(1, 6001)
    play.beat(1, 6)
    assert len(play.events("generation_started")) == 1
    play.resumed(5, "ram")
    play.beat(0, 6)
    started = play.events("generation_started")[1]
    assert (started["resumed_step"], started["tier"]) == (5, "ram")
    assert [recovered["lost_steps"] for recovered in play.events("recovered")] == [4]


def test_a_second_rank_that_raises_while_the_run_is_given_up_is_no_second_fault():
    play = Play(give_up_after_same_step=1)
    play.start()
    play.exit(0, 1, BUG)
    play.exit(1, 1, BUG)
    assert [action["name"] for action in play.events("action")] == ["give_up"]
    assert len(play.events("fault")) == 1
    assert play.finish().code is Exit.GAVE_UP


def test_a_signal_that_several_agents_got_does_not_cut_the_drain_off(play):
    play.do("stop", "SIGTERM")
    for node in range(2):
        play.deliver(node, SignalReceived(generation=5, name="SIGTERM"))
    assert not [effect for effect in play.effects if isinstance(effect, Finish)]
    play.do("stop", "SIGTERM")
    assert "by a second SIGTERM" in play.finish().message
