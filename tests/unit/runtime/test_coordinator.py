"""Courses of events played through the coordinator, without a process."""

from dataclasses import asdict
from typing import Any

import pytest
from resilient.driver.coordinator import LOOK_AGAIN_S, SETTLE_S, Coordinator, Job, State
from resilient.driver.effects import Effect, Finish, Launch, RaiseFence, Send, SetAside, WriteEvent, WriteMetrics, WriteText
from resilient.driver.membership import LAUNCH_ATTEMPTS
from resilient.driver.stragglers import Rules
from resilient.driver.watchdog import PATIENCE_S, Limits

from resilient.driver.custody import Custody, StoragePlan, TierPlan
from resilient.exits import Exit
from resilient.faults import Raised, WorkerEnd
from resilient.policy import Budget
from resilient.rollback import Void

VICTIM = Raised("RuntimeError", "gloo/transport/tcp/pair.cc: Connection closed by peer", "victim's traceback", 9.0)
BAD = Raised("BadBatch", "4 batches in a row are bad", "a traceback", 9.2, None, "not_finite", 6)
BUG = Raised("ValueError", "boom", "culprit's traceback", 9.2)


class Play:
    """A coordinator with two nodes of one rank each, and a clock that the test moves."""

    def __init__(
        self,
        nodes: int = 2,
        *,
        spares: int = 0,
        fewer: tuple[int, ...] = (),
        stragglers: Rules | None = None,
        replace_stragglers: bool = False,
        replicas: bool = False,
        **budget: int,
    ) -> None:
        limits = {"max_restarts_per_hour": 30, "give_up_after_same_step": 3, **budget}
        job = Job(
            layouts={size: {"dp": size} for size in (*fewer, nodes)},
            spares=spares,
            rejoin_s=20.0,
            procs_per_node=1,
            storage=StoragePlan(TierPlan("ram", 1, replicas), (), TierPlan("scratch", 3), 2),
            budget=Budget(**limits),
            drain_s=20.0,
            silence_s=30.0,
            silence_with_spare_s=8.0,
            hang=Limits(10.0, 600.0),
            link_grace_s=60.0,
            collective_timeout_s=620.0,
            stragglers=stragglers,
            replace_stragglers=replace_stragglers,
        )
        self.nodes = nodes + spares
        self.coordinator = Coordinator(job, last_generation=4)
        self.now = 1000.0
        self.effects: list[Effect] = []

    def do(self, method: str, *arguments: Any) -> list[Effect]:
        effects = getattr(self.coordinator, method)(*arguments, self.now)
        self.effects += effects
        for effect in effects:
            if isinstance(effect, Send) and effect.message.get("order") == {"do": "sync"}:
                self.news(effect.node, "synced")
        return effects

    def news(self, node: int, what: str, **fields: Any) -> list[Effect]:
        """A node's keeper has something to say."""
        return self.tell(node, "storage", news={"what": what, **fields})

    def held(self, node: int, step: int, *, wants: list[str] | None = None, again: bool = False) -> list[Effect]:
        """A node's part of a snapshot is in memory."""
        where = {"tier": "ram", "step": step, "generation": self.coordinator.generation, "directory": f"/ram/{step}"}
        members = self.coordinator.membership.members
        part = {"owner": members.index(node), "nodes": len(members), "replica": False}
        costs = {"bytes": 100, "stall_s": 0.01, "write_s": 0.02}
        return self.news(node, "held", **where, **part, **costs, wants=wants or [], again=again)

    def orders(self, kind: str, effects: list[Effect] | None = None) -> list[tuple[int, dict[str, Any]]]:
        """What keepers were told to do."""
        sent = self.sent("storage", effects)
        return [(send.node, send.message["order"]) for send in sent if send.message["order"]["do"] == kind]

    def tell(self, node: int, kind: str, **fields: Any) -> list[Effect]:
        if kind == "ready":
            fields = {"storage": {"parts": [], "address": f"10.0.0.{node}:9"}, **fields}
        return self.do("message", {"type": kind, "node": node, **fields})

    def join(self, node: int) -> list[Effect]:
        self.tell(node, "hello", host=f"n{node}", addr=f"10.0.0.{node}", token="")
        return self.tell(node, "ready", store_port=5000 + node)

    def start(self) -> None:
        self.do("begin")
        self.do("prepared")
        for node in range(self.nodes):
            self.join(node)

    def beat(self, node: int, step: int, *, silent_s: float = 0.0, state: str = "", phase: str = "step") -> list[Effect]:
        """A rank has finished a step so long ago, and given no sign since."""
        t = self.now - silent_s
        sign = {"step": step, "beat_t": t, "mark": t, "silent_s": silent_s, "phase": phase, "state": state, "phased": True}
        return self.tell(node, "beat", ranks={str(node): sign})

    def exit(
        self, rank: int, exitcode: int = -9, raised: Raised | None = None, stopped: bool = False, step: int = 7, log: str = ""
    ):
        end = WorkerEnd(rank, rank, 77, exitcode, self.now, step, "step", raised, log)
        return self.tell(rank, "exited", end=asdict(end), stopped=stopped)

    def events(self, name: str) -> list[dict[str, Any]]:
        return [dict(e.fields) for e in self.effects if isinstance(e, WriteEvent) and e.event == name]

    def sent(self, kind: str, effects: list[Effect] | None = None) -> list[Send]:
        return [e for e in (self.effects if effects is None else effects) if isinstance(e, Send) and e.message["type"] == kind]

    def finish(self) -> Finish:
        """The end, once the agents have stopped what they had to."""
        if self.coordinator.state is State.SAVING:
            for node in range(self.nodes):
                self.tell(node, "ready", store_port=1)
        (only,) = [e for e in self.effects if isinstance(e, Finish)]
        return only


def part(step: int, owner: int, *, of: int = 2, replica: bool = False) -> dict[str, Any]:
    """What a keeper says of a part that it has in memory, of the generation that every play begins with."""
    where = {"tier": "ram", "directory": f"/ram/{'replica/' * replica}{step}"}
    return {**where, "step": step, "generation": 5, "owner": owner, "nodes": of, "replica": replica}


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
    assert [m["collective_timeout_s"] for m in messages] == [620.0, 620.0]


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


