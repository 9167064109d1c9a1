"""The page of a campaign: whole whatever its files hold, small and quick however long it was, and with the figures of `status`."""

import http.client
import json
import math
import os
import random
import re
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from reported import agreed, drawn, figures
from runs import DOWN_S, HOSTS, KINDS, made

from resilient import ledger, page
from resilient.account import PARTS
from resilient.exits import EnvironmentUnusable
from resilient.report import charts, command
from resilient.report.html import LISTED
from resilient.report.reading import read
from resilient.report.secrets import HIDDEN, hidden, hidden_config
from resilient.report.server import PageServer
from resilient.status import Summary, inspect

ROOT = Path(__file__).parents[3]


def written(run_dir: Path) -> str:
    command.write(run_dir, None)
    return (run_dir / command.FILE).read_text()


def counted(root: ET.Element, kind: str) -> int:
    return sum(each.get("class") == kind for each in root.iter())


def test_every_figure_of_the_page_is_that_of_status(tmp_path: Path):
    run_dir = made(tmp_path / "run", steps=400, faults=12, jobs=4)
    found = agreed(run_dir, tmp_path / "page.html")
    summary = asdict(inspect(run_dir))
    assert {"step", "target_step", "loss", "goodput", "wall_s", "faults", "recovered", "downtime_s", "lost_steps"} <= set(found)
    assert {f"rank_seconds.{name}" for name, spent in summary["rank_seconds"].items() if spent} <= set(found)
    assert sum(key.startswith("incidents.") for key in found) >= 12
    assert {key for key in found if key.startswith("kinds.")} == {f"kinds.{kind}.faults" for kind in KINDS}
    assert {f"runs.{job}.{name}" for job in range(4) for name in ("step", "faults", "lost_steps", "exit_code")} <= set(found)
    assert found["goodput"][1] == f"{summary['goodput']:.1%}" and found["step"][1] == "400" and found["faults"][1] == "12"


def test_the_past_that_is_read_for_the_page_agrees_with_status(tmp_path: Path):
    run_dir = made(tmp_path / "run", steps=400, faults=12, jobs=4)
    past, summary = read(run_dir), inspect(run_dir)
    assert past.kinds.total() == summary.faults == sum(job.faults for job in past.jobs) == 12
    assert sum(job.downtime_s for job in past.jobs) == pytest.approx(summary.downtime_s)
    assert sum(job.lost_steps for job in past.jobs) == summary.lost_steps == 12
    assert [(job.first_step, job.last_step) for job in past.jobs] == [(1, 100), (101, 200), (201, 300), (301, 400)]
    assert past.tiers["memory"].snapshots == 8 and past.tiers["memory"].size_bytes == 8 << 24
    assert set(past.heat.rows()) == set(HOSTS)


@pytest.mark.parametrize(("directory", "file"), [(0o700, 0o600), (0o750, 0o640)], ids=["private", "group"])
@pytest.mark.parametrize("output", [False, True], ids=["", "--output"])
def test_the_page_in_a_run_directory_has_the_mode_of_its_files(tmp_path: Path, directory: int, file: int, output: bool):
    made(tmp_path, steps=20, faults=0, jobs=1).chmod(directory)
    path = tmp_path / ("other.html" if output else command.FILE)
    words = ["report", str(tmp_path), *(["--output", str(path)] if output else [])]
    subprocess.run([sys.executable, "-m", "resilient", *words], check=True, umask=0)
    assert stat.S_IMODE(path.stat().st_mode) == file


def test_a_page_elsewhere_has_the_mode_that_its_user_wants(tmp_path: Path):
    made(tmp_path / "run", steps=20, faults=0, jobs=1).chmod(0o700)
    path = tmp_path / "page.html"
    subprocess.run([sys.executable, "-m", "resilient", "report", str(tmp_path / "run"), "-o", str(path)], check=True, umask=0o022)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_what_was_moved_aside_is_in_the_page(tmp_path: Path):
    run_dir = made(tmp_path / "run", steps=400, faults=12, jobs=4)
    whole = read(run_dir)
    for name in (ledger.EVENTS, ledger.METRICS):
        lines = (run_dir / name).read_text().splitlines(keepends=True)
        for part, begin, end in ((f"{name}.2", 0, 20), (f"{name}.1", 20, 40), (name, 40, None)):
            (run_dir / part).write_text("".join(lines[begin:end]))
    assert read(run_dir).jobs == whole.jobs and read(run_dir).kinds == whole.kinds
    agreed(run_dir, tmp_path / "page.html")


