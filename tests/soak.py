"""The second tier: what repeats, soaks, or takes long for other reasons is marked `soak` and runs by `pytest -m soak`.

`--soak-slice SEED` keeps a part of it that takes no longer than `--soak-budget-s`. The tests are divided into slices by their
names and recorded costs alone, and the seed (the hash of a commit, say) picks one: the same seed is the same slice on any
machine, and over many commits every slice has its turn.
"""

import hashlib
import json
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

COSTS = Path(__file__).with_name(
    "soak-costs.json"
)  # wall seconds by test, written by `python tests/soak.py FILE` after a run with --costs-to FILE
UNKNOWN_S = 30.0  # of a test that was not recorded yet
BUDGET_S = 300.0


def soaked(*values: Any) -> Any:
    """A parameter set of the second tier."""
    return pytest.param(*values, marks=pytest.mark.soak)


def soaked_after(first: int, values: Iterable[Any]) -> list[Any]:
    """Parameter sets of which so many are of the first tier; those that have marks of their own are not counted."""
    found: list[Any] = []
    for value in values:
        if not hasattr(value, "marks"):
            first -= 1
            value = value if first >= 0 else soaked(*(value if isinstance(value, tuple) else (value,)))
        found.append(value)
    return found


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])


def slices(costs_s: Mapping[str, float], budget_s: float) -> list[list[str]]:
    """All tests in slices of at most `budget_s`, in an order that depends on their names alone.

    A test that takes longer by itself is a slice of its own.
    """
    found: list[list[str]] = []
    left_s: list[float] = []
    for test in sorted(costs_s, key=_digest):
        room = next((number for number, each in enumerate(left_s) if each >= costs_s[test]), None)
        if room is None:
            room = len(found)
            found.append([])
            left_s.append(budget_s)
        found[room].append(test)
        left_s[room] -= costs_s[test]
    return found


def chosen(count: int, seed: str) -> int:
    """Which of so many slices the seed picks."""
    return _digest(seed) % count


def costs_of(tests: Sequence[str]) -> dict[str, float]:
    """What each test took when it was recorded, in wall seconds."""
    recorded_s: dict[str, float] = json.loads(COSTS.read_text())
    return {test: recorded_s.get(test, UNKNOWN_S) for test in tests}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak-slice", metavar="SEED", help="of the tests marked soak, only the slice that this seed picks")
    parser.addoption("--soak-budget-s", type=float, default=BUDGET_S, help="how long a slice may take, in seconds")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.getoption("--soak-slice")
    if seed is None:
        return
    soaking = [item.nodeid for item in items if item.get_closest_marker("soak")]
    parts = slices(costs_of(soaking), config.getoption("--soak-budget-s"))
    part = set(parts[chosen(len(parts), seed)]) if parts else set()
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in part])
    items[:] = [item for item in items if item.nodeid in part]


def _told(seed: str, tests: Sequence[str]) -> list[str]:
    return [
        f"slice of the soak: {len(tests)} tests, about {sum(costs_of(tests).values()):.0f} s one after the other",
        f"again: pytest -m soak --soak-slice {shlex.quote(seed)}; one of its tests: pytest -m soak TEST",
        *(f"  {shlex.quote(test)}" for test in tests),
    ]


def pytest_report_collectionfinish(config: pytest.Config, items: Sequence[pytest.Item]) -> list[str]:
    seed = config.getoption("--soak-slice")
    return _told(seed, [item.nodeid for item in items]) if seed is not None and items else []


class OfWorkers:
    """Says it where workers of xdist collect."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.told = False

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        if not self.told and reporter is not None:
            self.told = True  # every worker has the same
            reporter.line("")
            for line in _told(self.config.getoption("--soak-slice"), ids):
                reporter.line(line)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--soak-slice") is not None:
        config.pluginmanager.register(OfWorkers(config))


def record(costs: Path) -> None:
    """Take over what the tests of the second tier took in a run with `--costs-to`."""
    known_s: dict[str, float] = json.loads(COSTS.read_text())
    for line in costs.read_text().splitlines():
        cost = json.loads(line)
        if cost["soak"]:
            known_s[cost["name"]] = round(cost["wall_s"], 1)
    COSTS.write_text(json.dumps(known_s, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    record(Path(sys.argv[1]))