def test_a_rank_that_nccls_watchdog_ended_waits_for_the_culprit_as_well(play):
    log = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580)\n"
    assert not play.sent("stop", play.exit(0, -6, log=log))
    assert play.sent("stop", play.exit(1, -9))
    assert play.events("fault")[0]["ranks"] == [1]


def test_a_fault_is_written_with_the_class_of_its_cause(play):
    play.exit(1, -9, log="slurmstepd: error: Detected 1 oom_kill event in StepId=1130.0.\n")
    assert play.events("fault")[0]["class"] == "deterministic"


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
    play.now += 0.6
    play.do("tick")
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


def again(play: Play, port: int = 6000) -> list[Effect]:
    """All nodes are ready for the next generation."""
    return [effect for node in range(play.nodes) for effect in play.tell(node, "ready", store_port=port)]


def test_a_restart_without_progress_is_held_back_with_growing_pauses_until_the_step_is_finished(play):
    play.exit(1)
    assert play.sent("start", again(play))
    for pause_s in (0.5, 1.0, 2.0):
        play.exit(1, -len(play.events("fault")))
        assert f"in {pause_s:g} s" in play.events("action")[-1]["reason"]
        assert not play.sent("start", again(play))
        play.now += pause_s - 0.01
        assert not play.sent("start", play.do("tick"))
        play.now += 0.02
        assert play.sent("start", play.do("tick"))
    play.exit(1, step=8)
    assert play.sent("start", again(play))


def test_a_stop_does_not_wait_for_a_restart_that_is_held_back(play):
    for _ in range(2):
        play.exit(1)
        again(play)
    play.do("stop", "SIGTERM")
    assert play.finish().code is Exit.STOPPED


def test_the_same_failure_at_the_same_step_ends_with_the_culprits_traceback(play):
    for _ in range(3):
        play.exit(1, 1, BUG)
        again(play)
        play.now += 1.0
        play.do("tick")
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


def test_the_end_of_the_jobs_time_is_a_fault_of_its_own_and_drains_until_then(play):
    effects = play.coordinator.run_out("time_limit", "20 s are left", play.now, until_t=play.now + 15)
    play.effects += effects
    assert [send.node for send in play.sent("propose", effects)] == [0, 1]
    (fault,), (action,) = play.events("fault"), play.events("action")
    assert (fault["kind"], fault["ranks"], action["name"]) == ("time_limit", [], "finish_drain")
    play.now += 16
    play.do("tick")
    assert play.finish().code is Exit.STOPPED
    assert {"signal": "time_limit", "deadline_s": 15.0}.items() <= play.events("drain")[0].items()


def test_a_drain_that_is_under_way_hurries_when_there_is_less_time_and_never_takes_longer(play):
    play.do("stop", "SIGTERM")
    assert not play.coordinator.run_out("preempted", "the nodes are wanted", play.now, until_t=play.now + 10)
    play.coordinator.hurry(play.now + 100)
    play.now += 9
    play.do("tick")
    assert play.coordinator.state is not State.FINISHED
    play.now += 2
    play.do("tick")
    assert play.finish().code is Exit.STOPPED
    assert play.events("fault") == []


def test_what_a_drain_takes_is_known_once_a_step_a_copy_and_a_flush_were_measured(play):
    assert play.coordinator.drain_estimate_s() is None
    for step in (1, 2):
        play.now += 3
        for node in (0, 1):
            play.beat(node, step)
            play.held(node, step)
    assert play.coordinator.drain_estimate_s() is None  # nothing was ever flushed
    play.coordinator.custody.rate_bytes_per_s = 100.0
    assert play.coordinator.drain_estimate_s() == pytest.approx(3.0 + 0.01 + 2.0)


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
    play.tell(0, "records", items=[[0, 1.0, "resumed", {"step": 20, "tier": "scratch"}]])
    play.beat(0, 21)
    (started,) = play.events("generation_started")
    assert (started["resumed_step"], started["tier"], started["world_size"]) == (20, "scratch", 2)


def test_where_a_generation_goes_on_from_is_not_guessed_from_a_beat_that_overtakes_the_word_of_rank_0(play):
    play.beat(0, 9)
    play.exit(1, step=9)
    play.tell(0, "ready", store_port=6000)
    play.tell(1, "ready", store_port=6001)
    play.beat(1, 6)
    assert len(play.events("generation_started")) == 1
    play.tell(0, "records", items=[[0, 1.0, "resumed", {"step": 5, "tier": "ram"}]])
    play.beat(0, 6)
    started = play.events("generation_started")[1]
    assert (started["resumed_step"], started["tier"]) == (5, "ram")
    assert [recovered["lost_steps"] for recovered in play.events("recovered")] == [4]


# -- workers that do not get on ------------------------------------------------------------------------------------------

IDLE = {"state": "S", "cpu": 0.0, "stacks": 'Current thread 0x1 (most recent call first):\n  File "data.py", line 1 in wait\n'}
AT_A_COLLECTIVE = {**IDLE, "stacks": IDLE["stacks"].replace("data.py", "torch/distributed/x.py")}


def hang(play: Play, silent_s: float = 11.0) -> list[Effect]:
    """Both ranks do some steps and say nothing more."""
    for step in range(10):
        for node in (0, 1):
            play.now += 0.1
            play.beat(node, step)
    play.now += silent_s
    return [*play.beat(0, 9, silent_s=silent_s, state="S"), *play.beat(1, 9, silent_s=silent_s, state="S")]


