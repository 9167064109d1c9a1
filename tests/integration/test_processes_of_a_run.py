"""The commands by which a person finds a campaign's processes to kill, and then looks at what happened."""

import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest
from campaigns import ROOT, Campaign, wait_for


def status(run: Campaign, *options: str, shell: str = "{}") -> str:
    """What `resilient status` prints; `shell` is a command line in which it stands."""
    command = shell.format(f"{sys.executable} -m resilient status {run.run_dir} {' '.join(options)}")
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.soak
def test_a_rank_and_the_command_are_killed_by_name_and_the_picture_shows_both(counting: Callable[..., Campaign], tmp_path: Path):
    run = counting(steps=10**6).start()
    run.reach(5)
    pids = wait_for(lambda: len(found := run.workers()) == 2 and found, "two workers")
    assert run.process is not None
    assert [int(status(run, "--pid", who)) for who in ("0", "1", "driver")] == [pids[0], pids[1], run.process.pid]
    assert f"driver {run.process.pid}, rank 0 {pids[0]}, rank 1 {pids[1]}" in " ".join(status(run).split())
    status(run, "--pid", "1", shell="kill -9 $({})")
    wait_for(lambda: run.events("recovered"), "the recovery")
    pids = wait_for(lambda: len(found := run.workers()) == 2 and found, "two workers again, which were standbys before")
    names = {rank: Path(f"/proc/{pid}/comm").read_text().strip() for rank, pid in pids.items()}
    assert names == {0: "rank0", 1: "rank1"}, names  # what `pkill -x` goes by
    status(run, "--pid", "driver", shell="kill -9 $({})")
    run.process.wait()
    step = run.step()
    run.start().reach(step + 5)
    run.signal(signal.SIGINT)
    assert run.wait() == 75, run.output + run.logs()
    status(run, "--svg", str(tmp_path / "picture.svg"))
    said = [element.text for element in ET.parse(tmp_path / "picture.svg").iter() if element.tag.endswith("text")]
    assert {"exit, rank 1", "restart workers", "command killed", "command run again"} <= set(said)
