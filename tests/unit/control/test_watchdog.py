"""Who is suspected, after how long, and who is named."""

import random
from collections.abc import Iterable

import pytest
from control_play import Play, beat
from watched_ranks import COLLECTIVE, COMPILER, LIMITS, LOADER, judged, received, seen, silent, warm

from resilient.config.timeouts import SILENCE_REPORT_S, STOPPED_S
from resilient.control.judgement import doing, innermost
from resilient.control.learning import AGAIN, FACTOR, KEPT, SELDOM_FLOOR_S, patience_s
from resilient.control.liveness import NO_STEP, WARM_STEPS, Suspicion, Watchdog
from resilient.protocol.messages import Inspect, Inspection


@pytest.mark.parametrize(
    ("step_s", "timeout_s"), [(0.1, 2.0), (1.0, FACTOR), (60.0, 100.0)], ids=["the floor", "learned", "the ceiling"]
)
def test_a_rank_is_suspected_after_a_multiple_of_the_longest_silence(step_s: float, timeout_s: float):
    watchdog = warm(step_s=step_s)
    assert watchdog.timeout_s(0) == pytest.approx(timeout_s)
    silent(watchdog, timeout_s - 0.1, 0, 1)
    assert watchdog.suspects() is None
    silent(watchdog, timeout_s + 0.1, 1)
    assert watchdog.suspects() == Suspicion("hang", (1,), timeout_s + 0.1, 10)


@pytest.mark.parametrize("before", [True, False], ids=["started", "first seen"])
@pytest.mark.parametrize(("phased", "timeout_s"), [(True, LIMITS.floor_s), (False, SELDOM_FLOOR_S)])
def test_ranks_of_which_the_first_word_tells_of_many_steps_have_had_their_first(before: bool, phased: bool, timeout_s: float):
    watchdog, phase = Watchdog(LIMITS), "step" if phased else "start"
    watchdog.begin()
    for rank in (0, 1):
        if before:
            received(watchdog, rank, beat(NO_STEP, 0.0, phased=phased, phase=phase))
        received(watchdog, rank, beat(109, 4.6, phased=phased, phase=phase, first=(0, 4.0)))
    assert watchdog.timeout_s(0) == timeout_s
    silent_s = timeout_s + 0.1
    received(watchdog, 1, beat(109, 4.6, silent_s=silent_s, phased=phased, phase=phase, first=(0, 4.0)))
    assert watchdog.suspects() == Suspicion("hang", (1,), silent_s, 109)


def test_of_a_single_step_nothing_is_learned_but_that_it_is_over():
    watchdog = Watchdog(LIMITS)
    watchdog.begin()
    received(watchdog, 0, beat(1, 5.0, first=(0, 4.0)))
    assert watchdog.timeout_s(0) == LIMITS.ceiling_s


def test_a_silence_that_was_no_hang_teaches():
    watchdog = warm()
    silent(watchdog, 1.5, 0)
    received(watchdog, 0, beat(11, 2.6))
    assert watchdog.timeout_s(0) == pytest.approx(FACTOR * 1.6)


@pytest.mark.parametrize(
    ("seen", "seconds"),
    [
        ([1.0], FACTOR),
        ([1.0, 3.0], 3 * FACTOR),
        ([1.0] * 99 + [10.0], 20.0),
        ([0.1] * 299 + [60.0], 120.0),
        ([1.0] * 98 + [10.0] * 2, 10 * FACTOR),
        ([float(number % 10 + 1) for number in range(300)], 10 * FACTOR),
        ([1.0] * 299 + [1.2], FACTOR),
    ],
    ids=["one", "few", "a rare one", "a very long one", "not so rare", "ten times as long again and again", "even"],
)
def test_patience_follows_what_is_usual_and_what_is_rare_may_come_again(seen: list[float], seconds: float):
    assert patience_s(seen) == pytest.approx(seconds)


def stepping(watchdog: Watchdog, durations: Iterable[float], *, first: int = 10, ranks: int = 2) -> list[Suspicion]:
    """Every rank tells four times a second how long it has been silent, and after each step that it has finished it."""
    found, t = [], float(first)
    for step, seconds in enumerate(durations, first):
        for told in range(1, int(seconds * 4) + 1):
            for rank in range(ranks):
                received(watchdog, rank, beat(step, t, silent_s=told / 4))
            suspicion = watchdog.suspects()
            found += [suspicion] if suspicion is not None else []
        t += seconds
        for rank in range(ranks):
            received(watchdog, rank, beat(step + 1, t))
    return found