def test_a_silent_rank_is_looked_at_and_the_culprit_named(play):
    effects = hang(play)
    assert [send.node for send in play.sent("look", effects)] == [0, 1]
    assert not play.tell(0, "looked", ranks={"0": AT_A_COLLECTIVE})
    effects = play.tell(1, "looked", ranks={"1": IDLE})
    (fault,) = play.events("fault")
    assert (fault["kind"], fault["ranks"], fault["step"], fault["detect_s"]) == ("hang", [1], 10, 11.0)
    assert [effect.path for effect in effects if isinstance(effect, WriteText)] == [
        f"incidents/{fault['fault_id']}/rank{rank}.txt" for rank in (0, 1)
    ]
    assert len(play.sent("stop", effects)) == 2


def test_a_node_that_does_not_answer_a_look_is_not_waited_for(play):
    hang(play)
    play.tell(0, "looked", ranks={"0": AT_A_COLLECTIVE})
    play.now += PATIENCE_S
    play.tell(1, "alive")
    play.do("tick")
    (fault,) = play.events("fault")
    assert (fault["kind"], fault["ranks"]) == ("hang", [1])
    assert [action["name"] for action in play.events("action")] == ["restart_workers"]


def test_a_node_of_which_nothing_is_heard_is_waited_for_until_it_is_lost(play):
    hang(play)
    play.tell(0, "looked", ranks={"0": AT_A_COLLECTIVE})
    for _ in range(3):
        play.now += LOOK_AGAIN_S
        play.beat(0, 9, silent_s=20.0, state="S")
        play.do("tick")
    (fault,) = play.events("fault")
    assert (fault["kind"], fault["nodes"]) == ("link_down", [1])
    assert [action["name"] for action in play.events("action")] == ["wait"]
    assert not play.sent("stop")
    play.now += 30.0
    play.do("tick")
    assert [fault["kind"] for fault in play.events("fault")] == ["link_down", "node_lost"]
    assert play.events("action")[-1]["name"] == "replace_node"


def test_what_was_not_heard_of_for_a_while_goes_on_without_a_restart(play):
    hang(play)
    play.tell(0, "looked", ranks={"0": AT_A_COLLECTIVE})
    play.now += PATIENCE_S
    play.do("tick")
    play.beat(1, 10)
    (recovered,) = play.events("recovered")
    assert (recovered["fault_id"], recovered["lost_steps"]) == (play.events("fault")[0]["fault_id"], 0)


def look_at_waiting_ranks(play: Play) -> list[Effect]:
    return [effect for node in (0, 1) for effect in play.tell(node, "looked", ranks={str(node): AT_A_COLLECTIVE})]


def tell_link(play: Play, node: int, state: str, down_s: float) -> None:
    change = {"interface": "ib0", "state": state, "down_s": down_s, "detail": "", "counters": {}}
    play.tell(node, "link", t=play.now, changes=[change])


def test_a_stall_while_a_link_is_down_is_waited_for_and_told_once(play):
    tell_link(play, 1, "down", 0.0)
    hang(play)
    look_at_waiting_ranks(play)
    (action,) = play.events("action")
    assert action["name"] == "wait" and "link ib0 of node 1 has been down for 13.0 s" in action["reason"]
    play.now += LOOK_AGAIN_S
    for node in (0, 1):
        play.beat(node, 9, silent_s=16.0, state="S")
    look_at_waiting_ranks(play)
    assert len(play.events("fault")) == 1 and not play.sent("stop")
    tell_link(play, 1, "up", 14.0)
    play.beat(0, 10)
    (recovered,) = play.events("recovered")
    assert recovered["lost_steps"] == 0


def test_a_stall_that_outlasts_the_grace_of_a_link_is_a_fault(play):
    tell_link(play, 1, "down", 0.0)
    hang(play, 61.0)
    look_at_waiting_ranks(play)
    assert [action["name"] for action in play.events("action")] == ["restart_workers"]


def test_a_link_is_no_excuse_for_a_rank_that_does_not_wait(play):
    tell_link(play, 1, "flapped", 0.2)
    hang(play)
    play.tell(0, "looked", ranks={"0": AT_A_COLLECTIVE})
    play.tell(1, "looked", ranks={"1": IDLE})
    assert [action["name"] for action in play.events("action")] == ["restart_workers"]


def test_ranks_that_go_on_while_they_are_looked_at_are_left_alone(play):
    hang(play)
    for node in (0, 1):
        play.beat(node, 10)
        play.tell(node, "looked", ranks={str(node): IDLE})
    assert not play.events("fault")


# -- links ---------------------------------------------------------------------------------------------------------------

DOWN = {"interface": "eth0", "state": "down", "down_s": None, "detail": "no carrier", "counters": {"carrier_down_count": 1}}
UP = {"interface": "eth0", "state": "up", "down_s": 2.00049, "detail": "", "counters": {"carrier_up_count": 1}}


def test_changes_of_links_are_written_with_their_own_time_and_host_and_restart_nothing(play):
    effects = play.tell(1, "link", t=12.5, changes=[DOWN, UP])
    assert effects == [
        WriteEvent("link", {"node": 1, **DOWN}, 5, 12.5, "n1"),
        WriteEvent("link", {"node": 1, **UP, "down_s": 2.0}, 5, 12.5, "n1"),
    ]


def test_a_link_that_is_down_or_just_came_back_is_known_while_it_matters(play):
    play.tell(1, "link", t=12.5, changes=[DOWN])
    play.now += 2
    assert [(outage.node, outage.down_s) for outage in play.coordinator.links.outages(play.now, within_s=3.0)] == [(1, 2.0)]
    play.tell(1, "link", t=14.5, changes=[UP])
    assert play.coordinator.links.outages(play.now + 3, within_s=3.0)
    assert not play.coordinator.links.outages(play.now + 4, within_s=3.0)


def test_links_of_a_lost_node_are_not_down_for_ever(play):
    play.tell(1, "link", t=12.5, changes=[DOWN])
    play.do("lost", 1, "process 9 ended by SIGKILL")
    assert not play.coordinator.links.outages(play.now, within_s=3.0)


# -- what keepers hold ---------------------------------------------------------------------------------------------------


