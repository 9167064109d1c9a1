"""Phases that the runtime has inferred, and those that a script has told: what is a hang in them, and after how long."""

from typing import Any

import msgspec
import pytest
from control_play import beat
from watched_ranks import COLLECTIVE, COMPILER, LIMITS, LOADER, MAIN, judged, received, seen, silent, warm

from resilient.control.judgement import ALONE, doing
from resilient.control.learning import AGAIN, SELDOM_FACTOR, SELDOM_FLOOR_S
from resilient.control.liveness import LONGER, NO_STEP, Suspicion, Watchdog
from resilient.protocol.messages import Heartbeat, Inspection

WAITS, SLEEPS, SPINS, COMPILES = seen(COLLECTIVE), seen(LOADER), seen(LOADER, "R", 0.99), seen(COMPILER)
DCP = '  File "/x/torch/distributed/checkpoint/filesystem.py", line 262 in write\n'
WRITES = seen(MAIN + DCP + '  File "/x/torch/serialization.py", line 1 in _save\n')


def attached(step: int, t: float, **more: Any) -> Heartbeat:
    """Of a script that is attached: its steps are told, and its phase is inferred."""
    return msgspec.structs.replace(beat(step, t, **more), inferred=True)


def inferred(watchdog: Watchdog, silent_s: float, *ranks: int, phase: str = "step") -> None:
    for rank in ranks:
        received(watchdog, rank, attached(10, 1.0, silent_s=silent_s, phase=phase, state="S"))


def guilty(watchdog: Watchdog, inspections: dict[int, Inspection]) -> tuple[int, ...] | None:
    suspicion = watchdog.suspects()
    assert suspicion is not None
    fault = judged(watchdog, suspicion, inspections)
    return fault.ranks if fault is not None else None


@pytest.mark.parametrize("phase", ["step", "start"])
@pytest.mark.parametrize(
    ("inspections", "longest_s"),
    [({0: WAITS, 1: SPINS}, LIMITS.ceiling_s), ({0: SPINS, 1: SPINS}, ALONE * LIMITS.ceiling_s)],
    ids=["one computes", "all compute"],
)
def test_a_rank_of_an_attached_script_that_computes_may_validate_until_the_ceiling_and_longer_if_nobody_waits(
    inspections: dict[int, Inspection], longest_s: float, phase: str
):
    watchdog = warm()
    for silent_s in (LIMITS.ceiling_s - 0.1, longest_s - 0.1):
        suspicion = Suspicion("hang", (0, 1), silent_s, 10)
        inferred(watchdog, silent_s, 0, 1, phase=phase)
        assert judged(watchdog, suspicion, inspections) is None
    inferred(watchdog, longest_s + 0.1, 0, 1, phase=phase)
    assert guilty(watchdog, inspections) is not None


def test_ranks_that_compute_for_very_long_are_inspected_at_growing_intervals():
    watchdog = warm()
    looked: list[float] = []
    for tenth in range(int(ALONE * LIMITS.ceiling_s * 10)):
        inferred(watchdog, tenth / 10, 0, 1)
        suspicion = watchdog.suspects()
        if suspicion is not None:
            looked.append(suspicion.silent_s)
            assert judged(watchdog, suspicion, {0: SPINS, 1: SPINS}) is None
            watchdog.excuse(suspicion)
    assert 5 < len(looked) < 15


def test_a_rank_of_an_attached_script_that_sleeps_is_found_as_soon_as_one_of_a_script_that_says_nothing():
    watchdog = warm()
    inferred(watchdog, LIMITS.floor_s + 0.1, 0, 1)
    assert guilty(watchdog, {0: WAITS, 1: SLEEPS}) == (1,)


@pytest.mark.parametrize("observed", [True, False], ids=["says nothing", "attached"])
def test_a_rank_that_spins_for_longer_than_anything_may_take_hangs(observed: bool):
    watchdog = warm()
    for rank in (0, 1):
        heartbeat = attached(10, 1.0, silent_s=LIMITS.ceiling_s + 0.1, state="R")
        received(watchdog, rank, msgspec.structs.replace(heartbeat, observed=observed))
    assert guilty(watchdog, {0: WAITS, 1: SPINS}) == (1,)