def trained(play: Play, steps: Iterable[int], step_s: float) -> None:
    """All members finish these steps, and tell meanwhile that they are silent."""
    for step in steps:
        for part in range(1, 9):
            play.now += step_s / 8
            for node in play.coordinator.membership.members:
                play.beat(node, step - (part < 8), silent_s=step_s * part / 8 if part < 8 else 0.0)


def test_steps_that_take_longer_on_fewer_nodes_are_no_hang():
    play = Play(8, fewer=(1,))
    play.start()
    play.resumed(0)
    trained(play, range(1, 21), 3.0)
    for node in range(1, 8):
        play.do("lost", node, "its rack has lost power")
    play.again(0)
    play.wait(play.job.rejoin_s + 1.0)
    play.resumed(20)
    assert play.coordinator.membership.members == (0,)
    trained(play, range(21, 31), 24.0)
    assert not play.sent(Inspect)
    play.beat(0, 30, silent_s=121.0)
    assert play.sent(Inspect)


def test_what_was_learned_counts_for_more_in_a_generation_that_is_slower_and_for_no_less_in_one_that_is_faster():
    watchdog = warm(step_s=3.0)
    for _ in range(9):
        watchdog.begin(0.25)
        assert not stepping(watchdog, [12.0] * WARM_STEPS)
        assert watchdog.timeout_s(0) == pytest.approx(4 * 3.0 * FACTOR)
        watchdog.begin(1.0)
        assert not stepping(watchdog, [3.0] * WARM_STEPS)
        assert watchdog.timeout_s(0) == pytest.approx(3.0 * FACTOR)
    watchdog.begin(0.25)
    assert not stepping(watchdog, [12.0] * (WARM_STEPS + 2))
    watchdog.begin(1.0)
    assert not stepping(watchdog, [3.0] * WARM_STEPS)
    assert watchdog.timeout_s(0) == pytest.approx(12.0 * FACTOR)
    assert not stepping(watchdog, [3.0] * KEPT, first=20)
    assert watchdog.timeout_s(0) == pytest.approx(3.0 * FACTOR)


def test_a_slow_step_is_forgotten():
    watchdog = warm(step_s=1.0)
    assert not stepping(watchdog, [1.0] * 50)
    assert not stepping(watchdog, [4.9], first=60)
    assert watchdog.timeout_s(0) == pytest.approx(4.9 * FACTOR)  # one of fifty is not rare yet
    assert not stepping(watchdog, [1.0] * 60, first=61)
    assert watchdog.timeout_s(0) == pytest.approx(4.9 * AGAIN)
    assert not stepping(watchdog, [1.0] * KEPT, first=121)
    assert watchdog.timeout_s(0) == pytest.approx(FACTOR)


def test_what_comes_between_steps_does_not_make_steps_longer():
    watchdog = warm(step_s=0.5)
    for step in range(10, 40):  # an evaluation of a minute after every step
        t = 60.5 * (step - 10)
        received(watchdog, 0, beat(step, t))
        for phase, silent_s in (("eval", 30.0), ("eval", 59.5), ("step", 0.1)):
            received(watchdog, 0, beat(step, t, phase=phase, silent_s=silent_s, activity_t=t + (phase == "step")))
    assert watchdog.timeout_s(0) <= FACTOR * (0.1 + SILENCE_REPORT_S)


def test_the_first_steps_of_a_generation_do_not_make_the_others_longer():
    watchdog = warm(step_s=0.5)
    watchdog.begin()
    assert stepping(watchdog, [30.0] * WARM_STEPS + [0.5] * 10, ranks=1) == []
    assert watchdog.timeout_s(0) == pytest.approx(FACTOR * 0.5)


@pytest.mark.parametrize("ranks", [1, 64])
def test_how_far_back_is_learned_does_not_depend_on_the_number_of_ranks(ranks: int):
    watchdog = warm(ranks, step_s=1.0)
    assert not stepping(watchdog, [4.0] + [1.0] * (KEPT - 2), ranks=ranks)
    assert watchdog.timeout_s(0) == pytest.approx(4.0 * AGAIN)


@pytest.mark.parametrize("seed", range(3))
def test_steps_that_vary_tenfold_are_no_hang(seed: int):
    chance = random.Random(seed)
    watchdog = warm(step_s=1.0)
    stepping(watchdog, (1.0, 10.0, 3.0))  # both ends are known
    assert not stepping(watchdog, (chance.uniform(1.0, 10.0) for _ in range(500)), first=13)
    assert not stepping(watchdog, (10.0 if chance.random() < 0.02 else 1.0 for _ in range(1500)), first=513)


