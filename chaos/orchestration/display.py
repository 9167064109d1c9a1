"""What a person sees while an experiment runs, and before: lines with the time, and tables.

Owns the text and its layout; decides nothing.
"""

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from chaos import faults
from chaos.fault import Need, describe
from chaos.injectors.context import Target
from chaos.planning import Plan, Strike, why_not
from resilient.driver.display import describe as in_words

MOST_SHOWN = 100  # faults of a plan
_STYLES = {"fault": "red", "action": "yellow", "recovered": "green"}


class Lines:
    """A line for each thing that happens."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def note(self, text: str, style: str = "bold") -> None:
        """A sentence, with the time."""
        self._console.print(Text(f"{time.strftime('%H:%M:%S')} {text}", style), soft_wrap=True, highlight=False)

    def event(self, event: Mapping[str, Any]) -> None:
        """A line of the ledger, if it is about faults."""
        if event["event"] in (*_STYLES, "link", "checkpoint_rejected", "drain") and (text := in_words(event)) is not None:
            self.note(f"  {text}", _STYLES.get(event["event"], ""))


def show_plan(console: Console, plan: Plan) -> None:
    """What will be done, and what is left out."""
    table = Table("fault", "target", "when", "should be reported as", "and end in", box=None, pad_edge=False, header_style="bold")
    for strike in plan.strikes[:MOST_SHOWN]:
        expected = faults.kind(strike.fault)(**strike.params).expects()
        kinds = ", ".join(sorted(expected.kinds)) or "-"
        ends = ", ".join([*sorted(expected.actions), *(f"exit {code}" for code in sorted(expected.exits))]) or "-"
        table.add_row(strike.id, _aimed(strike), _when(strike), kinds, ends.replace("_", " "))
    console.print(table)
    if len(plan.strikes) > MOST_SHOWN:
        console.print("and so on, until the time is over")
    for name, why in plan.left_out.items():
        console.print(Text(f"left out: {name}: {why}"), highlight=False)


def show_faults(console: Console, has: frozenset[Need]) -> None:
    """The faults that there are."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title, wraps in (("fault", False), ("what happens", True), ("needs", False), ("here", False), ("ends in", True)):
        table.add_column(title, no_wrap=not wraps, ratio=(2 if title == "what happens" else 1) if wraps else None)
    for name in faults.names():
        kind = faults.kind(name)
        possible = not why_not(name, has)
        try:
            actions = ", ".join(sorted(kind().expects().actions)) or "-"
        except ValueError:  # it has parameters without a default
            actions = ""
        needs = ", ".join(sorted(kind.needs)) or "nothing"
        table.add_row(name, describe(kind), needs, "yes" if possible else "no", actions.replace("_", " "))
    console.print(table)


def _aimed(strike: Strike) -> str:
    if not isinstance(strike.target, Target):
        return strike.target
    target = strike.target
    return f"rank {target.rank}" if target.rank is not None else f"node {target.node}" if target.node is not None else "the run"


def _when(strike: Strike) -> str:
    at = strike.at
    said = [
        f"step {at.step}" if at.step is not None else "",
        f"{at.s:g} s" if at.s is not None else "",
        f"together with {at.together}" if at.together is not None else "",
        f"after {at.after}" if at.after is not None else "",
        f"in phase {at.phase}" if at.phase is not None else "",
        f"after {strike.calm_s:.1f} s" if strike.calm_s else "",
    ]
    return ", ".join(each for each in said if each) or "next"
