"""What `resilient status` and `resilient diff` show of texts that somebody else has written."""

import io
import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from mounts import make_read_only, needs_root, small_disk
from rich.console import Console, RenderableType
from typer.testing import CliRunner

from resilient import ledger, status
from resilient.cli import app
from resilient.driver.display import harmless
from resilient.driver.lease import RunLease
from resilient.exits import EnvironmentUnusable
from resilient.identity.comparison import Change
from resilient.lineage import comparison
from resilient.lineage.comparison import Comparison
from resilient.lineage.comparison import render as rendered_difference
from resilient.lineage.difference import compared
from resilient.status import inspect, render

TEXTS = ["/scratch/opt=[adam]/run", "[/adam] [bold]", "\x1b]0;owned\x07\x1b[2J\x9b31mred"]


def on_terminal(*texts: RenderableType) -> str:
    file = io.StringIO()
    Console(file=file, force_terminal=True, color_system=None, width=400, highlight=False).print(*texts)
    return file.getvalue()


@pytest.mark.parametrize("text", TEXTS)
def test_texts_of_others_are_shown_as_they_are_and_a_terminal_acts_on_none(tmp_path: Path, text: str):
    base: dict[str, Any] = {"fault_id": text, "kind": text, "ranks": [1], "nodes": [0], "step": 3, "evidence": "", "detect_s": 0.5}
    with ledger.Ledger(tmp_path) as written:
        written.event("run_started", {"name": text, "target_step": 9}, generation=0, t=1.0)
        written.event("fault", {**base, "detail": f"{text}\nsecond line"}, generation=1, t=2.0)
        written.event("action", {"fault_id": text, "name": text, "reason": text}, generation=1, t=3.0)
    summary = inspect(tmp_path)
    summary.forked_from = {"parent": text, "step": 4}
    summary.jobs = [{"job": text, "state": text, "step": 1, "started_t": 1.0, "ended_t": 2.0, "until_t": None, "reason": text}]
    summary.bad_nodes = [{"host": text, "until_t": 1.0, "reason": text}]
    shown = on_terminal(render(summary))
    assert shown.count(harmless(text)) == 15
    assert all(each.isprintable() or each == "\n" for each in shown)


def test_a_time_of_another_year_is_shown_with_its_year(tmp_path: Path):
    with ledger.Ledger(tmp_path) as written:
        written.event("run_started", {"name": "gpt", "target_step": 9}, generation=0, t=1.0)
    summary, now = inspect(tmp_path), time.time()
    job = {"job": "7", "state": "running", "step": 0, "started_t": now, "ended_t": None, "until_t": now + 366 * 86400, "reason": ""}
    summary.jobs = [job]
    shown = on_terminal(render(summary))
    assert f"until {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(job['until_t']))}" in shown
    assert f" {time.strftime('%m-%d %H:%M:%S', time.localtime(now))}" in shown


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ({"step_s": 0.25}, "4 steps/s"),  # that a script reports, as the runtime has added it
        ({"step_s": 0.25, "steps_per_s": 4.0}, "4 steps/s"),  # of a script that says nothing
        ({"step_s": 0.25, "tokens_per_s": 2000.0}, "2,000 tokens/s"),
        ({}, None),
    ],
)
def test_the_speed_is_that_in_tokens_where_it_is_told_else_in_steps(tmp_path: Path, line: dict[str, float], shown: str | None):
    with ledger.Ledger(tmp_path) as written:
        written.event("run_started", {"name": "gpt", "target_step": 9}, generation=0, t=1.0)
        for step in (1, 2, 3):  # several at once are read in another way than one
            written.metrics({"step": step, "loss": 2.0, **line}, generation=1, t=1.0 + step)
    speeds = [row.split()[1:] for row in on_terminal(render(inspect(tmp_path))).splitlines() if row.startswith("speed")]
    assert speeds == ([] if shown is None else [shown.split()])


def strictly(text: str) -> Any:
    """As parsers of other languages read JSON."""

    def refused(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refused)


def test_a_loss_that_is_no_number_is_null_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(yaml.safe_dump({"name": name, "run_dir": str(tmp_path / name)}))
        with ledger.Ledger(tmp_path / name) as written:
            written.event("run_started", {"name": name, "target_step": 9}, generation=0, t=1.0)
            written.metrics({"step": 1, "loss": math.nan if name == "a" else 2.0}, generation=1, t=2.0)
            written.event("validation", {"step": 1, "val_loss": math.inf}, generation=1, t=2.0)
    status.show(tmp_path / "a", as_json=True)
    found = strictly(capsys.readouterr().out)
    assert (found["step"], found["loss"], found["validation_loss"]) == (1, None, None)
    comparison.show(tmp_path / "a", tmp_path / "b", as_json=True)
    losses = strictly(capsys.readouterr().out)["losses"]
    assert (losses["largest"], losses["rows"]) == ([1, None, 2.0], [[1, None, 2.0]])


