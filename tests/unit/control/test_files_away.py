"""Files that ranks find missing or unreadable: who has trained waits for them, who has not says so at once."""

import pytest
from control_play import Play

from resilient.recovery.faults import Raised

GONE = "[Errno 2] No such file or directory: '/data/corpus.idx'"


def gone(play: Play, generations: int) -> list[str]:
    """Generations that find nothing of their data; the actions."""
    for _ in range(generations):
        play.exit(1, 1, Raised("FileNotFoundError", GONE, "traceback", play.now), step=-1)
        for node in (0, 1):
            play.ready(node)
        play.wait(31.0)
    return [event["name"] for event in play.events("action")]


@pytest.mark.parametrize("trained", [True, False])
def test_files_that_were_there_are_waited_for(trained):
    play = Play(files=("/data/corpus",))
    play.start()
    if trained:
        play.beat(0, 7)
        play.exit(1, -9)
        for node in (0, 1):
            play.ready(node)
        assert gone(play, 8) == ["restart_workers"] * 9
        assert {event.get("files") for event in play.events("fault")} == {None, "/data/corpus.idx"}
    else:
        assert gone(play, 3) == ["restart_workers"] * 2 + ["give_up"]
