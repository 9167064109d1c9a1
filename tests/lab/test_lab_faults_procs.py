"""Faults of hosts: they happen, and nothing of them stays."""

from pathlib import Path

import injectors
from campaigns import Campaign, wait_for

from chaos.lab.lab import Lab


def counting(directory: Path, **config: object) -> Campaign:
    cluster = {"nodes": 2, "procs_per_node": 1, "device": "cpu"}
    return Campaign(directory, entrypoint="toys:count", cluster=cluster, train={"steps": 100_000}, **config)


def test_a_host_that_crashes_is_booted_again_also_if_the_injector_is_killed(bare: Lab, tmp_path: Path):
    run = counting(tmp_path)
    run.run_dir.mkdir()
    (run.run_dir / "config.yaml").write_text(run.path.read_text())
    where = {"lab": bare.paths.name, "node": 1, "host": "n2"}
    before = bare.host("n2").init()
    evidence = injectors.strike(run.run_dir, "host_crash", seconds=0.1, **where)
    again = bare.host("n2").init()
    assert evidence["processes"] > 0
    assert again not in (None, before)
    assert bare.host("n2").link_is_up()
    with injectors.injector(run.run_dir, "host_crash", seconds=600, **where) as sent:
        wait_for(lambda: bare.host("n2").init() is None and not bare.host("n2").exists(), "the crash")
        assert bare.host("n1").init() is not None
        sent.kill()
        wait_for(
            lambda: bare.host("n2").init() is not None and bare.host("n2").link_is_up(), "the guard of the injector that was killed"
        )
    assert bare.host("n2").init() != again