def flushed(play: Play, order: dict[str, Any], nodes: tuple[int, ...] = (0, 1)) -> list[Effect]:
    """These nodes have done their share of a flush."""
    where = {name: order[name] for name in ("id", "tier", "step", "generation")}
    return [effect for node in nodes for effect in play.news(node, "flushed", **where, owner=node, bytes=100, write_s=0.1)]


def committed(play: Play, order: dict[str, Any]) -> list[Effect]:
    where = {name: order[name] for name in ("id", "tier", "step", "generation")}
    return play.news(0, "committed", **where, owner=0, bytes=200, files=81, write_s=0.1)


def test_a_snapshot_is_told_once_every_node_holds_its_part(play):
    play.beat(0, 5)
    play.held(0, 5)
    assert not play.events("snapshot")
    play.held(1, 5)
    (told,) = play.events("snapshot")
    assert (told["step"], told["tier"], told["bytes"]) == (5, "ram", 200)
    assert {node: order["steps"] for node, order in play.orders("keep")} == {0: [5], 1: [5]}


def test_nothing_is_forgotten_from_a_fault_until_the_ranks_go_on(play):
    play.beat(0, 5)
    for step in (5, 6):
        play.held(0, step), play.held(1, step)
    assert play.orders("keep")
    effects = [*play.exit(1), *play.held(0, 7), *play.held(1, 7), *play.join(0), *play.join(1)]
    assert play.sent("start", effects) and not play.orders("keep", effects)
    effects = play.tell(0, "records", items=[[0, 1.0, "resumed", {"step": 6, "tier": "ram"}]])
    assert play.orders("keep", effects)


def test_a_step_is_durable_when_all_have_flushed_and_one_has_committed(play):
    effects = [*play.held(0, 5, wants=["scratch"]), *play.held(1, 5, wants=["scratch"])]
    orders = play.orders("flush", effects)
    assert [node for node, _ in orders] == [0, 1]
    assert not play.orders("commit", flushed(play, orders[0][1], (0,)))
    ((node, order),) = play.orders("commit", flushed(play, orders[0][1], (1,)))
    assert node == 0
    assert not play.events("committed")
    committed(play, order)
    assert play.events("committed") == [{"step": 5, "tier": "scratch", "bytes": 200, "files": 81}]


def test_while_a_step_is_flushed_only_the_newest_one_after_it_waits(play):
    for step in (5, 6, 7):
        for node in (0, 1):
            play.held(node, step, wants=["scratch"])
    (first, *_) = [order for _, order in play.orders("flush")]
    assert {order["step"] for _, order in play.orders("flush")} == {5}
    flushed(play, first)
    effects = committed(play, play.orders("commit")[0][1])
    assert {order["step"] for _, order in play.orders("flush", effects)} == {7}


def test_the_run_ends_only_when_its_last_step_is_durable(play):
    for node in (0, 1):
        play.held(node, 300, wants=["scratch"])
    for rank in (0, 1):
        play.exit(rank, 0, step=300)
    assert play.coordinator.state is State.SAVING
    flushed(play, play.orders("flush")[0][1])
    assert play.coordinator.state is State.SAVING
    committed(play, play.orders("commit")[0][1])
    assert play.finish() == Finish(Exit.OK, "")
    assert {tuple(send.message["clear"]) for send in play.sent("shutdown")} == {("ram",)}


def test_a_fault_during_a_drain_saves_what_the_agents_hold(play):
    for node in (0, 1):
        play.held(node, 9)
    play.do("stop", "SIGTERM")
    play.exit(1)
    for node in (0, 1):
        play.tell(node, "ready", store_port=1, storage={"parts": [part(9, node)], "address": f"10.0.0.{node}:9"})
    assert {order["step"] for _, order in play.orders("flush")} == {9}
    flushed(play, play.orders("flush")[0][1])
    committed(play, play.orders("commit")[0][1])
    assert play.coordinator.state is State.FINISHED
    assert play.finish().code is Exit.STOPPED


def test_a_stop_whose_step_would_come_too_late_saves_what_is_held_at_once(play):
    for node in (0, 1):
        play.held(node, 9)
    play.coordinator.custody.rate_bytes_per_s = 10.0  # 200 bytes take 20 seconds, or 40
    effects = play.do("stop", "SIGTERM")
    assert {order["step"] for _, order in play.orders("flush", effects)} == {9}
    assert play.sent("propose", effects)


def test_a_state_that_cannot_be_made_durable_ends_with_unusable_and_says_where_it_is(play):
    for node in (0, 1):
        play.held(node, 300, wants=["scratch"])
    play.news(0, "trouble", tier="scratch", detail="no space left on device", errno=28)
    assert play.events("fault")[0]["kind"] == "storage"
    for rank in (0, 1):
        play.exit(rank, 0, step=300)
    play.do("tick")
    play.now += 19
    play.do("tick")
    assert play.coordinator.state is State.SAVING
    play.now += 2
    play.do("tick")
    assert play.coordinator.state is State.FINISHED
    assert play.finish().code is Exit.UNUSABLE
    assert "step 300" in play.finish().message
    assert {tuple(send.message["clear"]) for send in play.sent("shutdown")} == {()}


def test_a_flush_goes_on_in_the_next_generation_on_its_behalf(play):
    for node in (0, 1):
        play.held(node, 9, wants=["scratch"])
    before = play.orders("flush")[0][1]
    play.exit(1)
    for node in (0, 1):
        play.tell(node, "ready", store_port=1, storage={"parts": [part(9, node)], "address": f"10.0.0.{node}:9"})
    candidates = play.sent("start")[-1].message["storage"]["candidates"]
    assert [(each["step"], each["tier"]) for each in candidates] == [(9, "ram")]
    effects = play.tell(0, "records", items=[[0, 1.0, "resumed", {"step": 9, "tier": "ram"}]])
    after = play.orders("flush", effects)[0][1]
    assert (before["step"], before["attempt"], after["step"], after["attempt"]) == (9, 5, 9, 6)
    flushed(play, before)  # news of the attempt before mean nothing
    assert not play.orders("commit")


