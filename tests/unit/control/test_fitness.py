"""What the coordinator makes of the health of nodes."""

import pytest
from control_play import Play
from msgspec import structs

from checkpoint.protocol import Sync
from resilient.control import fitness
from resilient.control.coordinator import State
from resilient.exits import Exit
from resilient.outbox import Effect, Finish
from resilient.protocol.messages import Health, HealthFinding, Started

WRONG = HealthFinding(check="matmul 0", verdict="fail", text="core 3 computes wrong")
FULL = HealthFinding(check="tier nvme", verdict="warn", text="only 3 inodes are free")


def test_a_node_without_findings_needs_no_word():
    assert fitness.judge("node 1", Health(generation=0, took_s=0.2, findings=()), 0.3) == fitness.Fitness(None, None)


def test_a_warning_is_told_and_a_failure_keeps_the_node_out():
    warned = fitness.judge("node 1", Health(generation=0, took_s=0.2, findings=(FULL,)), 0.0)
    assert warned.unfit is None and warned.event is not None and warned.event["ok"]
    failed = fitness.judge("node 1", Health(generation=0, took_s=0.2, findings=(FULL, WRONG)), 0.0)
    assert failed.unfit == "node 1 failed its health check: matmul 0: core 3 computes wrong"
    assert failed.event is not None and len(failed.event["findings"]) == 2


@pytest.mark.parametrize(("skew_s", "ok"), [(3.0, True), (-3000.0, False)])
def test_the_driver_compares_clocks(skew_s: float, ok: bool):
    found = fitness.judge("node 1", Health(generation=0, took_s=0.2, findings=()), skew_s)
    assert found.event is not None and found.event["findings"][0]["check"] == "clock"
    assert (found.unfit is None) is ok


def health(play: Play, node: int, *findings: HealthFinding) -> list[Effect]:
    return play.deliver(node, Health(generation=0, took_s=0.2, findings=findings))


def begun() -> Play:
    """Both agents have said hello, and are being checked."""
    play = Play()
    play.do("begin")
    play.do("prepared")
    for node in (0, 1):
        play.hello(node)
    return play


def test_nodes_that_are_well_start_without_a_word():
    play = begun()
    for node in (0, 1):
        health(play, node)
        play.ready(node)
    assert play.coordinator.state is State.RUNNING
    assert not play.events("health") and not play.events("fault")


def test_a_warning_is_told_and_the_node_takes_part():
    play = begun()
    health(play, 1, FULL)
    for node in (0, 1):
        play.ready(node)
    assert play.coordinator.state is State.RUNNING
    (event,) = play.events("health")
    assert (event["node"], event["ok"]) == (1, True)
    assert event["findings"] == [{key: value for key, value in structs.asdict(FULL).items() if value is not None}]
    assert not play.events("fault")


def test_an_unfit_node_is_in_no_generation_and_ends_the_run_with_what_was_found():
    play = begun()
    play.ready(0)
    effects = health(play, 1, FULL, WRONG)
    (finish,) = [effect for effect in effects if isinstance(effect, Finish)]
    assert finish.code is Exit.UNUSABLE
    assert finish.message.startswith("node 1 (n1) failed its health check: matmul 0: core 3 computes wrong; ")
    assert not play.events("generation_started")
    (fault,) = play.events("fault")
    assert (fault["kind"], fault["nodes"]) == ("node_lost", [1])
    play.ready(1)
    assert play.coordinator.state is State.FINISHED


def test_a_node_that_comes_back_unfit_ends_the_run_but_what_it_holds_is_saved_first():
    play = Play()
    play.start()
    for node in (0, 1):
        play.deliver(node, Started(generation=5, pids={}))
    play.do("lost", 1, "killed")
    play.hello(1)
    effects = health(play, 1, WRONG)
    assert not any(isinstance(effect, Finish) for effect in effects)
    assert play.coordinator.state is State.SAVING
    effects = play.ready(0) + play.ready(1)
    assert play.requests(Sync)[-1][0] == 1  # its agent lives, and is asked for what it holds
    (finish,) = [effect for effect in play.effects if isinstance(effect, Finish)]
    assert finish.code is Exit.UNUSABLE and "core 3" in finish.message


def test_a_clock_that_is_off_is_told_and_one_that_is_far_off_keeps_the_node_out():
    play = begun()
    play.hello(1, skew_s=-5.0)
    health(play, 1)
    (event,) = play.events("health")
    assert "5.0 s behind" in event["findings"][0]["text"]
    assert play.coordinator.state is State.GATHERING
    play.hello(0, skew_s=1000.0)
    (finish,) = [effect for effect in health(play, 0) if isinstance(effect, Finish)]
    assert "1,000.0 s ahead" in finish.message


def test_a_node_that_only_has_to_save_may_be_unfit():
    play = Play()
    play.start()
    play.held(0, 8)
    play.held(1, 8)
    for rank in (0, 1):
        play.exit(rank, 0, step=8)
    assert play.coordinator.state is State.SAVING
    play.do("lost", 1, "killed")
    play.hello(1)
    health(play, 1, WRONG)
    assert not play.events("fault")
