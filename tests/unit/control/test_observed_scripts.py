"""Scripts that say nothing, in the coordinator: what is a hang in them, and what an attempt of theirs has come to."""

import msgspec
import pytest
from control_play import Play, beat
from watched_ranks import COLLECTIVE, LIMITS, LOADER, MAIN, judged, received, seen, silent, warm

from resilient.config.timeouts import SILENCE_REPORT_S, WRITING_S
from resilient.control.learning import FACTOR, NEEDED
from resilient.control.liveness import LONGER, Watchdog
from resilient.protocol.messages import Inspection, Record, Stop
from resilient.recovery.standing import Standing

BACKWARD = MAIN + '  File "/x/torch/autograd/graph.py", line 829 in _engine_run_backward\n  File "/y/train.py", line 10 in main\n'
UNFINISHED = Standing("0 [0, 1]", 31, "gloo:all_reduce [[72]]", True)


def observed(watchdog: Watchdog, silent_s: float, *ranks: int, phase: str = "step") -> None:
    for rank in ranks:
        heartbeat = beat(10, 1.0, silent_s=silent_s, phase=phase, state="S")
        received(watchdog, rank, msgspec.structs.replace(heartbeat, observed=True, inferred=True))


@pytest.mark.parametrize(
    ("inspections", "guilty"),
    [
        ({0: seen(COLLECTIVE), 1: seen(LOADER)}, (1,)),
        ({0: seen(COLLECTIVE), 1: seen(LOADER, "R", 0.99)}, None),
        ({0: seen(LOADER, "R", 0.99), 1: seen(LOADER, "R", 0.99)}, None),
    ],
    ids=["one sleeps", "one computes", "all compute"],
)
def test_a_rank_that_computes_without_a_word_may_validate(inspections: dict[int, Inspection], guilty: tuple[int, ...] | None):
    watchdog = warm()
    observed(watchdog, 3.0, 0, 1)
    suspicion = watchdog.suspects()
    assert suspicion is not None
    fault = judged(watchdog, suspicion, inspections)
    assert (fault.ranks if fault is not None else None) == guilty


def reaches(watchdog: Watchdog, last: int) -> None:
    """Two ranks of an attempt, each of whose steps takes a tenth of a second."""
    watchdog.begin()
    for step in range(last + 1):
        for rank in (0, 1):
            received(watchdog, rank, msgspec.structs.replace(beat(step, step * 0.1), observed=True, inferred=True))


def test_a_script_that_was_ended_for_a_silence_may_be_silent_there_for_longer_in_the_next_attempts():
    """As for a validation by one rank, which sleeps or reads, in a step that is long for the first time."""
    watchdog, borne = Watchdog(LIMITS), LIMITS.floor_s
    for _ in range(3):
        reaches(watchdog, 10)
        assert watchdog.timeout_s(0) == pytest.approx(min(borne, LIMITS.ceiling_s))
        observed(watchdog, borne + 0.1, 0, 1)
        assert (watchdog.suspects() is None) == (borne > LIMITS.ceiling_s)
        watchdog.gave_up(0)
        borne *= LONGER
    reaches(watchdog, 9)
    assert watchdog.timeout_s(0) == LIMITS.floor_s, "at this step alone"


def test_what_was_no_hang_after_all_is_not_taken_for_one_again():
    watchdog = Watchdog(LIMITS)
    reaches(watchdog, 10)
    observed(watchdog, 3.0, 0, 1)
    watchdog.gave_up(0)
    reaches(watchdog, 10)
    observed(watchdog, 9.0, 0, 1)
    assert watchdog.suspects() is None
    for step in range(11, 900):
        for rank in (0, 1):
            received(watchdog, rank, msgspec.structs.replace(beat(step, 9.0 + step * 0.1), observed=True, inferred=True))
    assert 18.0 <= watchdog.timeout_s(0) <= 2 * (9.0 + SILENCE_REPORT_S)


def test_a_rank_that_says_its_phase_is_ended_as_soon_in_each_attempt():
    watchdog = warm()
    silent(watchdog, 3.0, 0, 1)
    before = watchdog.timeout_s(0)
    watchdog.gave_up(0)
    assert watchdog.timeout_s(0) == before


def test_a_rank_that_says_its_phase_is_taken_at_its_word():
    watchdog = warm()
    silent(watchdog, 3.0, 0, 1)
    suspicion = watchdog.suspects()
    assert suspicion is not None
    fault = judged(watchdog, suspicion, {0: seen(COLLECTIVE), 1: seen(LOADER, "R", 0.99)})
    assert fault is not None and fault.ranks == (1,)


def test_ranks_that_wait_for_one_that_writes_a_checkpoint_are_no_fault():
    watchdog = warm()
    observed(watchdog, 3.0, 0)
    observed(watchdog, 3.0, 1, phase="snapshot")
    suspicion = watchdog.suspects()
    assert suspicion is not None and suspicion.ranks == (0,)
    assert judged(watchdog, suspicion, {0: seen(COLLECTIVE), 1: seen(LOADER)}) is None


def test_a_backward_pass_that_has_not_finished_a_collective_waits_in_it():
    watchdog = warm()
    observed(watchdog, 3.0, 0, 1)
    suspicion = watchdog.suspects()
    assert suspicion is not None
    waiting = msgspec.structs.replace(seen(BACKWARD), standing=UNFINISHED)
    fault = judged(watchdog, suspicion, {0: waiting, 1: seen(LOADER)})
    assert fault is not None and (fault.kind, fault.ranks) == ("hang", (1,))