def test_a_keeper_that_is_new_is_told_again_what_it_has_to_do(play):
    for node in (0, 1):
        play.held(node, 9, wants=["scratch"])
    effects = play.news(1, "inventory", parts=[part(9, 1)], address="10.0.0.1:10")
    assert [(node, order["step"]) for node, order in play.orders("flush", effects)] == [(1, 9)]


def test_no_room_anywhere_makes_the_environment_unusable(play):
    play.news(1, "no_room", bytes=1 << 30, places=["/dev/shm/x", "/scratch/x"])
    assert play.finish().code is Exit.UNUSABLE
    assert "/scratch/x" in play.finish().message


def test_a_part_on_its_way_to_a_disk_is_not_forgotten_meanwhile():
    plan = StoragePlan(TierPlan("ram", 1), (TierPlan("nvme", 2),), TierPlan("scratch", 3), 3)
    custody = Custody(plan)
    custody.inventory(0, {"parts": [], "address": ""})
    custody.begin(1, [0])
    held = {
        "what": "held",
        "tier": "ram",
        "generation": 1,
        "owner": 0,
        "nodes": 1,
        "replica": False,
        "bytes": 1,
        "stall_s": 0.0,
        "write_s": 0.0,
        "wants": ["nvme"],
    }
    effects = [*custody.heard(0, {**held, "step": 6, "directory": "/ram/6"}, 0.0), *custody.resumed(0, 0.0)]
    orders = [effect.message["order"] for effect in effects if isinstance(effect, Send)]
    assert [order["step"] for order in orders if order["do"] == "copy"] == [6]
    assert all(order["upto"] < 6 for order in orders if order["do"] == "keep" and order["tier"] == "nvme")
    assert any(order["upto"] == 6 for order in orders if order["do"] == "keep" and order["tier"] == "ram")


def test_a_stop_makes_durable_what_is_newer_than_the_checkpoint_that_was_gone_on_from_and_not_than_a_damaged_one():
    custody = Custody(StoragePlan(TierPlan("ram", 1), (), TierPlan("scratch", 3), 3, durable_step=30, durable_steps=(20, 30)))
    custody.inventory(0, {"parts": [], "address": ""})
    custody.begin(1, [0])
    custody.resumed(20, 0.0)  # for the newest one was found damaged
    news = {"what": "held", "tier": "ram", "generation": 1, "owner": 0, "nodes": 1, "replica": False, "bytes": 1}
    list(custody.heard(0, {**news, "stall_s": 0.0, "write_s": 0.0, "wants": [], "step": 25, "directory": "/ram/25"}, 0.0))
    assert custody.behind
    orders = [effect.message["order"] for effect in custody.save_newest(0.0) if isinstance(effect, Send)]
    assert [(order["do"], order["step"]) for order in orders] == [("flush", 25)]
    assert custody.superseded(ended=False) == []
    assert custody.checkpoints == [20, 25]


# -- nodes that leave and return ------------------------------------------------------------------------------------------


def ready(play: Play, *nodes: int, parts: dict[int, list[dict[str, Any]]] | None = None) -> list[Effect]:
    """These nodes have ended their workers; what they hold."""
    effects = []
    for node in nodes:
        held = {"parts": (parts or {}).get(node, []), "address": f"10.0.0.{node}:9"}
        effects += play.tell(node, "ready", store_port=6000 + node, storage=held)
    return effects


def test_a_spare_takes_over_with_the_replicas_of_the_node_that_is_gone():
    play = Play(spares=1)
    play.start()
    assert [send.node for send in play.sent("start")] == [0, 1]
    effects = play.do("lost", 1, "process 9 ended by SIGKILL")
    assert [send.node for send in play.sent("stop", effects)] == [0]
    assert play.events("action")[0]["reason"] == "node 1 is gone: spare node 2 takes over"
    effects = ready(play, 0, parts={0: [part(9, 0), part(9, 1, replica=True)]})
    starts = play.sent("start", effects)
    assert [(send.node, send.message["node_rank"]) for send in starts] == [(0, 0), (2, 1)]
    (candidate,) = starts[1].message["storage"]["candidates"]
    assert candidate["step"] == 9
    assert [holding["address"] for holding in candidate["holdings"]] == ["10.0.0.0:9"] * 2
    assert play.coordinator.custody.newest == (9, 5)


def failed_replica(play: Play, step: int, *, unreachable: bool) -> list[dict[str, Any]]:
    """A snapshot's copies are asked for, and that of part 1 does not come about; the faults that are told of it."""
    play.effects.clear()
    play.held(0, step)
    play.held(1, step)
    for node, order in play.orders("replicate"):
        what = {name: order[name] for name in ("tier", "step", "generation", "owner", "id")}
        if order["owner"] == 1:
            play.news(node, "failed", job="replicate", **what, detail="no good", unreachable=unreachable)
        else:
            play.news(node, "held", **what, directory="/ram", nodes=2, replica=True, bytes=9, stall_s=0.0, write_s=0.1, wants=[])
    return play.events("fault")


def test_a_buddy_does_not_wait_for_a_node_that_is_gone():
    play = Play(replicas=True)
    play.start()
    play.held(0, 1)
    play.held(1, 1)
    ((buddy, order),) = [each for each in play.orders("replicate") if each[1]["owner"] == 1]
    effects = play.do("lost", 1, "silent for 8 s")
    assert play.orders("cancel", effects) == [(buddy, {"do": "cancel", "id": order["id"]})]
    play.news(buddy, "failed", job="replicate", **order, detail="cancelled", unreachable=True)
    assert [fault["kind"] for fault in play.events("fault")] == ["node_lost"]


def test_the_ledger_says_when_all_of_a_snapshot_has_copies():
    play = Play(replicas=True)
    play.start()
    play.held(0, 1)
    play.held(1, 1)
    for count, (node, order) in enumerate(play.orders("replicate")):
        assert len(play.events("replicated")) == 0, f"{count} of 2 parts"
        what = {name: order[name] for name in ("tier", "step", "generation", "owner", "id")}
        play.news(node, "held", **what, directory="/ram", nodes=2, replica=True, bytes=9, stall_s=0.0, write_s=0.1, wants=[])
    assert play.events("replicated") == [{"step": 1, "tier": "ram"}]
    failed_replica(play, 2, unreachable=True)
    assert [each["step"] for each in play.events("replicated")] == []  # of step 2 there is one copy