def test_the_page_shows_faults_jobs_queue_nodes_tiers_and_changes(tmp_path: Path):
    run_dir = made(tmp_path / "run", steps=400, faults=12, jobs=4)
    (run_dir / "incidents" / "g2-1").mkdir(parents=True)
    (run_dir / "config.yaml").write_text("name: made\nslurm: {environment: {KEY: hush}}\n")
    text = written(run_dir)
    root = drawn(text)
    assert counted(root, "away") == 3 + 1  # one of them in the key
    assert counted(root, "job0") + counted(root, "job1") == 2 * 4
    assert counted(root, "cell") >= len(HOSTS)
    assert "optimizer.lr" in text and "SIGKILL" in text and "restart workers" in text and "16.0 MiB" in text
    assert [each.get("href") for each in root.iter("a")] == ["incidents/g2-1"]
    assert "hush" not in text and HIDDEN in text
    told = [title.text or "" for title in root.iter("title")]
    assert any("g2-1 at" in title and "exit, rank 0 (n0): SIGKILL; restart workers, 1.90 s down" in title for title in told)
    assert any("no job ran for" in title for title in told)


def test_nothing_on_the_page_comes_from_outside_and_nothing_in_it_is_taken_for_markup(tmp_path: Path):
    run_dir = made(tmp_path / "run", steps=20, faults=2, jobs=1)
    evil = '"><img src=x><script>alert(1)</script>\u0000'
    events = [json.loads(line) for line in (run_dir / ledger.EVENTS).read_text().splitlines()]
    for line in events:
        line |= {key: evil for key in ("detail", "evidence", "reason", "host", "key") if key in line}
        line |= {"name": evil} if line["event"] == "run_started" else {}
    (run_dir / ledger.EVENTS).write_text("".join(f"{json.dumps(line)}\n" for line in events))
    text = written(run_dir)
    root = drawn(text)
    assert not {"script", "img", "link", "iframe"} & {element.tag for element in root.iter()}
    assert all("src" not in element.attrib for element in root.iter())
    assert "url(" not in text and "@import" not in text and "http:" not in text
    shown = command.as_markdown(run_dir)
    assert not re.search(r"(?<!\\)<", shown)


@pytest.mark.parametrize("jobs", [0, 1])
def test_a_campaign_without_a_step_has_a_page(tmp_path: Path, jobs: int):
    line = {"t": 1.7e9, "event": "run_started", "generation": 0, "host": "h", "name": "young", "target_step": 9}
    (tmp_path / ledger.EVENTS).write_text(f"{json.dumps(line)}\n" * jobs)
    text = written(tmp_path)
    drawn(text)
    assert "No step was finished." in text and ("No job has started." in text) == (jobs == 0)
    assert ("young" if jobs else "campaign") in command.as_markdown(tmp_path)


def test_a_folder_that_is_no_run_directory_has_no_page(tmp_path: Path):
    with pytest.raises(EnvironmentUnusable, match="is not a run directory"):
        command.write(tmp_path, None)
    assert not list(tmp_path.iterdir())


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


# -- how it looks ----------------------------------------------------------------------------------------------------------


