"""The page of a campaign whose files are torn, or long: what can be read is on it, quickly and in bounded memory."""

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
from reported import drawn, figures, written
from runs import DOWN_S, made

from resilient import ledger
from resilient.exits import EnvironmentUnusable
from resilient.report import command
from resilient.report.html import LISTED
from resilient.report.reading import read
from resilient.status import Summary, inspect

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("seed", range(6))
def test_files_that_are_torn_anywhere_have_a_page_that_agrees_with_status(tmp_path: Path, seed: int):
    run_dir = made(tmp_path / "run", steps=120, faults=6, jobs=2)
    draw = random.Random(seed)
    for path in (run_dir / ledger.EVENTS, run_dir / ledger.METRICS):
        data = bytearray(path.read_bytes())
        for _ in range(4):
            at = draw.randrange(len(data))
            data[at : at + draw.randrange(400)] = draw.choice(
                [b"", b"\0" * 99, b"\xff\n\xfe", b"{}\n[1]\nnull\n", b'{"step": NaN}\n']
            )
        path.write_bytes(data[: draw.randrange(len(data) // 2, len(data))])
    root = drawn(written(run_dir))
    past, summary = read(run_dir), inspect(run_dir)
    assert past.kinds.total() == summary.faults
    assert sum(job.downtime_s for job in past.jobs) == pytest.approx(summary.downtime_s)
    assert figures(root)["step"][0] == summary.step
    assert max((x for _, x, _ in past.loss_by_step.points()), default=0) >= summary.step


def test_losses_that_are_no_numbers_leave_the_others(tmp_path: Path):
    run_dir = made(tmp_path / "run", steps=60, faults=0, jobs=1)
    lines = (run_dir / ledger.METRICS).read_text().splitlines()
    lines[10] = json.dumps({**json.loads(lines[10]), "loss": math.nan})
    lines[20] = json.dumps({**json.loads(lines[20]), "loss": None, "tokens_per_s": math.inf})
    (run_dir / ledger.METRICS).write_text("\n".join(lines) + "\n")
    assert len(read(run_dir).loss_by_step.points()) == 58
    drawn(written(run_dir))


def test_a_line_that_is_no_utf8_is_passed_over(tmp_path: Path):
    run_dir = made(tmp_path / "run", steps=60, faults=3, jobs=1)
    path = run_dir / ledger.EVENTS
    lines = path.read_bytes().splitlines(keepends=True)
    told = json.loads(lines[5])
    sound = {"t": told["t"], "event": "snapshot", "generation": 1, "host": "n1", "step": 3, "tier": "odd", "stall_s": 0.1}
    text = json.dumps(sound).encode() + b"\n"
    path.write_bytes(b"".join([*lines[:5], text, text.replace(b"n1", b"\xa2\xff"), text, *lines[5:]]))
    assert read(run_dir).tiers["odd"].snapshots >= 2  # its neighbours are read


def test_a_line_that_is_longer_than_any_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run_dir = made(tmp_path / "run", steps=60, faults=3, jobs=1)
    path = run_dir / ledger.METRICS
    lines = path.read_bytes().splitlines(keepends=True)
    monkeypatch.setattr(ledger, "LINE_BYTES", 4000)
    monkeypatch.setattr("resilient.report.reading.READ_BYTES", 700)
    path.write_bytes(b"".join([*lines[:30], b'{"x": "' + b"y" * 9000 + b'"}\n', *lines[30:]]))
    assert [x for _, x, _ in read(run_dir).loss_by_step.points()] == [float(step) for step in range(1, 61)]


def test_a_long_campaign_has_a_small_page_with_its_extremes(tmp_path: Path):
    run_dir = made(tmp_path / "run", steps=30_000, faults=3_000, jobs=60)
    path = run_dir / ledger.METRICS
    lines = path.read_text().splitlines()
    lines[17_000] = json.dumps({**json.loads(lines[17_000]), "loss": 99.0})
    path.write_text("\n".join(lines) + "\n")
    text = written(run_dir)
    assert len(text) < 1_000_000
    assert f"{LISTED} of 3,000 are listed" in text
    assert 99.0 in {value for _, _, value in read(run_dir).loss_by_time.points()}
    assert figures(drawn(text))["downtime_s"][0] == pytest.approx(3_000 * DOWN_S)


@pytest.mark.soak
def test_a_campaign_of_a_million_steps_and_ten_thousand_faults_is_read_in_bounded_memory(tmp_path: Path):
    run_dir = made(tmp_path / "run", steps=1_000_000, faults=10_000, jobs=200)
    code = (
        "import sys; from pathlib import Path; from resilient.report.reading import read\n"
        "past = read(Path(sys.argv[1]))\n"
        # Not ru_maxrss: it begins with what the process that forked this one has used.
        "peak = next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM'))\n"
        "print(past.kinds.total(), past.jobs[-1].last_step, peak)"
    )
    done = subprocess.run([sys.executable, "-c", code, run_dir], cwd=ROOT, capture_output=True, text=True, check=True)
    faults, last, peak_kib = map(int, done.stdout.split())
    assert (faults, last) == (10_000, 1_000_000)
    assert peak_kib < 250 << 10
    assert len(written(run_dir)) < 5 << 20


def counted_inspect(where: Path, *, readers: Path, dies: bool, mine: int) -> Summary:
    """As `inspect`, after a line of the process that calls it."""
    with readers.open("a") as file:
        file.write(f"{os.getpid()}\n")
    if dies and os.getpid() != mine:
        os.kill(os.getpid(), signal.SIGKILL)
    return inspect(where)


def test_large_files_are_read_by_two_processes_or_by_one_where_the_other_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run_dir = made(tmp_path / "run", steps=400, faults=12, jobs=4)
    expected = command.gather(run_dir, links_from=None).summary
    monkeypatch.setattr(command, "LARGE_BYTES", 0)
    readers = tmp_path / "readers"
    for dies in (False, True):
        readers.write_text("")
        monkeypatch.setattr(command, "inspect", partial(counted_inspect, readers=readers, dies=dies, mine=os.getpid()))
        assert command.gather(run_dir, links_from=None).summary == expected
        other, *again = map(int, readers.read_text().split())
        assert other != os.getpid() and again == [os.getpid()] * dies
    monkeypatch.setattr(command, "inspect", inspect)
    with pytest.raises(EnvironmentUnusable, match="is not a run directory"):
        command.gather(tmp_path, links_from=None)


def test_the_other_reader_ends_with_a_report_that_is_killed(tmp_path: Path):
    run_dir = made(tmp_path / "run", steps=400, faults=12, jobs=4)
    code = (
        "import sys, time; from pathlib import Path; from resilient.report import command\n"
        "command.LARGE_BYTES = 0; command.read = lambda _: time.sleep(600)\n"
        "command.gather(Path(sys.argv[1]), links_from=None)"
    )
    with subprocess.Popen([sys.executable, "-c", code, run_dir], cwd=ROOT) as report:
        process = psutil.Process(report.pid)
        while not (children := process.children()):
            time.sleep(0.01)  # until it has begun to read
        report.kill()
    assert psutil.wait_procs(children, 120.0)[1] == []
