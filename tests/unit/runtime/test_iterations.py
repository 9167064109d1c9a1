"""The usual iteration of a loop, learned from which optimizers step."""

import random

import pytest

from resilient.script.iterations import MOST, Iterations, Standing

READ = "."  # a batch


def after(loop: str, times: int, *, first: str = "") -> list[str]:
    """What is known after each step of the last iteration, where a loop is repeated: `C`omplete, `W`ithin, `U`nknown."""
    iterations = Iterations()
    found: list[str] = []
    for letter in first + loop * times:
        if letter == READ:
            iterations.read()
        else:
            found.append(iterations.step(ord(letter)).name[0])
    return found[-len(loop.replace(READ, "")) :]


@pytest.mark.parametrize(
    ("loop", "known"),
    [
        ("A", "C"),
        ("AB", "WC"),
        ("ABC", "WWC"),
        ("DDDDDG", "WWWWWC"),
        ("GDD", "WWC"),
        ("ABAC", "WWWC"),
        (".A", "C"),
        ("....A", "C"),
        (".AB", "WC"),
        (".A.B", "WC"),
        (".AAAA", "WWWC"),
        (".DGD", "WWC"),
        (".D.D.D.D.DG", "WWWWWC"),
        (".D.D.D.D.D.G", "WWWWWC"),
        (".DG.D.D", "WCWW"),
    ],
)
def test_an_iteration_is_complete_with_the_step_that_was_its_last_before(loop: str, known: str):
    assert "".join(after(loop, 14)) == known


@pytest.mark.parametrize("loop", ["A", "AB", ".AAAA", "DDDDDG", "ABAC", ".A"])
def test_an_iteration_is_expected_once_it_has_been_repeated_for_a_dozen_steps(loop: str):
    steps = len(loop.replace(READ, ""))
    assert set(after(loop, 1)) == set(after(loop, 2)) == {"U"}, "who knows which optimizer steps next"
    assert after(loop, 12 // steps)[-1] == "U" and after(loop, 12 // steps + 1)[-1] == "C"


def test_after_a_change_it_is_learned_again():
    assert "".join(after("DDDDDG", 4, first="D" * 100)) == "WWWWWC", "the other one steps from some step on"
    assert "".join(after("B", 30, first="A" * 100)) == "C", "another one has taken its place"
    assert "".join(after("BC", 30, first="ABC" * 100)) == "WC", "the first one does not step any more"
    assert "".join(after("A", 30, first="AB" * 100)) == "C", "another one does not step any more"


def test_of_a_loop_that_has_an_optimizer_step_seldom_nothing_is_sure():
    assert set(after("A" * 30 + "B", 5)) == {"U"}
    assert set(after(".A" * 30 + "B", 5)) == {"U"}


def test_of_a_loop_that_repeats_nothing_no_iteration_is_complete_too_early():
    """Whatever is drawn, and whatever is known: after so many steps there is one that is complete, or of which nobody knows."""
    for seed in range(50):
        draw, iterations = random.Random(seed), Iterations()
        since = 0
        for _ in range(2000):
            since = 0 if iterations.step(draw.choice([1, 1, 2, 3])) is not Standing.WITHIN else since + 1
            assert since <= 4 * MOST


def test_batches_of_longer_stretches_than_iterations_are_left_out_of_account():
    assert "".join(after("." + "A" * 50, 3)[-10:]) == "C" * 10
    assert "".join(after("." + "AB" * 50, 3)[-10:]) == "WC" * 5


def test_a_script_that_makes_a_new_optimizer_for_each_step_has_no_usual_iteration():
    iterations = Iterations()
    for optimizer in range(20_000):
        assert iterations.step(optimizer) is Standing.UNKNOWN
    assert len(iterations._known) < 10_000
