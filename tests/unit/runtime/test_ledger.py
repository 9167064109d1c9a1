"""The ledger's files: whole lines, also after a crash in mid-line."""

import json
from pathlib import Path

from resilient import ledger


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


def test_a_line_that_a_crash_cut_short_spoils_no_other(tmp_path: Path):
    path = tmp_path / ledger.EVENTS
    path.write_text(json.dumps({"event": "a", "generation": 1}) + "\n" + '{"event": "b", "gener')
    with ledger.Ledger(tmp_path) as book:
        book.event("c", {}, generation=2)
    assert [line["event"] for line in ledger.read(path)] == ["a", "c"]