def test_a_part_that_cannot_be_fetched_is_a_fault_of_storage_only_if_its_node_answers_or_stays_silent():
    play = Play(replicas=True)
    play.start()
    assert not failed_replica(play, 1, unreachable=True)
    assert [fault["kind"] for fault in failed_replica(play, 2, unreachable=True)] == ["storage"]
    play = Play(replicas=True)
    play.start()
    assert [fault["kind"] for fault in failed_replica(play, 1, unreachable=False)] == ["storage"]


def test_without_a_spare_fewer_nodes_go_on_once_the_time_to_return_is_over():
    play = Play(fewer=(1,))
    play.start()
    play.do("lost", 1, "gone")
    ready(play, 0)
    assert len(play.sent("start")) == 2
    play.now += 20.1
    play.do("tick")
    (start,) = play.sent("start")[2:]
    assert (start.node, start.message["nodes"]) == (0, 1)
    assert [action["name"] for action in play.events("action")] == ["replace_node", "shrink"]
    play.tell(0, "records", items=[[0, 1.0, "resumed", {"step": 0}]])
    assert play.events("generation_started")[-1]["layout"] == {"dp": 1}
    play.exit(0, 0, step=300)  # one rank is all there are
    assert play.finish().code is Exit.OK


def shrunken() -> Play:
    play = Play(fewer=(1,))
    play.start()
    play.do("lost", 1, "gone")
    ready(play, 0)
    play.now += 20.1
    play.do("tick")
    play.tell(0, "records", items=[[0, 1.0, "resumed", {"step": 0}]])
    play.effects.clear()
    return play


def test_a_node_that_returns_is_taken_in_at_the_next_snapshot():
    play = shrunken()
    play.held(0, 7)
    play.join(1)
    assert not play.sent("stop")
    effects = play.held(0, 8)
    assert [send.node for send in play.sent("stop", effects)] == [0]
    assert play.events("action") == [
        {"fault_id": "g5-1", "name": "grow", "reason": "nodes have returned; all go on from step 8"},
    ]
    held = {**part(8, 0, of=1), "generation": play.coordinator.generation}
    effects = ready(play, 0, parts={0: [held]})
    assert [(send.node, send.message["node_rank"]) for send in play.sent("start", effects)] == [(0, 0), (1, 1)]
    assert not play.events("fault")


def test_nobody_is_taken_in_while_a_stop_is_under_way():
    play = shrunken()
    play.join(1)
    play.do("stop", "SIGTERM")
    assert not play.sent("stop", play.held(0, 8))


def test_a_spare_that_is_lost_disturbs_nobody():
    play = Play(spares=1)
    play.start()
    effects = play.do("lost", 2, "gone")
    assert Launch(2) in effects
    assert not play.sent("stop")
    assert play.coordinator.state is State.RUNNING
    assert play.events("action")[0]["name"] == "restart_agent"
    assert not play.coordinator.faults  # it costs nothing of the restart budget


def test_a_fault_after_one_that_stopped_no_rank_has_an_id_of_its_own():
    play = Play(spares=1)
    play.start()
    play.do("lost", 2, "gone")
    play.do("lost", 1, "gone")
    assert [fault["fault_id"] for fault in play.events("fault")] == ["g5-1", "g5-2"]
    assert [(action["fault_id"], action["name"]) for action in play.events("action")] == [
        ("g5-1", "restart_agent"),
        ("g5-2", "replace_node"),
    ]


def test_a_spare_that_is_lost_while_a_stop_is_under_way_does_not_end_it():
    play = Play(spares=1)
    play.start()
    play.do("stop", "SIGTERM")
    play.do("lost", 2, "gone")
    assert play.coordinator.state is State.RUNNING


def test_what_is_held_by_a_replica_is_flushed_from_there():
    play = Play(spares=1)
    play.start()
    for node in (0, 1):
        play.held(node, 9, wants=["scratch"])
    play.do("lost", 1, "gone")
    ready(play, 0, parts={0: [part(9, 0), part(9, 1, replica=True)]})
    effects = play.tell(0, "records", items=[[0, 1.0, "resumed", {"step": 9, "tier": "ram"}]])
    flushes = play.orders("flush", effects)
    assert [(node, order["owner"]) for node, order in flushes] == [(0, 0), (0, 1)]
    for _, order in flushes:
        where = {name: order[name] for name in ("id", "tier", "step", "generation", "owner")}
        play.news(0, "flushed", **where, bytes=100, write_s=0.1)
    assert play.orders("commit")


def test_what_a_skipped_step_leaves_is_let_go_but_not_the_steps_before_it(play):
    play.tell(0, "records", items=[[0, 1.0, "resumed", {"step": 0}]])
    effects = play.news(1, "skipped", step=8, generation=5, why="no slab was free")
    keep = [order for _, order in play.orders("keep", effects)]
    assert keep
    assert all(order["upto"] < 7 and order["left_out"] == [8] for order in keep)
    for node in (0, 1):
        effects = play.held(node, 7)
    assert [event["step"] for event in play.events("snapshot")] == [7]


def test_the_run_ends_when_too_few_nodes_can_ever_be_had(play):
    play.do("lost", 1, "gone")
    ready(play, 0)
    for _ in range(LAUNCH_ATTEMPTS):
        play.do("lost", 1, "exit code 1")
    assert play.finish().code is Exit.UNUSABLE
    assert "the agent of node 1 does not start (exit code 1)" in play.finish().message


