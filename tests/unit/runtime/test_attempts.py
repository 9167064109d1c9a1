"""When an attempt of a script that says nothing has got on, and what the policy makes of campaigns of them."""

import random
from dataclasses import replace

import pytest
from soak import soaked_after

from resilient.recovery.attempts import Attempt, got_on
from resilient.recovery.faults import Fault
from resilient.recovery.history import History
from resilient.recovery.policy import Action, Budget, Situation, decide

BUDGET = Budget(max_restarts_per_hour=30, give_up_after_same_step=3)

CASES = {
    "its first step": (Attempt(1, False, 5.0), [], True),
    "no step": (Attempt(0, False, 5.0), [], False),
    "more steps": (Attempt(30, False, 5.0), [Attempt(20, False, 5.0)], True),
    "more than the one before, if not than all": (
        Attempt(30, False, 5.0),
        [Attempt(40, False, 5.0), Attempt(20, False, 5.0)],
        True,
    ),
    "as many steps, from further on": (Attempt(20, False, 5.0, 40), [Attempt(20, False, 5.0, 20)], True),
    "as many steps": (Attempt(20, False, 5.0), [Attempt(20, False, 5.0)], False),
    "fewer steps, however long it took": (Attempt(10, False, 5000.0), [Attempt(20, False, 5.0)], False),
    "a checkpoint": (Attempt(10, True, 5.0), [Attempt(20, True, 5.0)], True),
    "a checkpoint that only the one before wrote": (Attempt(10, False, 5.0), [Attempt(20, True, 5.0)], False),
    "life, and nothing to be seen": (Attempt(None, False, 600.0), [Attempt(None, False, 700.0)], True),
    "a short life": (Attempt(None, False, 599.0), [], False),
    "life without a step that others had": (Attempt(None, False, 700.0), [Attempt(3, False, 5.0)], False),
}


@pytest.mark.parametrize(("attempt", "earlier", "expected"), CASES.values(), ids=CASES.keys())
def test_what_counts_as_getting_on(attempt: Attempt, earlier: list[Attempt], expected: bool):
    assert got_on(attempt, earlier) is expected


def fault(attempt: Attempt, step: int | None, cause: str = "SIGKILL") -> Fault:
    return Fault("g1-1", "exit", cause, (1,), (0,), step, cause, "", 0.0, attempt=attempt)


def play(faults: list[tuple[float, Fault]]) -> list[Action]:
    """What is done about each; a campaign ends when one is given up on."""
    done: list[Action] = []
    for number, (t, each) in enumerate(faults):
        done.append(decide(Situation(each, History(faults[:number]), BUDGET, False, t)))
        if done[-1].name == "give_up":
            break
    return done


# Interruptions of a run of 54 days on 16,384 GPUs, by cause (Llama 3, 2024).
CAUSES = {"GPU": 148, "HBM3": 72, "software": 54, "network": 35, "host": 79, "NIC": 7, "timeout": 7, "other": 64}
DAYS, FAILURES = 54, 466


@pytest.mark.parametrize("sees", ["absolute steps", "its own steps", "nothing"])
@pytest.mark.parametrize("seed", soaked_after(1, range(8)))
def test_466_failures_in_54_days_are_never_given_up_on(sees: str, seed: int):
    chance = random.Random(seed)
    step_s, save_s, restart_s = 10.0, 1800.0, 120.0
    faults: list[tuple[float, Fault]] = []
    now, saved = 0.0, 0
    for t in sorted(chance.uniform(0, DAYS * 86400) for _ in range(FAILURES)):
        lived_s = max(0.0, t - now)
        now = max(now, t)
        steps = int(max(0.0, lived_s - restart_s) / step_s)
        saves = int(steps * step_s / save_s)
        attempt = Attempt(None if sees == "nothing" else steps, saves > 0 and sees != "nothing", lived_s)
        step = None if sees == "nothing" else (saved if sees == "absolute steps" else 0) + steps + 1
        faults.append((now, fault(attempt, step, chance.choices(list(CAUSES), list(CAUSES.values()))[0])))
        saved += int(saves * save_s / step_s)
    assert [action.name for action in play(faults)] == ["restart_workers"] * FAILURES


def test_a_script_that_dies_in_its_first_step_is_given_up_at_the_third_time():
    faults = [(20.0 * k, fault(Attempt(None, False, 15.0), None)) for k in range(9)]
    assert [action.name for action in play(faults)] == ["restart_workers", "restart_workers", "give_up"]


def test_a_script_that_fails_at_the_same_step_without_a_checkpoint_is_given_up_at_the_third_time():
    faults = [(200.0 * k, fault(Attempt(50, False, 190.0), 51, "RuntimeError")) for k in range(9)]
    assert [action.name for action in play(faults)] == ["restart_workers", "restart_workers", "give_up"]


def test_an_exception_every_fifty_steps_is_put_up_with_as_long_as_checkpoints_are_written():
    faults = [(200.0 * k, fault(Attempt(50, True, 190.0), 51, "RuntimeError")) for k in range(50)]
    assert {action.name for action in play(faults)} == {"restart_workers"}


def test_steps_that_fail_further_and_further_on_are_no_reason_to_give_up():
    first = fault(Attempt(50, False, 190.0), 51, "RuntimeError")
    faults = [(200.0 * k, replace(first, step=51 + 50 * k)) for k in range(50)]
    assert {action.name for action in play(faults)} == {"restart_workers"}
