"""The ledger's files: whole lines, also after a crash in mid-line."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient import entries, ledger
from resilient.driver.display import describe


def strictly(text: str) -> Any:
    """As parsers of other languages read JSON."""

    def refused(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refused)


def test_an_event_has_the_fields_that_every_event_has(tmp_path: Path):
    with ledger.Ledger(tmp_path) as book:
        book.event("committed", {"step": 3}, generation=2)
    (line,) = ledger.read(tmp_path / ledger.EVENTS)
    assert list(line) == ["t", "event", "generation", "host", "step"]
    assert (line["event"], line["generation"], line["step"]) == ("committed", 2, 3)


def test_a_loss_is_written_with_full_precision(tmp_path: Path):
    loss = 7.123456789012345e-3
    with ledger.Ledger(tmp_path) as book:
        book.metrics({"step": 1, "loss": loss}, generation=1, t=1.0)
    assert repr(loss) in (tmp_path / ledger.METRICS).read_text()
    assert next(ledger.read(tmp_path / ledger.METRICS))["loss"] == loss


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_json_does_not_know_is_null_in_both_files(tmp_path: Path, number: float):
    with ledger.Ledger(tmp_path) as book:
        book.metrics({"step": 1, "loss": number, "parts": {"first": [1.5, number]}}, generation=1, t=1.0)
        book.event("validation", {"step": 1, "val_loss": number}, generation=1, t=1.0)
    (line,) = map(strictly, (tmp_path / ledger.METRICS).read_text().splitlines())
    assert (line["loss"], line["parts"]) == (None, {"first": [1.5, None]})
    (event,) = map(strictly, (tmp_path / ledger.EVENTS).read_text().splitlines())
    assert event["val_loss"] is None


@pytest.mark.parametrize("written", ["NaN", "Infinity", "null"])  # an earlier version wrote the first two
def test_a_validation_loss_that_was_not_finite_is_read_however_it_was_written(tmp_path: Path, written: str):
    line = f'{{"t": 1.0, "event": "validation", "generation": 1, "host": "n", "step": 3, "val_loss": {written}}}\n'
    (tmp_path / ledger.EVENTS).write_text(line)
    (event,) = ledger.read_events(tmp_path / ledger.EVENTS)
    assert not math.isfinite(entries.validation_loss(event))
    assert "validation loss" in str(describe(event))


def test_a_line_that_a_crash_cut_short_spoils_no_other(tmp_path: Path):
    path = tmp_path / ledger.EVENTS
    path.write_text(json.dumps({"event": "a", "generation": 1}) + "\n" + '{"event": "b", "gener')
    with ledger.Ledger(tmp_path) as book:
        book.event("c", {}, generation=2)
    assert [line["event"] for line in ledger.read(path)] == ["a", "c"]


def json_of_the_standard_library(line: bytes) -> object:
    try:
        return json.loads(line.decode(errors="replace"))
    except (ValueError, RecursionError):
        return None


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(st.text(max_size=3), VALUES, max_size=4).map(lambda found: json.dumps(found).encode())
    | st.sampled_from(
        [
            b'{"a": 1e400}',
            b'{"a": 1' + b"0" * 400 + b"}",
            b'{"a": ' + b"1" * 5000 + b"}",
            b'{"a": 1, "a": 2}',
            b'{"a": "\xff"}',
            b'{"a": "\\udc00"}',
            b'\xef\xbb\xbf{"a": 1}',
            b'{"a": 01}',
            b'{"a": -0.0}',
            b"[" * 100_000,
            b"{}{}",
        ]
    ),
    st.binary(max_size=2),
    st.integers(0, 200),
)
def test_a_line_is_read_as_the_standard_library_reads_it(line: bytes, put_in: bytes, at: int):
    for each in (line, line[:at] + put_in + line[at:], line[:at]):
        found, expected = ledger.parsed(each), json_of_the_standard_library(each)
        if b"\\u" not in each:  # halves of characters are replaced; see the tests of that
            assert repr(found) == repr(expected if isinstance(expected, dict) else None)
        else:
            assert (found is None) == (not isinstance(expected, dict))