def test_news_of_a_part_that_the_inventory_has_told_already_mean_nothing(play):
    for node in (0, 1):
        play.held(node, 9)
    play.exit(1)
    ready(play, 0, 1, parts={0: [part(9, 0)], 1: [part(9, 1)]})
    late = {**part(9, 0), "bytes": 100, "stall_s": 0.0, "write_s": 0.0, "wants": []}
    play.news(0, "held", **late)
    play.tell(0, "records", items=[[0, 1.0, "resumed", {"step": 9, "tier": "ram"}]])
    for step in (10, 11):
        for node in (0, 1):
            play.held(node, step)
    assert [event["step"] for event in play.events("snapshot")] == [9, 10, 11]


def durable(play: Play, step: int) -> None:
    """A step is held by all nodes and committed."""
    play.held(0, step, wants=["scratch"])
    effects = play.held(1, step, wants=["scratch"])
    orders = [order for _, order in play.orders("flush", effects)]
    flushed(play, orders[0])
    committed(play, {**orders[0], "do": "commit"})


def spoilt(play: Play) -> list[Effect]:
    """The numbers are bad: since step 6, told at step 9."""
    play.beat(0, 8)
    play.exit(1, 1, VICTIM, step=8)
    return play.exit(0, 1, BAD, step=8)


def test_bad_numbers_roll_back_to_a_checkpoint_from_before_and_all_that_is_newer_is_void(play):
    play.tell(0, "records", items=[[0, 1.0, "resumed", {"step": 0}]])
    durable(play, 5)
    durable(play, 7)
    for node in (0, 1):
        play.held(node, 8)
    spoilt(play)
    (fault,) = play.events("fault")
    assert (fault["kind"], fault["step"]) == ("not_finite", 9)
    (action,) = play.events("action")
    assert (action["name"], action["step"], action["skip"]) == ("roll_back", 5, [])
    assert {(each["step"], each["tier"]) for each in play.events("checkpoint_rejected")} == {(8, "ram")}
    assert play.coordinator.custody.durable_step == 5
    parts = [part(8, node) for node in (0, 1)]
    first = play.tell(0, "ready", store_port=1, storage={"parts": parts[:1], "address": "10.0.0.0:9"})
    effects = [*first, *play.tell(1, "ready", store_port=1, storage={"parts": parts[1:], "address": "10.0.0.1:9"})]
    fence, aside = effects.index(RaiseFence(6)), effects.index(SetAside((Void(5, 5),), 6))
    starts = [index for index, effect in enumerate(effects) if isinstance(effect, Send) and effect.message["type"] == "start"]
    assert fence < aside < min(starts)
    voids = [order for _, order in play.orders("void", effects)]
    assert voids == [{"do": "void", "step": 5, "generation": 5}] * 2
    for index in starts:
        message = effects[index].message
        assert message["guard"] == {"go_back_to": 5, "skip": []}
        assert message["storage"]["candidates"] == []


def test_bad_numbers_at_the_same_data_go_further_back_and_leave_it_out_until_the_end(play):
    durable(play, 3)
    durable(play, 5)
    for target, skip in ((5, []), (3, []), (0, [(6, 9)])):
        effects = [*spoilt(play), *again(play)]
        play.now += 3
        effects += play.do("tick")
        (start, _) = play.sent("start", effects)
        assert start.message["guard"] == {"go_back_to": target, "skip": skip}
        assert len(play.orders("void", effects)) == 2
    assert [action["skip"] for action in play.events("action")] == [[], [], [(6, 9)]]
    spoilt(play)
    assert play.finish().code is Exit.GAVE_UP
    assert "rolled back to step 5, step 3, step 0" in play.finish().message


def test_once_a_step_is_finished_a_roll_back_is_not_told_again_but_what_is_left_out_is(play):
    durable(play, 3)
    for _ in range(2):
        spoilt(play)
        again(play)
        play.now += 1
        play.do("tick")
    play.beat(0, 4)
    play.exit(1, step=4)
    again(play)
    play.now += 2
    effects = play.do("tick")
    assert play.sent("start", effects)[0].message["guard"] == {"go_back_to": None, "skip": [(6, 9)]}
    assert not play.orders("void", effects)


def test_a_commit_that_was_under_way_while_the_run_was_rolled_back_does_not_count(play):
    durable(play, 5)
    for node in (0, 1):
        play.held(node, 7, wants=["scratch"])
    order = next(order for _, order in reversed(play.orders("flush")))
    flushed(play, order)
    spoilt(play)
    committed(play, {**order, "do": "commit"})
    assert play.coordinator.custody.durable_step == 5
    assert play.coordinator.custody.checkpoints == [5]


def test_a_worker_killed_while_it_is_rolled_back_does_not_bring_back_what_is_void(play):
    durable(play, 5)
    for node in (0, 1):
        play.held(node, 8)
    spoilt(play)
    again(play)
    play.exit(1, step=-1)
    parts = [part(8, node) for node in (0, 1)]
    for node in (0, 1):
        play.tell(node, "ready", store_port=1, storage={"parts": parts[node : node + 1], "address": f"10.0.0.{node}:9"})
    play.now += 1
    (start, _) = play.sent("start", play.do("tick"))
    assert start.message["storage"]["candidates"] == []
    assert start.message["guard"]["go_back_to"] == 5


def test_numbers_that_are_given_up_on_do_not_become_durable():
    play = Play(max_roll_backs=0)
    play.start()
    durable(play, 5)
    for node in (0, 1):
        play.held(node, 8)
    spoilt(play)
    parts = [part(8, node) for node in (0, 1)]
    for node in (0, 1):
        play.tell(node, "ready", store_port=1, storage={"parts": parts[node : node + 1], "address": f"10.0.0.{node}:9"})
    assert [order["step"] for _, order in play.orders("flush")] == [5, 5]
    (end,) = [effect for effect in play.effects if isinstance(effect, Finish)]
    assert end.code is Exit.GAVE_UP
    assert end.message.startswith("BadBatch: 4 batches in a row are bad")


