"""Courses of events played through the coordinator, without a process."""

from dataclasses import asdict
from typing import Any

import pytest

from resilient.driver.coordinator import LAUNCH_ATTEMPTS, SETTLE_S, Coordinator, Job, State
from resilient.driver.effects import Effect, Finish, Launch, RaiseFence, Send, WriteEvent, WriteMetrics
from resilient.exits import Exit
from resilient.faults import Raised, WorkerEnd
from resilient.policy import Budget

VICTIM = Raised("RuntimeError", "gloo/transport/tcp/pair.cc: Connection closed by peer", "victim's traceback", 9.0)
BUG = Raised("ValueError", "boom", "culprit's traceback", 9.2)


class Play:
    """A coordinator with two nodes of one rank each, and a clock that the test moves."""

    def __init__(self, nodes: int = 2, **budget: int) -> None:
        limits = {"max_restarts_per_hour": 30, "give_up_after_same_step": 3, **budget}
        job = Job(nodes, 1, {"dp": nodes}, "scratch", Budget(**limits), drain_s=20.0, silence_s=30.0)
        self.nodes = nodes
        self.coordinator = Coordinator(job, last_generation=4)
        self.now = 1000.0
        self.effects: list[Effect] = []

    def do(self, method: str, *arguments: Any) -> list[Effect]:
        effects = getattr(self.coordinator, method)(*arguments, self.now)
        self.effects += effects
        return effects

    def tell(self, node: int, kind: str, **fields: Any) -> list[Effect]:
        return self.do("message", {"type": kind, "node": node, **fields})

    def join(self, node: int) -> list[Effect]:
        self.tell(node, "hello", host=f"n{node}", addr=f"10.0.0.{node}", token="")
        return self.tell(node, "ready", store_port=5000 + node)

    def start(self) -> None:
        self.do("begin")
        self.do("prepared")
        for node in range(self.nodes):
            self.join(node)

    def beat(self, node: int, step: int) -> list[Effect]:
        return self.tell(node, "beat", ranks={str(node): {"step": step, "beat_t": self.now}})

    def exit(self, rank: int, exitcode: int = -9, raised: Raised | None = None, stopped: bool = False, step: int = 7):
        end = WorkerEnd(rank, rank, 77, exitcode, self.now, step, "step", raised)
        return self.tell(rank, "exited", end=asdict(end), stopped=stopped)

    def events(self, name: str) -> list[dict[str, Any]]:
        return [dict(e.fields) for e in self.effects if isinstance(e, WriteEvent) and e.event == name]

    def sent(self, kind: str, effects: list[Effect] | None = None) -> list[Send]:
        return [e for e in (self.effects if effects is None else effects) if isinstance(e, Send) and e.message["type"] == kind]

    def finish(self) -> Finish:
        (only,) = [e for e in self.effects if isinstance(e, Finish)]
        return only


@pytest.fixture
def play() -> Play:
    play = Play()
    play.start()
    return play


def test_a_generation_starts_only_when_all_are_ready_and_the_data_is_prepared():
    play = Play()
    play.do("begin")
    play.join(0)
    assert not play.sent("start")
    play.join(1)
    assert not play.sent("start")
    play.do("prepared")
    assert [send.node for send in play.sent("start")] == [0, 1]


def test_generations_count_on_from_the_last_one_and_raise_the_fence_first(play):
    fences = [i for i, e in enumerate(play.effects) if e == RaiseFence(5)]
    starts = [i for i, e in enumerate(play.effects) if isinstance(e, Send) and e.message["type"] == "start"]
    assert len(fences) == 1
    assert fences[0] < starts[0]


def test_all_ranks_are_sent_to_the_store_of_node_rank_0(play):
    messages = [send.message for send in play.sent("start")]
    assert {(m["master_addr"], m["master_port"]) for m in messages} == {("10.0.0.0", 5000)}
    assert [m["node_rank"] for m in messages] == [0, 1]


def test_a_killed_worker_stops_all_nodes_and_the_next_generation_has_a_new_store(play):
    play.beat(0, 7)
    effects = play.exit(1)
    assert [send.node for send in play.sent("stop", effects)] == [0, 1]
    play.tell(0, "ready", store_port=6000)
    effects = play.tell(1, "ready", store_port=6001)
    assert {m.message["generation"] for m in play.sent("start", effects)} == {6}
    assert {m.message["master_port"] for m in play.sent("start", effects)} == {6000}
    (fault,) = play.events("fault")
    assert (fault["kind"], fault["ranks"], fault["step"]) == ("exit", [1], 8)
    assert play.events("action")[0]["name"] == "restart_workers"


def test_a_victim_waits_for_the_culprit_and_the_culprit_is_blamed(play):
    assert not play.sent("stop", play.exit(0, 1, VICTIM))
    play.now += 0.01
    assert play.sent("stop", play.exit(1, 1, BUG))
    assert play.events("fault")[0]["ranks"] == [1]
    assert play.events("fault")[0]["evidence"] == "culprit's traceback"


def test_a_victim_alone_is_blamed_after_a_moment(play):
    play.exit(0, 1, VICTIM)
    assert not play.sent("stop", play.do("tick"))
    play.now += SETTLE_S + 0.01
    assert play.sent("stop", play.do("tick"))
    assert play.events("fault")[0]["ranks"] == [0]


def test_ends_after_the_decision_are_no_new_fault(play):
    play.exit(1)
    play.exit(0, 1, VICTIM)
    play.now += 1
    play.do("tick")
    assert len(play.events("fault")) == 1


