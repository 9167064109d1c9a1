"""What commands print with `--json`, read back by parsers that take the standard word for word."""

import io
import json
import math
from typing import Any

import pytest
from rich.console import Console

from resilient import json_output
from resilient.health import doctor
from resilient.health.report import Finding, Report
from resilient.json_output import print_json
from resilient.strict_json import strict


def printed(monkeypatch: pytest.MonkeyPatch, value: Any, encoding: str, *, terminal: bool = False) -> str:
    """What comes out where the output has this encoding. Fails if a character cannot be written."""
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")

    def console(**settings: Any) -> Console:
        return Console(file=out, force_terminal=terminal, width=20, **settings)

    monkeypatch.setattr(json_output, "Console", console)
    print_json(value)
    out.flush()
    data: bytes = out.buffer.getvalue()  # type: ignore[attr-defined]
    return data.decode(encoding)


def refuse(word: str) -> None:
    raise AssertionError(f"{word} is not JSON")


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_does_not_know_are_null_wherever_they_are(monkeypatch: pytest.MonkeyPatch, number: float):
    value = {"loss": number, "steps": [1, number, {"grad_norm": number}], "spread": (0.5, number)}
    said = json.loads(printed(monkeypatch, value, "utf-8"), parse_constant=refuse)
    assert said == {"loss": None, "steps": [1, None, {"grad_norm": None}], "spread": [0.5, None]}


@pytest.mark.parametrize("value", [True, 0, -1.5, 1e300, "", [], {}, None])
def test_what_json_knows_stays_as_it_is(value: Any):
    assert strict(value) == value and type(strict(value)) is type(value)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_names_in_any_language_are_read_back_whatever_the_output_can_show(monkeypatch: pytest.MonkeyPatch, encoding: str):
    value = {"name": "Größe, размер, 大きさ \N{ROCKET}"}
    text = printed(monkeypatch, value, encoding)
    assert json.loads(text) == value
    assert ("大" in text) == (encoding == "utf-8")


def test_a_name_of_a_file_that_is_no_text_is_escaped(monkeypatch: pytest.MonkeyPatch):
    value = {"run_dir": "/scratch/大/\udc80"}  # as Python has the byte 0x80
    assert json.loads(printed(monkeypatch, value, "utf-8")) == value


def test_a_long_line_is_not_broken_and_markup_is_not_taken_for_markup(monkeypatch: pytest.MonkeyPatch):
    value = {"message": f"[red]{'x' * 400}[/red]"}
    assert json.loads(printed(monkeypatch, value, "utf-8")) == value


def test_on_a_terminal_it_has_colours(monkeypatch: pytest.MonkeyPatch):
    assert "\x1b[" in printed(monkeypatch, {"step": 1}, "utf-8", terminal=True)


def test_what_a_check_has_found_is_json_that_says_it_as_it_is(capsys: pytest.CaptureFixture[str]):
    doctor.show(Report((Finding("tier", "ok", "/scratch/:key:/[red]", {}),), 1.0), as_json=True)
    assert json.loads(capsys.readouterr().out)["findings"][0]["text"] == "/scratch/:key:/[red]"