def test_a_rank_that_compiles_for_longer_than_anything_may_take_hangs():
    watchdog = warm()
    silent(watchdog, LIMITS.ceiling_s - 0.1, 0, 1)
    assert guilty(watchdog, {0: WAITS, 1: COMPILES}) is None
    silent(watchdog, LIMITS.ceiling_s + 0.1, 0, 1)
    suspicion = watchdog.suspects()
    assert suspicion is not None
    fault = judged(watchdog, suspicion, {0: WAITS, 1: COMPILES})
    assert fault is not None and (fault.kind, fault.cause, fault.ranks) == ("hang", "compiling", (1,))


def test_a_rank_that_writes_a_checkpoint_for_longer_than_anything_may_take_hangs():
    watchdog = warm()
    for silent_s, expected in ((LIMITS.ceiling_s - 0.1, None), (LIMITS.ceiling_s + 0.1, (1,))):
        inferred(watchdog, silent_s, 0)
        inferred(watchdog, LIMITS.ceiling_s - 1.0, 1, phase="snapshot")
        assert guilty(watchdog, {0: WAITS, 1: SLEEPS}) == expected


def test_a_rank_that_writes_its_part_by_torch_distributed_checkpoint_does_not_wait_for_others():
    watchdog = warm()
    inferred(watchdog, LIMITS.floor_s + 0.1, 0)
    inferred(watchdog, 1.0, 1, phase="snapshot")
    assert guilty(watchdog, {0: WAITS, 1: WRITES}) is None
    inferred(watchdog, LIMITS.ceiling_s + 0.1, 0)
    inferred(watchdog, LIMITS.ceiling_s - 1.0, 1, phase="snapshot")
    assert guilty(watchdog, {0: WAITS, 1: WRITES}) == (1,)


def test_a_rank_that_waits_for_others_in_torch_distributed_checkpoint_waits():
    gathers = COLLECTIVE.partition('  File "/y/')[0]
    assert doing(seen(gathers + DCP)).waiting == "collective"


def test_ranks_that_wait_for_one_that_says_it_evaluates_are_no_fault_before_its_own_time_is_over():
    watchdog = warm()
    inferred(watchdog, 3.0, 0)
    silent(watchdog, 3.0, 1, phase="eval")
    assert guilty(watchdog, {0: WAITS, 1: SLEEPS}) is None
    silent(watchdog, LIMITS.ceiling_s + 0.1, 1, phase="eval")
    assert guilty(watchdog, {0: WAITS, 1: SLEEPS}) == (1,)


@pytest.mark.parametrize("phase", ["eval", "snapshot"])
def test_a_hang_among_ranks_that_all_evaluate_is_found_although_one_of_them_was_silent_for_too_long_before(phase: str):
    """Whoever waits for others was suspected first, and has all the time there is since: it is not what they wait for."""
    watchdog = warm()
    for rank in (0, 1):
        for silent_s in (0.0, 0.5):
            received(watchdog, rank, attached(9, 0.9, phase=phase, silent_s=silent_s))
        received(watchdog, rank, attached(10, 1.0))
    inferred(watchdog, SELDOM_FLOOR_S + 0.1, 0, phase=phase)
    inferred(watchdog, SELDOM_FLOOR_S - 0.1, 1, phase=phase)
    suspicion = watchdog.suspects()
    assert suspicion is not None and suspicion.ranks == (0,)
    assert judged(watchdog, suspicion, {0: WAITS, 1: SLEEPS}) is None
    watchdog.excuse(suspicion)
    inferred(watchdog, SELDOM_FLOOR_S + 1.0, 0, 1, phase=phase)
    assert guilty(watchdog, {0: WAITS, 1: SLEEPS}) == (1,)


# -- no false hang twice -----------------------------------------------------------------------------------------------


def reaches(watchdog: Watchdog, last: int, first: int = 0, t: float = 0.0) -> None:
    """Two ranks of an attempt, each of whose steps takes a tenth of a second."""
    for step in range(first, last + 1):
        for rank in (0, 1):
            received(watchdog, rank, attached(step, t + (step - first) * 0.1, first=(first, t)))