@pytest.mark.parametrize("phase", ["eval", "start"])
def test_where_nothing_is_known_there_is_time(phase: str):
    watchdog = warm()
    silent(watchdog, 50.0, 0, phase=phase)
    assert watchdog.suspects() is None
    silent(watchdog, 101.0, 0, phase=phase)
    assert watchdog.suspects() is not None


def test_what_was_learned_outlives_a_generation_but_its_first_steps_have_more_time():
    watchdog = warm(step_s=0.5)
    watchdog.begin()
    received(watchdog, 0, beat(10, 100.0))
    received(watchdog, 0, beat(11, 100.5))
    assert watchdog.timeout_s(0) == LIMITS.ceiling_s  # of these nothing is known
    for step in range(12, 16):
        received(watchdog, 0, beat(step, 95 + step / 2))
    assert watchdog.timeout_s(0) == pytest.approx(FACTOR * 0.5)


def test_a_rank_that_tells_no_phase_has_more_time():
    watchdog = warm(step_s=0.1, phased=False)
    silent(watchdog, 20.0, 0, phase="start", phased=False)
    assert watchdog.suspects() is None
    silent(watchdog, 61.0, 0, phase="start", phased=False)
    assert watchdog.suspects() is not None


def test_a_rank_that_never_finished_a_step_is_not_watched():
    watchdog = Watchdog(LIMITS)
    for silent_s in (0.0, 1000.0):
        received(watchdog, 0, beat(-1, phase="start", silent_s=silent_s, phased=False))
    assert watchdog.suspects() is None


def test_a_rank_that_is_stopped_before_its_first_activity_is_suspected_once_it_was_told_for_long_enough():
    watchdog = Watchdog(LIMITS)
    watchdog.begin()

    def tell(rank: int, now_s: float, state: str) -> None:
        watchdog.on_heartbeat(rank, beat(-1, 0.0, phase="start", state=state, phased=False), now_s)

    for now_s, state in ((100.0, "S"), (101.0, "T"), (101.5, "R"), (300.0, "T"), (300.5, "T")):
        tell(0, now_s, "S")
        tell(1, now_s, state)
        assert watchdog.suspects() is None
    tell(1, 300.0 + STOPPED_S, "T")
    suspicion = watchdog.suspects()
    assert suspicion == Suspicion("stopped", (1,), STOPPED_S, -1)
    tell(1, 302.0, "T")
    assert watchdog.still(suspicion)
    tell(0, 302.0, "T")
    assert watchdog.suspects() is None, "the whole job is suspended"
    known = watchdog.timeout_s(1)
    watchdog.on_heartbeat(1, beat(-1, 400.0, phase="start", phased=False), 400.0)
    assert watchdog.timeout_s(1) == known, "that it was stopped says nothing of how long it takes"


def test_a_stopped_rank_is_suspected_at_once_and_a_suspended_job_never():
    watchdog = warm()
    silent(watchdog, STOPPED_S, 1, state="T")
    assert watchdog.suspects() == Suspicion("stopped", (1,), STOPPED_S, 10)
    silent(watchdog, 50.0, 0, 1, state="T")
    assert watchdog.suspects() is None
    silent(watchdog, 51.0, 0, 1, state="R")  # continued a moment ago
    assert watchdog.suspects() is None
    for rank in (0, 1):
        received(watchdog, rank, beat(11, 60.0))
    assert watchdog.timeout_s(0) == LIMITS.floor_s  # and nothing was learned from it


def test_a_rank_that_has_ended_is_not_silent():
    watchdog = warm()
    watchdog.ended(1)
    silent(watchdog, 50.0, 1)
    assert watchdog.suspects() is None


FSDP = COLLECTIVE.replace(  # its hooks run through a file of the compiler's, which they are kept from
    '  File "/y/train.py"', '  File "/x/torch/_dynamo/eval_frame.py", line 1446 in _fn\n  File "/y/train.py"'
)