def luminance(colour: str) -> float:
    """Relative, of sRGB, as WCAG 2 defines it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(a: str, b: str) -> float:
    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("colours", [page.LIGHT, page.DARK], ids=["light", "dark"])
def test_all_text_has_the_contrast_of_wcag_aa(colours: dict[str, str]):
    assert set(page.LIGHT) == set(page.DARK)
    pairs = [(text, ground) for text in page.TEXTS for ground in page.GROUNDS]
    pairs += [("ground", "good"), ("ground", "bad"), ("ink", "rule")]  # badges, and numbers of jobs in their bands
    assert {
        pair: contrast(colours[pair[0]], colours[pair[1]]) for pair in pairs if contrast(colours[pair[0]], colours[pair[1]]) < 4.5
    } == {}


def test_text_has_no_colours_but_those_whose_contrast_is_known(tmp_path: Path):
    text = written(made(tmp_path / "run", steps=40, faults=2, jobs=1))
    style = text[text.index("body {") : text.index("</style>")]  # behind the colours themselves
    assert "#" not in style
    rules = [rule.strip() for block in style.split("}") for rule in block.partition("{")[2].split(";")]
    named = {rule.partition("var(--")[2].rstrip(")") for rule in rules if rule.startswith("color:")}
    assert named <= {*page.TEXTS, "ground"}  # the latter on badges
    assert set(PARTS) == {part for part in PARTS if page.parts_bar({part: 1.0}).count("background")}


# -- what is not shown ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("logging.sinks.webhook.url", "https://hooks.example.org/T0/secret", HIDDEN),
        ("slurm.environment", {"WANDB_API_KEY": "k", "N": 1}, {"WANDB_API_KEY": HIDDEN, "N": 1}),
        ("api_key", "k", HIDDEN),
        ("password", ["a", ""], [HIDDEN, ""]),
        ("data.path", "s3://user:pass@host/bucket?sig=1", "s3://host/…"),
        ("data.tokenizer", "gpt2", "gpt2"),
        ("data.tokenizer.vocab_size", 4096, 4096),
        ("train.tokens_per_s", "7", "7"),
        ("optimizer.decay_tokens", "9", "9"),
        ("model.layers", 4, 4),
    ],
)
def test_values_that_are_secret_by_their_name_are_hidden(key: str, value: Any, shown: Any):
    assert hidden(key, value) == shown


@pytest.mark.parametrize("text", ["", "[1]", "a: [", "a: !!python/object:os.x {}", "&a [*a]"])
def test_what_is_no_config_is_not_shown(text: str):
    assert hidden_config(text) == ""


# -- the served page -------------------------------------------------------------------------------------------------------


@contextmanager
def served(server: PageServer) -> Iterator[PageServer]:
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join()


def test_a_browser_that_goes_away_is_no_error(capfd: pytest.CaptureFixture[str]):
    looking, gone, handlers = threading.Event(), threading.Event(), []

    def render() -> bytes:
        handlers.append(threading.current_thread())
        looking.set()
        gone.wait()
        return b"x"

    with served(PageServer(render, fresh_s=0.0)) as server:
        address = urllib.parse.urlsplit(server.address)
        with socket.create_connection((address.hostname, address.port)) as browser:
            browser.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closed by a reset
            browser.sendall(f"GET {address.path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            looking.wait()
        gone.set()
        handlers[0].join()
        assert asked(server.address) == (200, "x")
    assert capfd.readouterr().err == ""


def test_an_error_of_the_command_itself_is_not_hidden(capfd: pytest.CaptureFixture[str]):
    def render() -> bytes:
        raise ZeroDivisionError

    with served(PageServer(render, fresh_s=0.0)) as server, pytest.raises(http.client.RemoteDisconnected):
        asked(server.address)
    assert "ZeroDivisionError" in capfd.readouterr().err


def asked(address: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=120) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_the_served_page_is_made_anew_and_only_for_who_knows_its_address():
    made_: list[int] = []

    def render() -> bytes:
        made_.append(1)
        return b"<p>%d</p>" % len(made_)

    with served(PageServer(render, fresh_s=0.0)) as server:
        assert [asked(server.address)[1] for _ in range(2)] == ["<p>1</p>", "<p>2</p>"]
        root = server.address.rstrip("/").rpartition("/")[0]
        assert [asked(f"{root}/{path}")[0] for path in ("", "favicon.ico", "../etc/passwd")] == [404] * 3
        assert asked(server.address, Host="evil.example.org:80")[0] == 404
    assert len(made_) == 2
    with served(PageServer(render, fresh_s=1e9)) as server:
        assert asked(server.address)[1] == asked(server.address)[1]


def test_a_run_directory_that_goes_away_is_said_and_comes_back():
    gone = [True]

    def render() -> bytes:
        if gone.pop() if gone else False:
            raise EnvironmentUnusable("it is gone")
        return b"there"

    with served(PageServer(render, fresh_s=0.0)) as server:
        with pytest.raises(urllib.error.HTTPError, match="503") as answer:
            urllib.request.urlopen(server.address, timeout=120)
        with answer.value as said:
            assert (said.read(), said.headers["Refresh"]) == (b"it is gone\n", "5")  # a browser asks again by itself
        assert asked(server.address) == (200, "there")


def test_the_command_serves_a_page_that_follows_the_campaign_and_ends_with_ctrl_c(tmp_path: Path):
    run_dir = made(tmp_path / "run", steps=40, faults=1, jobs=1)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "resilient", "report", run_dir, "--watch"], stdout=subprocess.PIPE, text=True, env=environ
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[0]
        text = asked(address)[1]
        assert 'http-equiv="refresh"' in text and figures(drawn(text))["step"][0] == 40
        line = {"step": 41, "loss": 1.0, "step_s": 0.9, "generation": 9, "t": 1.8e9}
        with (run_dir / ledger.METRICS).open("a") as file:
            file.write(f"{json.dumps(line)}\n")
        deadline = time.monotonic() + 120
        while figures(drawn(asked(address)[1]))["step"][0] != 41:
            assert time.monotonic() < deadline, "the page was not made anew"
            time.sleep(0.2)
        process.send_signal(2)
        assert process.wait(timeout=120) == 0
    finally:
        process.kill()
        process.wait()
    assert charts.by_time(read(run_dir))
