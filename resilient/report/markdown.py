"""The report as Markdown, for an issue or a chat. Pure."""

from collections.abc import Iterator, Sequence

from resilient.driver.display import duration, size
from resilient.report.html import Subject, figures, listed, moment
from resilient.report.past import Fault, Past
from resilient.status import Summary

INCIDENTS = 15


def markdown(subject: Subject) -> str:
    """The whole text."""
    summary, past = subject.summary, subject.past
    blocks = [
        f"## {_safe(summary.name or 'campaign')}: {summary.state}",
        f"`{subject.where.replace('`', '')}`, as of {moment(subject.made_t)}",
        _table(("", ""), [(name, form(value)) for name, _, value, form in figures(summary)]),
        *_account(summary),
        *_incidents(past),
        *_checkpoints(past),
    ]
    return "\n\n".join(blocks) + "\n"


def _account(summary: Summary) -> Iterator[str]:
    whole = sum(summary.rank_seconds.values())
    if whole:
        yield "### Where the time went"
        parts = sorted(summary.rank_seconds.items(), key=lambda item: -item[1])
        yield _table(("part", "share", "rank seconds"), [(name, f"{s / whole:.1%}", f"{s:,.1f}") for name, s in parts if s > 0])


def _incidents(past: Past) -> Iterator[str]:
    """The last of them; the page has more."""
    found = listed(past)[-INCIDENTS:]
    if found:
        yield f"### The last {len(found)} of {past.kinds.total():,} faults"
        head = ("incident", "when", "kind", "culprit", "what was done", "down", "steps again", "detail")
        yield _table(head, [_incident(each) for each in found])


def _incident(each: Fault) -> tuple[str, ...]:
    again = "" if each.lost_steps is None else str(each.lost_steps)
    kind, done = each.kind.replace("_", " "), ", ".join(each.actions)
    return each.fault_id, moment(each.t), kind, each.culprit(), done, each.down(), again, each.detail[:120]


def _checkpoints(past: Past) -> Iterator[str]:
    if past.tiers:
        yield "### Checkpoints"
        rows = []
        for name, tier in past.tiers.items():
            rate = f"{size(tier.size_bytes / tier.write_s)}/s" if tier.write_s > 0 else ""
            newest = f"{tier.last_step:,}, {duration(max(0.0, (past.last_t or tier.last_t) - tier.last_t))} before the last sign"
            rows.append((name, f"{tier.snapshots:,}", rate, newest if tier.snapshots else "", f"{tier.committed:,}"))
        yield _table(("tier", "snapshots", "written with", "newest step", "committed"), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([_safe(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _safe(text: str) -> str:
    """On one line, and taken for nothing but text."""
    text = " ".join("".join(each if each.isprintable() else " " for each in text).split())
    return "".join(f"\\{each}" if each in "\\`*_[]<>|#@~" else each for each in text)