@pytest.mark.parametrize(
    ("inspections", "kind", "ranks", "said"),
    [
        ({0: seen(COLLECTIVE), 1: seen(LOADER)}, "hang", (1,), 'rank 1 is blocked in File "/y/data.py", line 7'),
        ({0: seen(FSDP), 1: seen(LOADER)}, "hang", (1,), "rank 1 is blocked in"),
        ({0: seen(LOADER, "R", 0.99), 1: seen(COLLECTIVE)}, "hang", (0,), "rank 0 is spinning in"),
        ({0: seen(COLLECTIVE), 1: seen(LOADER, "D")}, "hang", (1,), "state D"),
        ({0: seen(COLLECTIVE), 1: seen(COLLECTIVE, "T")}, "stopped", (1,), "rank 1 is stopped (state T)"),
        ({0: seen(COLLECTIVE), 1: seen(COLLECTIVE)}, "collective_timeout", (0, 1), "ranks 0, 1 are waiting in a collective"),
        ({0: seen(COLLECTIVE)}, "hang", (1,), "does not answer"),
        ({0: seen(LOADER), 1: seen(LOADER)}, "hang", (0, 1), "ranks 0, 1 are blocked"),
    ],
    ids=["loader", "in a hook of FSDP", "spinning", "kernel", "stopped", "all wait", "no answer", "all"],
)
def test_the_culprit_is_whoever_is_not_waiting_for_others(
    inspections: dict[int, Inspection], kind: str, ranks: tuple[int, ...], said: str
):
    watchdog = warm()
    silent(watchdog, 3.0, 0, 1)
    suspicion = watchdog.suspects()
    assert suspicion is not None
    fault = judged(watchdog, suspicion, inspections)
    assert fault is not None
    assert (fault.kind, fault.ranks, fault.nodes, fault.step) == (kind, ranks, ranks, 11)
    assert said in fault.detail and "silent for 3.0 s" in fault.detail
    assert fault.detect_s == 3.0


@pytest.mark.parametrize(
    ("step", "active_t", "said"),
    [
        (10, 1.0, "phase step, silent for 3.0 s"),  # the step was its last activity
        (10, 6.0, "phase step, silent for 3.0 s and without a step for 8.0 s"),
        (NO_STEP, 6.0, "phase step, silent for 3.0 s"),
    ],
)
def test_a_verdict_says_since_when_a_rank_is_silent_and_since_when_it_has_finished_no_step(step: int, active_t: float, said: str):
    watchdog = warm() if step == 10 else Watchdog(LIMITS)
    for rank, state in ((0, "S"), (1, "T")):
        received(watchdog, rank, beat(step, 1.0, silent_s=3.0, activity_t=active_t, state=state))
    fault = judged(watchdog, Suspicion("stopped", (1,), 3.0, step), {0: seen(COLLECTIVE), 1: seen("", "T")})
    assert fault is not None and fault.detail.endswith(f"{said}; rank 0 waits for others")
    assert fault.detect_s == 3.0


def test_a_job_that_turns_out_to_be_suspended_is_no_fault():
    watchdog = warm()
    silent(watchdog, STOPPED_S, 1, state="T")  # the other node has not told yet
    suspicion = watchdog.suspects()
    assert suspicion is not None
    assert judged(watchdog, suspicion, {0: seen("", "T"), 1: seen("", "T")}) is None


def test_of_ranks_that_all_wait_the_one_a_step_behind_is_to_blame():
    watchdog = warm()
    received(watchdog, 0, beat(11, 1.1))
    received(watchdog, 0, beat(11, 1.1, silent_s=3.0))
    silent(watchdog, 3.1, 1)
    suspicion = watchdog.suspects()
    assert suspicion is not None
    fault = judged(watchdog, suspicion, {0: seen(COLLECTIVE), 1: seen(COLLECTIVE)})
    assert fault is not None and fault.ranks == (1,)


def test_a_rank_that_compiles_is_no_fault_and_gets_more_time():
    watchdog = warm()
    silent(watchdog, 3.0, 0, 1)
    suspicion = watchdog.suspects()
    assert suspicion is not None
    assert judged(watchdog, suspicion, {0: seen(COLLECTIVE), 1: seen(COMPILER)}) is None
    watchdog.excuse(suspicion)
    silent(watchdog, 99.0, 0, 1)
    assert watchdog.suspects() is None


def test_doings_of_threads_beside_the_main_one_count():
    assert doing(seen(LOADER.replace("threading.py", "torch/distributed/fsdp.py"))).what == "waiting"
    assert innermost(LOADER).startswith('File "/y/data.py"')
    assert innermost("") == ""


def test_ranks_that_end_well_while_their_silence_is_looked_into_are_no_fault():
    watchdog = warm()
    silent(watchdog, 3.0, 0, 1)
    suspicion = watchdog.suspects()
    assert suspicion is not None
    assert suspicion.ranks == (0, 1)
    watchdog.ended(0)
    assert judged(watchdog, suspicion, {0: seen(COLLECTIVE), 1: seen(COLLECTIVE)}) is None
