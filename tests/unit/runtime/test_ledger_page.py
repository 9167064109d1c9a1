"""docs/run-directory.md says what files, events, faults, actions and metrics there are: as the code has them, and no others."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import get_args

import msgspec

from checkpoint.tools import aside
from resilient import entries
from resilient.recovery.faults import Kind
from resilient.recovery.policy import ActionName

ROOT = Path(__file__).parents[3]
EVERY_EVENT = {"t", "event", "generation", "host"}
NO_EVENT = {"resumed"}  # a record that becomes generation_started


def rows(title: str) -> dict[str, set[str]]:
    """The first table below a heading: the name in each row, and what is in code in its second cell."""
    _, _, rest = (ROOT / "docs/run-directory.md").read_text().partition(f"\n{title}\n")
    table = re.search(r"^\|.*?^(?!\|)", rest, re.MULTILINE | re.DOTALL)
    assert table is not None
    cells = [line.strip("|").split("|") for line in table[0].splitlines()[2:]]
    return {re.findall(r"`(\w+)`", name)[0]: set(re.findall(r"`(\w+)`", second)) for name, second, *_ in cells}


def found(*patterns: str, packages: Iterable[str] = ("resilient", "trainer")) -> set[str]:
    texts = [path.read_text() for package in packages for path in (ROOT / package).rglob("*.py")]
    return {name for text in texts for pattern in patterns for name in re.findall(pattern, text)}


def test_every_file_is_known_to_exports_which_must_not_replace_it():
    listed = (ROOT / "docs/run-directory.md").read_text().split("```")[1]
    cells = [re.split("  |: ", line)[0] for line in listed.strip().splitlines()]
    paths = [path for cell in cells for path in cell.split(", ")] + re.findall(r"; ([\w./]+): ", listed)
    names = {path.split("/")[0].removesuffix(".1 …").strip() for path in paths}
    assert {name for name in names if not name.startswith(".")} == aside.OF_A_RUN


def test_every_event_has_a_row_with_the_fields_that_readers_rely_on():
    table = rows("## Events")
    assert table.keys() == entries._EVENTS.keys()
    for event, kind in entries._EVENTS.items():
        fields = {field.encode_name for field in msgspec.structs.fields(kind)} - EVERY_EVENT
        assert fields <= table[event], event


def test_every_event_that_is_written_has_a_row():
    written = found(r'out\.event\(\s*"(\w+)"', r'WriteEvent\(\s*"(\w+)"', r'event="(\w+)"', r'lines\.event\("(\w+)"')
    assert {"run_started", "forked", "recovered", "validation"} <= written
    assert written - NO_EVENT <= rows("## Events").keys()


def test_every_kind_of_fault_has_a_row():
    assert rows("### Faults").keys() == set(get_args(Kind))


def test_every_action_has_a_row():
    beside = found(
        r'follow_up\(\s*"(\w+)"',
        r'self\._leave\(\s*node, "(\w+)"',
        r'"name": "(\w+)", "reason"',
        r'self\._report\(bad, "(\w+)"',
    )
    assert {"shrink", "release", "degrade_tier", "skip_batch"} <= beside
    assert rows("### Actions").keys() == beside | set(get_args(ActionName))


def test_every_field_of_metrics_that_readers_rely_on_is_named():
    _, _, part = (ROOT / "docs/run-directory.md").read_text().partition("\n## Metrics\n")
    part = part.partition("\n## ")[0]
    fields = {field.encode_name for field in msgspec.structs.fields(entries.StepMetrics)}
    assert fields <= set(re.findall(r"`(\w+)`", part))