def test_recovery_is_told_with_downtime_and_lost_steps_at_the_first_new_step(play):
    play.tell(0, "records", items=[[0, 1.0, "resumed", {"step": 0}]])
    play.beat(0, 7)
    play.exit(1)
    for node in (0, 1):
        play.tell(node, "ready", store_port=6000)
    play.tell(0, "records", items=[[0, 1.0, "resumed", {"step": 5}]])
    play.now += 0.8
    play.beat(0, 6)
    play.beat(1, 6)
    (recovered,) = play.events("recovered")
    assert recovered == {"fault_id": "g5-1", "step": 6, "downtime_s": 0.8, "lost_steps": 2}


def test_a_fault_during_recovery_is_a_fault_of_its_own_and_both_are_recovered(play):
    play.exit(1)
    for node in (0, 1):
        play.tell(node, "ready", store_port=6000)
    play.exit(0, step=-1)
    for node in (0, 1):
        play.tell(node, "ready", store_port=6000)
    play.beat(0, 1)
    assert [e["fault_id"] for e in play.events("recovered")] == ["g5-1", "g6-2"]


def test_a_lost_node_is_launched_again_and_the_others_stop(play):
    effects = play.do("lost", 1, "process 9 ended by SIGKILL")
    assert Launch(1) in effects
    assert [send.node for send in play.sent("stop", effects)] == [0]
    play.tell(0, "ready", store_port=6000)
    assert not play.sent("start")[2:]
    play.join(1)
    assert len(play.sent("start")) == 4
    assert play.events("fault")[0]["kind"] == "node_lost"


def test_a_silent_node_is_lost(play):
    play.now += 29
    play.beat(0, 1)
    assert not play.events("fault")
    play.now += 2
    play.do("tick")
    assert play.events("fault")[0]["nodes"] == [1]


def test_the_same_failure_at_the_same_step_ends_with_the_culprits_traceback(play):
    for _ in range(3):
        play.exit(1, 1, BUG)
        for node in (0, 1):
            play.tell(node, "ready", store_port=6000)
    assert play.finish().code is Exit.GAVE_UP
    assert "culprit's traceback" in play.finish().message
    assert len(play.sent("shutdown")) == 2
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


def test_a_stop_is_proposed_to_all_then_armed_beyond_every_checked_boundary(play):
    effects = play.do("stop", "SIGTERM")
    assert [send.node for send in play.sent("propose", effects)] == [0, 1]
    assert not play.tell(0, "proposed", checked=41)
    effects = play.tell(1, "proposed", checked=42)
    assert [(send.node, send.message["target"]) for send in play.sent("arm", effects)] == [(0, 43), (1, 43)]
    assert not play.tell(1, "proposed", checked=50)  # armed once and for all
    for rank in (0, 1):
        play.exit(rank, 0, stopped=True, step=43)
    assert play.finish().code is Exit.STOPPED
    assert play.events("drain")[0]["step"] == 43


def test_ranks_that_reach_the_target_while_a_stop_is_under_way_have_succeeded(play):
    play.do("stop", "SIGTERM")
    for rank in (0, 1):
        play.exit(rank, 0, stopped=False, step=300)
    assert play.finish().code is Exit.OK


def test_a_second_stop_ends_at_once(play):
    play.do("stop", "SIGINT")
    play.do("stop", "SIGINT")
    assert play.finish().code is Exit.STOPPED
    assert len(play.sent("shutdown")) == 2


def test_a_stop_between_generations_ends_at_once(play):
    play.exit(1)
    play.do("stop", "SIGTERM")
    assert play.finish().code is Exit.STOPPED


def test_a_stop_asked_for_before_the_workers_exist_is_proposed_to_them_once_they_do(play):
    play.do("stop", "SIGTERM")
    assert [send.node for send in play.sent("propose", play.tell(1, "started", generation=5, pids={}))] == [1]


def test_a_drain_that_takes_too_long_is_cut(play):
    play.do("stop", "SIGTERM")
    play.now += 19
    play.beat(0, 1)
    assert not play.do("tick")[2:]
    play.now += 2
    play.do("tick")
    assert play.finish().code is Exit.STOPPED
    assert play.events("drain")[0]["took_s"] == 21.0


def test_a_fault_during_a_drain_ends_with_what_is_durable(play):
    play.do("stop", "SIGTERM")
    play.exit(1)
    assert play.events("action")[0]["name"] == "finish_drain"
    assert play.finish().code is Exit.STOPPED


def test_an_agent_that_never_starts_makes_the_environment_unusable():
    play = Play()
    play.do("begin")
    for _ in range(LAUNCH_ATTEMPTS):
        play.do("lost", 0, "exit code 1")
    assert play.finish().code is Exit.UNUSABLE


def test_a_signal_that_an_agent_got_is_the_drivers(play):
    assert play.sent("propose", play.tell(0, "signal", name="SIGTERM"))


def test_metrics_and_events_of_workers_are_written_with_their_own_time_and_host(play):
    effects = play.tell(1, "records", items=[[1, 12.5, None, {"step": 3}], [1, 13.5, "committed", {"step": 3}]])
    assert effects == [
        WriteMetrics({"step": 3}, 5, 12.5),
        WriteEvent("committed", {"step": 3}, 5, 13.5, "n1"),
        Send(1, {"type": "kept", "count": 2}),
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
    play.tell(0, "records", items=[[0, 1.0, "resumed", {"step": 20}]])
    play.beat(0, 21)
    (started,) = play.events("generation_started")
    assert (started["resumed_step"], started["tier"], started["world_size"]) == (20, "scratch", 2)
