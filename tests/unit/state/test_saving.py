"""`save()` at a step whose snapshot was left out before: what it says was saved is held."""

import pytest
from attempts import Attempts, Script
from lone_daemon import PATIENCE_S

from resilient.state import attach

BUFFERS = 3


@pytest.mark.parametrize("in_vain", [1, 3])
@pytest.mark.parametrize("ends", [False, True], ids=["save", "the end of the loop"])
def test_a_step_that_was_left_out_is_held_once_it_is_saved_after_all(
    attempts: Attempts, monkeypatch: pytest.MonkeyPatch, in_vain: int, ends: bool
):
    attempts.begin()
    script = Script()
    attached = script.attach()
    for step in range(1, BUFFERS + 2):
        script.step()
        attached.after_step()
        if step <= BUFFERS:
            assert attached.save()
            attempts.held(step)
    monkeypatch.setattr(attach, "LAST_WAIT_S", 0.05)
    assert [attached.save() for _ in range(in_vain)] == [False] * in_vain, "all buffers are in use"
    attempts.release(BUFFERS)
    monkeypatch.setattr(attach, "LAST_WAIT_S", PATIENCE_S)
    if ends:
        attached.close()
    else:
        assert attached.save()
    attempts.held(BUFFERS + 1)
