"""Faults of hosts and of their clocks: they happen, nothing of them stays, and a campaign gets over them."""

import itertools
import signal
import time
from pathlib import Path

from conftest import Campaign, hands, wait_for

from chaos.lab.lab import Lab


def ahead_s() -> float:
    """How far the clock of this machine is ahead of the monotonic one."""
    return time.time() - time.monotonic()


def counting(directory: Path, **config: object) -> Campaign:
    cluster = {"nodes": 2, "procs_per_node": 1, "device": "cpu"}
    return Campaign(directory, entrypoint="toys:count", cluster=cluster, train={"steps": 100_000}, **config)


def test_a_host_that_crashes_is_booted_again_also_if_the_hand_is_killed(bare: Lab, tmp_path: Path):
    run = counting(tmp_path)
    run.run_dir.mkdir()
    (run.run_dir / "config.yaml").write_text(run.path.read_text())
    where = {"lab": bare.place.name, "node": 1, "host": "n2"}
    before = bare.host("n2").init()
    evidence = hands.strike(run.run_dir, "host_crash", seconds=0.1, **where)
    again = bare.host("n2").init()
    assert evidence["processes"] > 0
    assert again not in (None, before)
    assert bare.host("n2").link_is_up()
    with hands.hand(run.run_dir, "host_crash", seconds=600, **where) as sent:
        wait_for(lambda: bare.host("n2").init() is None and not bare.host("n2").exists(), "the crash")
        assert bare.host("n1").init() is not None
        sent.kill()
        wait_for(
            lambda: bare.host("n2").init() is not None and bare.host("n2").link_is_up(), "the guard of the hand that was killed"
        )
    assert bare.host("n2").init() != again


def test_a_clock_that_jumps_and_jumps_back_costs_nothing_and_is_put_right_also_if_the_hand_is_killed(tmp_path: Path):
    # By more than a node may be silent, and a rank too.
    patience = {"fence_s": 2.0, "lost_s": 3.0, "hang_floor_s": 2.0}
    run = counting(tmp_path, resilience=patience).start()
    try:
        run.reach(30)
        before = ahead_s()
        evidence = hands.strike(run, "clock_jump", node=0, by_s=5.0, seconds=0.5)
        assert 4.5 < evidence["jumped_s"] < 5.5
        wait_for(lambda: abs(ahead_s() - before) < 0.5, "the jump to be undone")
        with hands.hand(run, "clock_jump", node=0, by_s=-5.0, seconds=60) as sent:
            wait_for(lambda: ahead_s() - before < -4.0, "the jump back")
            sent.kill()
            wait_for(lambda: abs(ahead_s() - before) < 0.5, "the guard of the hand that was killed")
        run.reach(run.step() + 30)
        run.signal(signal.SIGTERM)
        assert run.wait() == 75, run.output + run.logs()
    finally:
        if run.process is not None and run.process.poll() is None:
            run.kill()
    assert not run.events("fault")
    assert len(run.events("generation_started")) == 1
    times = [line["t"] for line in run.metrics()]
    assert times == sorted(times)
    assert max(later - earlier for earlier, later in itertools.pairwise(times)) < 4.0