def test_news_of_what_is_void_is_not_heard_however_late_it_comes(play):
    durable(play, 5)
    spoilt(play)
    again(play)
    where = {"tier": "ram", "step": 9, "generation": 5, "bytes": 100, "stall_s": 0.01, "write_s": 0.02, "wants": ["scratch"]}
    for node in (0, 1):
        play.news(node, "held", **where, owner=node, nodes=2, replica=False, directory="/ram/9")
    assert play.coordinator.custody.checkpoints == [5]
    assert not [order for _, order in play.orders("flush") if order["step"] == 9]


def slowed(play: Play, beats: int) -> None:
    """Rank 1 needs twice as long for its part of a step, for so many beats of 20 steps each."""
    for number in range(1, beats + 1):
        play.now += 2.0
        for rank, own_s in ((0, number / 2), (1, float(number))):
            sign = {"step": 20 * number, "beat_t": play.now, "mark": play.now, "silent_s": 0.0, "phase": "step", "state": ""}
            play.tell(rank, "beat", ranks={str(rank): {**sign, "phased": True, "own_s": own_s}})


def test_a_straggler_is_told_and_nothing_is_done_to_the_run():
    play = Play(stragglers=Rules(1.5, 20), max_restarts_per_hour=1)
    play.start()
    slowed(play, 6)
    (fault,) = play.events("fault")
    assert (fault["fault_id"], fault["kind"], fault["nodes"]) == ("g5-straggler-1", "straggler", [1])
    assert [action["name"] for action in play.events("action")] == ["report"]
    assert not play.sent("stop") and play.coordinator.state is State.RUNNING
    play.exit(1)
    assert play.events("action")[-1]["name"] == "restart_workers"  # the report used up nothing


def test_the_node_of_a_straggler_gets_a_new_agent_where_that_is_asked_for():
    play = Play(stragglers=Rules(1.5, 20), replace_stragglers=True)
    play.start()
    play.effects.clear()
    slowed(play, 6)
    assert [action["name"] for action in play.events("action")] == ["replace_node"]
    assert [e.node for e in play.effects if isinstance(e, Launch)] == [1]
    assert [send.node for send in play.sent("stop")] == [0]
    play.tell(0, "ready", store_port=1), play.join(1)
    assert play.sent("start") and play.coordinator.generation == 6


@pytest.mark.parametrize(("how", "incident"), [("hang", "g5-1"), ("exit", None)])
def test_workers_that_hang_are_asked_for_their_last_words_before_they_are_killed(play: Play, how: str, incident: str | None):
    play.beat(0, 7), play.beat(1, 7)
    play.effects.clear()
    if how == "exit":
        play.exit(1)
    else:
        play.beat(1, 7, silent_s=601.0, state="S")
        waiting = {"state": "S", "cpu": 0.0, "stacks": ""}
        for node in range(2):
            play.tell(node, "looked", ranks={str(node): waiting})
    assert {send.node: send.message["incident"] for send in play.sent("stop")} == {0: incident, 1: incident}


def test_a_second_rank_that_raises_while_the_run_is_given_up_is_no_second_fault():
    play = Play(give_up_after_same_step=1)
    play.start()
    play.exit(0, 1, BUG)
    play.exit(1, 1, BUG)
    assert [action["name"] for action in play.events("action")] == ["give_up"]
    assert len(play.events("fault")) == 1
    assert play.finish().code is Exit.GAVE_UP


def test_a_step_of_which_a_node_never_tells_is_let_go_once_it_has_told_of_several_later_ones(play):
    play.tell(0, "records", items=[[0, 1.0, "resumed", {"step": 0}]])
    for step in (7, 8, 9, 10):
        play.held(0, step)
    play.effects.clear()
    for step in (8, 9):
        play.news(1, "skipped", step=step, generation=5, why="no slab was free")
    assert all(7 not in order["left_out"] for _, order in play.orders("keep"))
    effects = play.news(1, "skipped", step=10, generation=5, why="no slab was free")
    assert play.orders("keep", effects)[-1][1]["left_out"] == [7, 8, 9, 10]


def test_what_a_new_keeper_does_not_have_is_let_go_by_the_others(play):
    play.tell(0, "records", items=[[0, 1.0, "resumed", {"step": 0}]])
    for step in (7, 8):
        play.held(0, step)
    effects = play.news(1, "inventory", parts=[part(8, 1)], address="10.0.0.1:10")
    assert play.orders("keep", effects)[-1][1]["left_out"] == [7]


def test_a_step_that_was_left_out_and_taken_again_counts(play):
    play.tell(0, "records", items=[[0, 1.0, "resumed", {"step": 0}]])
    play.held(0, 7)
    play.news(1, "skipped", step=7, generation=5, why="no slab was free")
    for node in (0, 1):
        effects = play.held(node, 7, again=True)
    assert [event["step"] for event in play.events("snapshot")] == [7]
    assert play.orders("keep", effects)[-1][1]["left_out"] == []


def test_a_part_that_comes_after_all_were_told_to_do_without_its_step_does_not_count(play):
    play.tell(0, "records", items=[[0, 1.0, "resumed", {"step": 0}]])
    play.held(0, 7)
    for step in (8, 9, 10):
        effects = play.news(1, "skipped", step=step, generation=5, why="no slab was free")
    assert 7 in play.orders("keep", effects)[-1][1]["left_out"]  # so that node 0 may overwrite it
    play.held(1, 7)
    assert not play.events("snapshot")
    for node in (0, 1):
        play.held(node, 11)
    assert [event["step"] for event in play.events("snapshot")] == [11]


def test_a_silent_node_is_lost_sooner_while_a_spare_stands_by():
    play = Play(spares=1)
    play.start()
    play.now += 7
    play.beat(0, 1)
    play.tell(2, "alive")
    play.do("tick")
    assert not play.events("fault")
    play.now += 2
    play.do("tick")
    assert play.events("fault")[0]["nodes"] == [1]
    assert play.events("action")[0]["reason"] == "node 1 is gone: spare node 2 takes over"
    ready(play, 0)  # and from here on there is no spare any more
    play.now += 9
    play.do("tick")
    assert len(play.events("fault")) == 1