@pytest.mark.parametrize("text", TEXTS)
def test_keys_and_values_that_differ_are_shown_as_they_are(text: str):
    found = Comparison((Change(text, "[a]", "[/b]", "told"),), (), (None, None), compared({}, {}, 1))
    shown = on_terminal(*rendered_difference(Path("a"), Path("b"), found))
    assert harmless(text) in shown and "[a]" in shown and "[/b]" in shown
    assert all(each.isprintable() or each == "\n" for each in shown)


def test_each_look_is_printed_where_there_is_no_terminal(tmp_path: Path):
    """A real process whose output is a pipe; the second look sees what has happened since the first one."""
    with ledger.Ledger(tmp_path) as written:
        written.event("run_started", {"name": "piped", "target_step": 9}, generation=0, t=1.0)
        command = [sys.executable, "-m", "resilient", "status", str(tmp_path), "--watch"]
        watching = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert watching.stdout is not None
        try:
            assert watching.stdout.readline().split() == ["campaign", "piped:", "interrupted"]
            written.metrics({"step": 1}, generation=1, t=2.0)
            assert any(line.split() == ["step", "1", "of", "9"] for line in watching.stdout)
            watching.send_signal(signal.SIGINT)
            assert watching.wait(timeout=60) == 0
        finally:
            watching.kill()
            watching.communicate()


def test_status_is_watched_by_people_only(tmp_path: Path):
    (tmp_path / ledger.EVENTS).touch()
    done = CliRunner().invoke(app, ["status", str(tmp_path), "--watch", "--json"])
    assert done.exit_code == 2 and "--json" in done.output and "does not go with --watch" in done.output


@pytest.mark.parametrize("until_t", [1e17, 1e19, 1e300])
def test_a_node_that_is_left_out_for_ever_is_shown(tmp_path: Path, until_t: float):
    (tmp_path / ledger.EVENTS).touch()
    (tmp_path / "bad_nodes.json").write_text(json.dumps([{"host": "n1", "reason": "slow", "t": 1.0, "until_t": until_t}]))
    for words in (["status"], ["report", "--markdown"], ["report"]):
        done = CliRunner().invoke(app, [words[0], str(tmp_path), *words[1:]])
        assert done.exit_code == 0, done.exception
    assert "n1" in (tmp_path / "report.html").read_text()
    done = CliRunner().invoke(app, ["status", str(tmp_path)])
    assert "without n1 until beyond all calendars: slow" in done.output


@pytest.mark.parametrize("who", ["foo", "-1", "rank 0", "", "٣", "1" * 5000])
def test_a_process_that_is_no_rank_and_not_the_driver_is_wrong_use(tmp_path: Path, who: str):
    (tmp_path / ledger.EVENTS).touch()
    done = CliRunner().invoke(app, ["status", str(tmp_path), "--pid", who])
    assert done.exit_code == 2 and "--pid" in done.output and "RANK (a number) or driver" in done.output


@pytest.mark.parametrize("who", ["driver", "0", "007"])
def test_a_rank_and_the_driver_are_looked_for(tmp_path: Path, who: str):
    (tmp_path / ledger.EVENTS).touch()
    with pytest.raises(EnvironmentUnusable, match=f"{'driver' if who == 'driver' else f'rank {int(who)}'} of .* does not run"):
        CliRunner().invoke(app, ["status", str(tmp_path), "--pid", who], catch_exceptions=False)


@needs_root
@pytest.mark.parametrize(("what", "why"), [("full", "no space is left"), ("read-only", "its file system is read-only")])
def test_of_a_run_directory_that_cannot_be_written_while_a_job_runs_it_is_said_that_its_news_is_old(
    tmp_path: Path, what: str, why: str
):
    with small_disk(tmp_path / "disk", 1 << 20) as run_dir:
        with ledger.Ledger(run_dir) as lines:
            lines.event("run_started", {"name": "gpt", "target_step": 300, "pid": 1}, generation=0)
        lease = RunLease(run_dir)
        assert inspect(run_dir).unwritten is None
        if what == "full":
            with pytest.raises(OSError, match="No space left"):
                (run_dir / "filling").write_bytes(bytes(2 << 20))
        else:
            make_read_only(run_dir)
        try:
            found = inspect(run_dir)
            assert (found.state, found.unwritten) == ("running", why)
            assert f"{why}: the job keeps in memory" in on_terminal(render(found))
        finally:
            if what == "read-only":
                subprocess.run(["umount", run_dir], check=True)
            else:
                (run_dir / "filling").unlink()
        lease.close()
        assert inspect(run_dir).unwritten is None