def observing(play: Play, steps: int, *, base: int = 0, saved: bool = False) -> None:
    """An attempt that finishes so many steps, and perhaps writes a checkpoint, before it is killed."""
    play.resumed(base, "script")
    for step in range(base + 1, base + steps + 1):
        play.now += 0.1
        heartbeat = msgspec.structs.replace(beat(step, play.now), observed=True, inferred=True)
        for node in range(2):
            play.report(node, heartbeats={node: heartbeat})
    if saved:
        play.report(0, records=(Record(0, play.now, "script_checkpoint", {"step": base + steps, "path": "/out"}),))
    play.exit(1, step=base + steps)
    play.again()
    play.wait(40.0)


def names(play: Play) -> list[str]:
    return [action["name"] for action in play.events("action")]


@pytest.mark.parametrize(("saved", "expected"), [(True, ["restart_workers"] * 6), (False, ["restart_workers"] * 2 + ["give_up"])])
def test_attempts_of_as_many_steps_are_given_up_on_only_without_a_checkpoint(saved: bool, expected: list[str]):
    play = Play()
    play.start()
    for _ in expected:
        observing(play, 5, saved=saved)
    assert names(play) == expected


def test_a_checkpoint_that_many_ranks_write_is_told_once():
    play = Play()
    play.start()
    play.resumed(0, "script")
    for rank in (1, 0, 1):
        play.report(rank, records=(Record(rank, play.now, "script_checkpoint", {"step": 5, "path": "/out"}),))
    assert [event["rank"] for event in play.events("script_checkpoint")] == [1, 0]


@pytest.mark.parametrize(("stopping", "writing_s"), [(False, WRITING_S), (True, 0.0)])
def test_a_checkpoint_of_a_script_may_be_finished_after_a_fault_and_not_in_a_stop(stopping: bool, writing_s: float):
    play = Play()
    play.start()
    play.resumed(0, "script")
    play.beat(0, 5)
    if stopping:
        play.do("stop", "SIGTERM")
    stops = play.sent(Stop, play.exit(1, step=5))
    assert [each.message.writing_s for each in stops] == [writing_s] * 2


def by_collectives(signs: int, apart_s: float = 1.0, ranks: int = 2) -> Watchdog:
    """Ranks of a script without steps that have told so often of collectives."""
    watchdog = Watchdog(LIMITS)
    watchdog.begin()
    for sign in range(1, signs + 1):
        for rank in range(ranks):
            without_steps(watchdog, rank, sign * apart_s, 0.0)
            if sign < signs:
                without_steps(watchdog, rank, sign * apart_s, max(0.0, apart_s - SILENCE_REPORT_S))
    return watchdog


def without_steps(watchdog: Watchdog, rank: int, active_t: float, silent_s: float) -> None:
    heartbeat = beat(-1, active_t, silent_s=silent_s, phase="start", state="S")
    received(watchdog, rank, msgspec.structs.replace(heartbeat, observed=True, inferred=True))


@pytest.mark.parametrize(
    ("signs", "apart_s", "timeout_s"),
    [(NEEDED, 1.0, LIMITS.ceiling_s), (NEEDED + 1, 1.0, FACTOR * SILENCE_REPORT_S), (NEEDED + 1, 6.0, FACTOR * 6.0)],
    ids=["not known yet", "often", "seldom"],
)
def test_a_script_without_steps_hangs_if_its_collectives_stop(signs: int, apart_s: float, timeout_s: float):
    watchdog = by_collectives(signs, apart_s)
    assert watchdog.timeout_s(0) == pytest.approx(timeout_s)
    for rank in (0, 1):
        without_steps(watchdog, rank, signs * apart_s, timeout_s - 0.1)
    assert watchdog.suspects() is None
    without_steps(watchdog, 1, signs * apart_s, timeout_s + 0.1)
    suspicion = watchdog.suspects()
    assert suspicion is not None and suspicion.ranks == (1,)
    fault = judged(watchdog, suspicion, {0: seen(COLLECTIVE), 1: seen(LOADER)})
    assert fault is not None and (fault.kind, fault.ranks) == ("hang", (1,))
    assert "step" not in fault.detail
    computing = judged(watchdog, suspicion, {0: seen(COLLECTIVE), 1: seen(LOADER, "R", 0.99)})
    assert (computing is None) == (timeout_s < LIMITS.ceiling_s)


def test_a_script_whose_collectives_are_not_seen_never_hangs():
    watchdog = Watchdog(LIMITS)
    watchdog.begin()
    received(watchdog, 0, beat(-1, 0.0, silent_s=1000.0, phase="start", state="S"))
    assert watchdog.suspects() is None


def test_after_its_first_step_a_script_is_judged_by_steps():
    watchdog = by_collectives(10)
    heartbeat = beat(1, 11.0, silent_s=50.0, phase="step", state="S")
    received(watchdog, 0, msgspec.structs.replace(heartbeat, observed=True, inferred=True))
    assert watchdog.suspects() is None and watchdog.timeout_s(0) > FACTOR * SILENCE_REPORT_S
