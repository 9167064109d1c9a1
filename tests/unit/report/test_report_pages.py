"""The page of a campaign as a browser shows it: in wide and narrow windows, light and dark."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from browser import Browser, looks_right
from runs import made
from soak import soaked_after

from resilient import ledger
from resilient.report import command


def whole(directory: Path) -> None:
    """Faults, jobs, changes of the config, a config, and stacks of a fault."""
    made(directory, steps=400, faults=12, jobs=4)
    (directory / "config.yaml").write_text("name: made\nrun_dir: /a/rather/long/path\n")
    (directory / "incidents" / "g2-1").mkdir(parents=True)


def without_a_job(directory: Path) -> None:
    directory.mkdir()
    (directory / ledger.EVENTS).touch()


def without_a_step(directory: Path) -> None:
    made(directory, steps=400, faults=12, jobs=4)
    (directory / ledger.METRICS).unlink()


def without_a_ledger(directory: Path) -> None:
    made(directory, steps=400, faults=12, jobs=4)
    (directory / ledger.EVENTS).write_text("")


def torn(directory: Path) -> None:
    """Cut in the middle of a line, with bytes in between that are no UTF-8."""
    made(directory, steps=400, faults=12, jobs=4)
    draw = random.Random(1)
    for path in (directory / ledger.EVENTS, directory / ledger.METRICS):
        data = bytearray(path.read_bytes()[: path.stat().st_size * 2 // 3])
        for at in (draw.randrange(len(data)) for _ in range(9)):
            data[at : at + 40] = b"\xff\xfe\0\xa2\n"
        path.write_bytes(data)


def wordy(directory: Path) -> None:
    """Names, paths and messages of any length, and emojis."""
    made(directory, steps=400, faults=12, jobs=4)
    events = [json.loads(line) for line in (directory / ledger.EVENTS).read_text().splitlines()]
    said = {"detail": "/a/path/without/a/space" * 20, "evidence": "Traceback: 🔥 " * 60, "reason": "so it was " * 40}
    for line in events:
        line |= {key: text for key, text in said.items() if key in line}
        line |= {"host": "node-with-a-long-name.of.a.long.domain.example.org"} | ({"name": "n" * 90} if "name" in line else {})
    (directory / ledger.EVENTS).write_text("".join(f"{json.dumps(line)}\n" for line in events))


@pytest.mark.parametrize(
    "state", soaked_after(2, [whole, without_a_job, without_a_step, without_a_ledger, torn, wordy]), ids=lambda each: each.__name__
)
def test_a_report_is_read_in_any_window_without_an_error(browser: Browser, tmp_path: Path, state: Callable[[Path], None]):
    state(tmp_path / "run")
    command.write(tmp_path / "run", tmp_path / "page.html")
    looks_right(browser, tmp_path / "page.html")


@pytest.mark.parametrize(
    ("body", "flaw"),
    [
        ('<p style="color: #999">faint</p>', "contrast of 2.85: faint"),
        ('<svg viewBox="0 0 9 9" width="90"><rect width="9" height="9" fill="#555"/><text y="5" font-size="2">in</text></svg>',
         "contrast of 2.82: in"),
        ('<p style="font-size: 6px">tiny</p>', "6.0 px: tiny"),
        ('<svg viewBox="0 0 90 9" width="900"><text y="8" x="80" style="font-size: 9px">far out</text></svg>',
         "beyond its drawing: far out"),
        ('<svg viewBox="0 0 900 90"><text y="50">one</text><text y="52" x="3">two</text></svg>', "drawn over: one and two"),
        ('<p style="width: 2000px">wide</p>', "the page is"),
        ('<p style="width: 20px; overflow: hidden; white-space: nowrap">cut off</p>', "cut: cut off"),
        ("<script>console.error('no')</script><p>text</p>", "error: "),
        ('<img src="away.png"/><p>text</p>', "asks for file:"),
        ("", "nothing is shown"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_page_is_seen(browser: Browser, tmp_path: Path, body: str, flaw: str):
    page = tmp_path / "page.html"
    page.write_text(f"<!DOCTYPE html><meta charset='utf-8'/><title>a</title>{body}")
    with pytest.raises(AssertionError, match=flaw):
        looks_right(browser, page)