def ended_at(step: int) -> Watchdog:
    """Ranks that were ended for a silence after this step, and are started anew."""
    watchdog = Watchdog(LIMITS)
    watchdog.begin()
    reaches(watchdog, step)
    received(watchdog, 0, attached(step, step * 0.1, silent_s=3.0))
    assert watchdog.suspects() is not None
    watchdog.gave_up(0)
    watchdog.begin()
    return watchdog


def test_an_attached_script_that_was_ended_for_a_silence_may_be_silent_there_for_longer():
    watchdog = ended_at(10)
    reaches(watchdog, 10)
    assert watchdog.timeout_s(0) == LONGER * LIMITS.floor_s
    silent(watchdog, 0.0, 1)
    assert watchdog.timeout_s(1) == LIMITS.floor_s, "what a rank says itself is taken at its word"


def test_an_attempt_that_goes_on_from_the_step_it_was_ended_at_is_not_ended_for_the_next_validation():
    """The newest snapshot is of that very step, before whose successor nothing is judged."""
    watchdog = ended_at(10)
    for silent_s in (0.0, 8.5):
        received(watchdog, 0, attached(NO_STEP, 0.0, activity_t=50.0, silent_s=silent_s))
    reaches(watchdog, 900, first=11, t=59.0)
    assert AGAIN * 8.5 <= watchdog.timeout_s(0) <= AGAIN * LONGER * LIMITS.floor_s


def test_a_first_step_that_takes_long_by_itself_makes_later_hangs_cost_no_more_than_the_next_attempt_would_have_waited():
    watchdog = ended_at(10)
    for silent_s in (0.0, 80.0):  # kernels are compiled
        received(watchdog, 0, attached(NO_STEP, 0.0, activity_t=50.0, silent_s=silent_s))
    reaches(watchdog, 900, first=11, t=131.0)
    assert watchdog.timeout_s(0) == AGAIN * LONGER * LIMITS.floor_s


def test_a_silence_that_was_no_hang_is_borne_again_also_where_a_batch_is_read_before_the_step_is_over():
    watchdog = ended_at(10)
    reaches(watchdog, 10)
    for rank in (0, 1):
        received(watchdog, rank, attached(10, 1.0, silent_s=9.0))
        received(watchdog, rank, attached(10, 1.0, activity_t=10.0, silent_s=0.1, phase="data"))
    for step in range(11, 900):
        for rank in (0, 1):
            received(watchdog, rank, attached(step, 9.2 + (step - 10) * 0.1))
    assert watchdog.timeout_s(0) >= AGAIN * 9.0


# -- after the loop ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 10])
def test_what_follows_a_loop_has_all_the_time_there_is_however_few_steps_it_had(steps: int):
    watchdog = Watchdog(LIMITS)
    watchdog.begin()
    received(watchdog, 0, attached(0, 0.0, phase="start", silent_s=0.2))
    received(watchdog, 0, attached(0, 0.0, activity_t=0.3))
    for step in range(1, steps + 1):
        received(watchdog, 0, attached(step, step * 0.5, phase="start", silent_s=0.1))
        received(watchdog, 0, attached(step, step * 0.5, activity_t=step * 0.5 + 0.1))
    received(watchdog, 0, attached(steps, steps * 0.5, phase="start", activity_t=steps * 0.5 + 0.2, silent_s=SELDOM_FLOOR_S + 1.0))
    assert watchdog.timeout_s(0) == LIMITS.ceiling_s and watchdog.suspects() is None


def test_copies_in_memory_do_not_make_checkpoints_of_the_script_hangs():
    watchdog = warm()
    for step in range(10, 20):
        received(watchdog, 0, beat(step, step * 0.1, phase="snapshot", silent_s=0.01))
        received(watchdog, 0, beat(step, step * 0.1, activity_t=step * 0.1 + 0.02))
    inferred(watchdog, 0.0, 0, phase="snapshot")
    assert watchdog.timeout_s(0) == LIMITS.ceiling_s, "of these none was seen"
    silent(watchdog, 0.0, 0, phase="snapshot")
    assert watchdog.timeout_s(0) == max(SELDOM_FLOOR_S, SELDOM_FACTOR * 0.01)
