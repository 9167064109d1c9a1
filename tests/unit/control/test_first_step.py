"""Ranks that finish no step for long after their start: what they do is told, and nothing is done about it."""

from typing import Any

import msgspec
import pytest
from control_play import Play, beat
from watched_ranks import COMPILER, LOADER, MAIN, seen

from resilient.control.first_step import FIRST_S, GROUPS
from resilient.control.liveness import NO_STEP
from resilient.protocol.messages import Inspect

OWN = MAIN + '  File "/usr/lib/python3.11/socket.py", line 706 in readinto\n  File "/y/fetch.py", line 3 in get\n'


COLLECTIVE = MAIN + (
    '  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 2501 in all_reduce\n'
    '  File "/y/train.py", line 10 in main\n'
)


def started(nodes: int = 2, **settings: Any) -> Play:
    play = Play(nodes, **settings)
    play.start()
    return play


def asked(play: Play) -> int:
    return len(play.sent(Inspect))


def test_what_each_rank_does_is_told_first_who_waits_for_no_other():
    play = started(3)
    play.wait(FIRST_S - 1.0)
    assert not asked(play)
    play.wait(1.5)
    assert asked(play) == 3
    for node, stacks in ((0, COLLECTIVE), (1, COLLECTIVE), (2, OWN)):
        play.inspected(node, seen(stacks))
    play.wait(0.5)
    (told,) = play.events("no_step_yet")
    assert told["waited_s"] == pytest.approx(FIRST_S, abs=1.0)
    loading, waiting = told["detail"].split("; ")
    assert loading == 'rank 2: blocked in File "/usr/lib/python3.11/socket.py", line 706 in readinto, at /y/fetch.py:3 in get'
    assert waiting == "ranks 0, 1: waiting in a collective, at /y/train.py:10 in main"
    assert told["evidence"].endswith('File "/y/fetch.py", line 3 in get')
    assert not play.events("fault")


def test_it_is_told_again_after_twice_as_long():
    play, times = started(), []
    for _ in range(int(10 * FIRST_S)):
        play.wait(1.0)
        if play.sent(Inspect):
            play.effects = [effect for effect in play.effects if effect not in play.sent(Inspect)]
        for node in (0, 1):
            play.inspected(node, seen(COMPILER))
        times.append(len(play.events("no_step_yet")))
    told = [times.index(count) + 1 for count in range(1, times[-1] + 1)]
    assert told == [pytest.approx(FIRST_S * 2**number, rel=0.05) for number in range(4)]


def test_an_agent_that_does_not_answer_is_told_after_a_while():
    play = started()
    play.wait(FIRST_S + 1.0)
    play.inspected(0, seen(LOADER))
    play.wait(1.0)
    assert not play.events("no_step_yet")
    play.wait(5.0)
    (told,) = play.events("no_step_yet")
    assert told["detail"] == 'rank 0: blocked in File "/y/data.py", line 7 in __getitem__, at /y/data.py:7 in __getitem__; ' + (
        "node 1 does not answer"
    )


def test_of_many_ranks_that_do_different_things_some_are_told():
    play = started(GROUPS + 3)
    play.wait(FIRST_S + 0.5)
    for node in range(GROUPS + 3):
        play.inspected(node, seen(f'{MAIN}  File "/y/train.py", line {node} in main\n'))
    play.wait(0.5)
    (told,) = play.events("no_step_yet")
    assert told["detail"].count("/y/train.py:") == GROUPS
    assert told["detail"].endswith("3 more groups of ranks do other things")


def finish_a_step(play: Play) -> None:
    play.beat(0, 1)
    play.beat(1, 1)


def meet_in_collectives(play: Play) -> None:
    for sign in range(3):
        for node in (0, 1):
            seen_at = beat(NO_STEP, 0.0, activity_t=play.now + sign, phased=False)
            play.report(node, heartbeats={node: msgspec.structs.replace(seen_at, observed=True)})


def stop(play: Play) -> None:
    play.do("stop", "SIGTERM")


def fail(play: Play) -> None:
    play.do("lost", 1, "its connection broke")


@pytest.mark.parametrize("change", [finish_a_step, meet_in_collectives, stop, fail])
def test_nothing_is_told_of_ranks_that_get_on_or_are_ended(change: Any):
    play = started()
    play.wait(FIRST_S / 2)
    change(play)
    play.effects.clear()
    play.wait(FIRST_S / 2 + 2.0)
    assert not asked(play) and not play.events("no_step_yet")


def test_each_generation_has_its_own_minute():
    play = started()
    play.wait(FIRST_S / 2)
    play.exit(1)
    play.again(0, 1)
    play.wait(FIRST_S - 5.0)
    assert not asked(play)
    play.wait(10.0)
    assert asked(play) == 2
