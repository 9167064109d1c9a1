"""What the coordinator makes of the health of nodes."""

from typing import Any

from resilient.driver.coordinator import State
from resilient.driver.effects import Effect, Finish
from test_coordinator import Play

from resilient.exits import Exit

WRONG = {"check": "matmul 0", "verdict": "fail", "text": "core 3 computes wrong", "measured": {}}
FULL = {"check": "tier nvme", "verdict": "warn", "text": "only 3 inodes are free", "measured": {}}


def health(play: Play, node: int, *findings: dict[str, Any]) -> list[Effect]:
    return play.tell(node, "health", ok=WRONG not in findings, took_s=0.2, findings=list(findings))


def begun() -> Play:
    """Both agents have said hello, and are being checked."""
    play = Play()
    play.do("begin")
    play.do("prepared")
    for node in (0, 1):
        play.tell(node, "hello", host=f"n{node}", addr=f"10.0.0.{node}", token="", t=play.now)
    return play


def ready(play: Play, node: int) -> list[Effect]:
    return play.tell(node, "ready", store_port=5000 + node)


def test_nodes_that_are_well_start_without_a_word():
    play = begun()
    for node in (0, 1):
        health(play, node)
        ready(play, node)
    assert play.coordinator.state is State.RUNNING
    assert not play.events("health") and not play.events("fault")


def test_a_warning_is_told_and_the_node_takes_part():
    play = begun()
    health(play, 1, FULL)
    for node in (0, 1):
        ready(play, node)
    assert play.coordinator.state is State.RUNNING
    (event,) = play.events("health")
    assert (event["node"], event["ok"], event["findings"]) == (1, True, [FULL])
    assert not play.events("fault")


def test_an_unfit_node_is_in_no_generation_and_ends_the_run_with_what_was_found():
    play = begun()
    ready(play, 0)
    effects = health(play, 1, FULL, WRONG)
    (finish,) = [effect for effect in effects if isinstance(effect, Finish)]
    assert finish.code is Exit.UNUSABLE
    assert finish.message.startswith("node 1 (n1) failed its health check: matmul 0: core 3 computes wrong; ")
    assert not play.events("generation_started")
    (fault,) = play.events("fault")
    assert (fault["kind"], fault["nodes"]) == ("node_lost", [1])
    ready(play, 1)
    assert play.coordinator.state is State.FINISHED


def test_a_node_that_comes_back_unfit_ends_the_run_but_what_it_holds_is_saved_first():
    play = Play()
    play.start()
    for node in (0, 1):
        play.tell(node, "started", generation=5, pids={})
    play.coordinator.lost(1, "killed", play.now)
    play.tell(1, "hello", host="n1", addr="10.0.0.1", token="", t=play.now)
    effects = health(play, 1, WRONG)
    assert not any(isinstance(effect, Finish) for effect in effects)
    assert play.coordinator.state is State.SAVING
    effects = ready(play, 0) + ready(play, 1)
    assert play.orders("sync")[-1][0] == 1  # its agent lives, and is asked for what it holds
    (finish,) = [effect for effect in play.effects if isinstance(effect, Finish)]
    assert finish.code is Exit.UNUSABLE and "core 3" in finish.message


def test_a_clock_that_is_off_is_told_and_one_that_is_far_off_keeps_the_node_out():
    play = begun()
    play.tell(1, "hello", host="n1", addr="10.0.0.1", token="", t=play.now - 5)
    health(play, 1)
    (event,) = play.events("health")
    assert "5.0 s behind" in event["findings"][0]["text"]
    assert play.coordinator.state is State.GATHERING
    play.tell(0, "hello", host="n0", addr="10.0.0.0", token="", t=play.now + 1000)
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
    play.tell(1, "hello", host="n1", addr="10.0.0.1", token="", t=play.now)
    health(play, 1, WRONG)
    assert not play.events("fault")
