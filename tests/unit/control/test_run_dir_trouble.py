"""A run directory that cannot be written: training goes on, for as long as that is borne."""

import pytest
from control_play import Play

from resilient.control.coordinator import State
from resilient.exits import Exit
from resilient.protocol.messages import Propose, Proposed, Stop


def test_trouble_and_its_end_are_written_down_once_and_disturb_nobody(play):
    for _ in range(3):
        play.do("run_dir_trouble", "no space left on device", play.now - 2.0)
    (fault,), (action,) = play.events("fault"), play.events("action")
    assert (fault["kind"], fault["ranks"], fault["nodes"], fault["detect_s"]) == ("storage", [], [], 2.0)
    assert fault["detail"] == "run directory: no space left on device"
    assert (action["fault_id"], action["name"]) == (fault["fault_id"], "degrade")
    play.wait(60)
    for _ in range(2):
        play.do("run_dir_well", 62.0)
    (recovered,) = play.events("recovered")
    ids = {"fault_id": fault["fault_id"], "incident_id": fault["fault_id"]}
    assert recovered == {**ids, "step": 0, "downtime_s": 0.0, "lost_steps": 0, "down_s": 62.0}
    assert play.generation == 5 and not play.sent(Stop) and not play.sent(Propose)
    play.do("run_dir_trouble", "stale file handle", play.now)
    assert len({fault["fault_id"] for fault in play.events("fault")}) == 2


def test_it_does_not_count_against_the_restart_budget_and_is_told_while_a_stop_is_under_way():
    play = Play(max_restarts_per_hour=1)
    play.start()
    play.do("run_dir_trouble", "read-only file system", play.now)
    play.exit(1)
    assert [action["name"] for action in play.events("action")] == ["degrade", "restart_workers"]
    play.do("stop", "SIGTERM")
    play.do("run_dir_well", 1.0)
    play.do("run_dir_trouble", "read-only file system", play.now)


def test_when_it_is_borne_no_longer_the_job_drains_and_ends_with_unusable():
    play = Play(run_dir_patience_s=60.0)
    play.start()
    play.do("run_dir_trouble", "no space left on device", play.now - 10.0)
    assert not play.sent(Propose, play.wait(49.5))
    assert len(play.sent(Propose, play.wait(1))) == 2
    for node in (0, 1):
        play.deliver(node, Proposed(generation=5, checked=7))
    for rank in (0, 1):
        play.exit(rank, 0, stopped=True, step=8)
    assert play.finish().code is Exit.UNUSABLE
    assert play.finish().message.startswith("the run directory could not be written for 60 s: no space left on device; stopped by")
    assert play.events("drain")[0]["signal"] == "run_dir_patience_s"


@pytest.mark.parametrize("hung", [True, False])
def test_a_drain_for_its_sake_that_takes_too_long_ends_with_unusable_too(hung: bool):
    play = Play(run_dir_patience_s=60.0)
    play.start()
    play.do("run_dir_trouble", "no space left on device", play.now)
    if not hung:
        play.exit(1)
        assert play.coordinator.state is State.GATHERING
    play.wait(85)
    assert play.finish().code is Exit.UNUSABLE


def test_a_driver_that_was_away_has_borne_nothing_meanwhile():
    play = Play(run_dir_patience_s=60.0)
    play.start()
    play.do("run_dir_trouble", "no space left on device", play.now)
    play.now += 100.0
    assert not play.sent(Propose, play.wait(30))
