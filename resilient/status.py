"""How a campaign is doing: a view of its ledger and metrics, from anywhere that sees the run directory.

`summarize` is pure: what the lines come to (`resilient.past`) and a clock to a `Summary`.
"""

import asyncio
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Never

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from resilient import ledger
from resilient.account import PARTS
from resilient.config.errors import shown_change
from resilient.drawing.picture import picture
from resilient.driver.display import describe, duration, harmless, local_time, size, without
from resilient.driver.lease import LEASE, Owner, ahead_s, holder, read
from resilient.exits import EnvironmentUnusable
from resilient.identity import record as identity
from resilient.identity.fingerprint import Fingerprint
from resilient.json_output import print_json
from resilient.past.fold import Past
from resilient.past.record import Reader
from resilient.processes import DRIVER, local_pids, must_be_run_directory
from resilient.slurm.badnodes import bad_nodes
from resilient.slurm.chain import FILE as CHAIN
from resilient.slurm.chain import fold, whole
from resilient.slurm.history import history, queued_s
from resilient.slurm.queue import UNSTARTABLE, QueuedJob
from resilient.slurm.succession import Succession

WATCH_S = 2.0
RECENT = 8

Line = Mapping[str, Any]


@dataclass
class Summary:
    """A campaign at one moment; times in seconds."""

    name: str = ""
    state: str = "not started"  # running, reached, stopped, gave up, ended, interrupted
    step: int = 0
    target_step: int | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    steps_per_s: float | None = None  # of a script that tells no tokens
    left_s: float | None = None
    generation: int = 0
    checkpoint_step: int | None = None
    checkpoint_age_s: float | None = None
    faults: int = 0
    recovered: int = 0
    left_out: dict[str, list[int]] = field(default_factory=dict)  # devices that do not work, by node
    downtime_s: float = 0.0
    lost_steps: int = 0
    validation_loss: float | None = None
    skipped: int = 0  # of the last batches, as bad
    last_exit_code: int | None = None
    goodput: float | None = None
    wall_s: float = 0.0
    rank_seconds: dict[str, float] = field(default_factory=dict)
    incidents: list[dict[str, Any]] = field(default_factory=list)  # the newest
    kinds: dict[str, dict[str, Any]] = field(default_factory=dict)  # all faults, by kind
    runs: list[dict[str, Any]] = field(default_factory=list)  # the newest jobs, in a chain or not
    recent: list[dict[str, Any]] = field(default_factory=list)
    jobs: list[dict[str, Any]] = field(default_factory=list)
    bad_nodes: list[dict[str, Any]] = field(default_factory=list)  # that further jobs do without
    queued_s: float | None = None  # of a chain: while no job of it ran
    chain_goodput: float | None = None  # with the time in the queue
    expected_end_t: float | None = None  # unix seconds
    unfollowed: bool = False  # the chain is not over, and no job of it runs or waits
    unwritten: str | None = None  # of one that runs: why its run directory cannot tell what happens now, where that is seen
    pids: dict[str, int] = field(default_factory=dict)  # of this machine: as `processes.local_pids` names them
    forked_from: dict[str, Any] | None = None  # the parent's run directory and name, the step, and what was changed
    accepted: list[dict[str, Any]] = field(default_factory=list)  # keys that changed since the campaign began, by --accept


STATES = {0: "reached", 70: "gave up", 75: "stopped"}
"""What a job's exit code says of the campaign."""


def summarize(past: Past, *, locked: bool, now: float) -> Summary:
    """The campaign's state.

    Args:
        past: nothing may follow in it.
        locked: a driver holds the run directory.
        now: unix seconds.
    """
    summary = Summary(
        name=past.name,
        step=past.step,
        target_step=past.target_step,
        loss=past.loss,
        tokens_per_s=past.tokens_per_s,
        steps_per_s=1 / past.step_s if past.step_s and past.tokens_per_s is None else None,
        generation=past.generation,
        checkpoint_step=past.checkpoint_step,
        checkpoint_age_s=None if past.checkpoint_step is None else max(0.0, now - past.checkpoint_t),
        faults=past.faults,
        recovered=past.recovered,
        left_out=past.left_out,
        downtime_s=past.downtime.down_s,
        lost_steps=past.downtime.lost_steps,
        validation_loss=past.validation_loss,
        skipped=past.skipped_last,
        last_exit_code=past.exit_code,
        recent=[line for line in map(json.loads, past.recent) if describe(line) is not None],
    )
    if past.target_step is not None and past.step_s is not None:
        summary.left_s = max(0, past.target_step - past.step) * past.step_s
    if past.exit_code is not None:
        summary.state = STATES.get(past.exit_code, "ended")
    elif past.started:
        summary.state = "running" if locked else "interrupted"
    found = past.account(now if locked else None)
    summary.goodput, summary.wall_s, summary.rank_seconds = found.goodput, found.wall_s, found.seconds
    summary.incidents = [asdict(incident) for incident in found.incidents]
    summary.kinds = {name: asdict(kind) for name, kind in found.kinds.items()}
    summary.runs = [asdict(run) for run in found.runs]
    return summary


def overview(run_dir: Path) -> Summary:
    """What ledger and metrics say."""
    owner = holder(run_dir)
    return summarize(Reader(run_dir).read(), locked=owner is not None, now=_now_there(run_dir, owner))


def _now_there(run_dir: Path, owner: Owner | None) -> float:
    """Unix seconds by the clock of the ledger. Args: owner: who works there; a driver that was killed has left its lease."""
    return time.time() + ahead_s(owner or read(run_dir / LEASE)[0])


def inspect(run_dir: Path, reader: Reader | None = None) -> Summary:
    """The summary of a run directory. Args: reader: of it, that has read before. Raises EnvironmentUnusable if it is none."""
    chain = Succession.found(run_dir)
    if chain is None:
        must_be_run_directory(run_dir)
    now = time.time()
    past = (reader or Reader(run_dir)).read()
    pids = local_pids(run_dir, past.run_dir)
    owner = holder(run_dir)
    summary = summarize(past, locked=owner is not None, now=_now_there(run_dir, owner))
    add_identity(summary, identity.read(run_dir), run_dir.absolute().name)
    summary.bad_nodes = [asdict(each) for each in bad_nodes(run_dir, now)]
    summary.pids = pids
    if summary.state == "running":
        summary.unwritten = _unwritten(run_dir, here=DRIVER in pids)
    if chain is not None:
        summary.name = summary.name or chain.name
        add_chain(summary, list(whole(ledger.read(run_dir / CHAIN))), asyncio.run(chain.inspect(run_dir.stat().st_uid)), now)
    return summary


def _unwritten(run_dir: Path, *, here: bool) -> str | None:
    """Why nothing can be written there; None where that is not seen, as of a quota. Raises OSError.

    Args:
        here: the driver is on this machine; another one may have the file system mounted in another way.
    """
    found = os.statvfs(run_dir)
    if here and found.f_flag & os.ST_RDONLY:
        return "its file system is read-only"
    return None if found.f_bavail else "no space is left"


def draw(run_dir: Path, file: Path) -> str:
    """Write the picture of a campaign; returns a sentence that says so."""
    must_be_run_directory(run_dir)
    text = picture(ledger.read(run_dir / ledger.EVENTS), ledger.read(run_dir / ledger.METRICS))
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise EnvironmentUnusable(f"{file} cannot be written: {error.strerror}") from None
    return f"{file}: {size(len(text.encode()))}"


def add_identity(summary: Summary, found: Fingerprint | None, name: str) -> None:
    """Where the campaign comes from, and what was accepted. Args: name: of one that has not begun."""
    if found is None:
        return
    summary.accepted = [msgspec.to_builtins(each) for each in found.accepted]
    if found.lineage is not None:
        summary.forked_from = msgspec.to_builtins(found.lineage)
        summary.name = summary.name or name


def add_chain(summary: Summary, records: Sequence[Line], queue: Sequence[QueuedJob] | None, now: float) -> None:
    """The jobs, and what the time in the queue makes of the goodput and of the end.

    Args:
        records: of its file.
        queue: None: Slurm does not say.
    """
    lines = history(records, queue)
    summary.jobs = [asdict(line) for line in lines]
    runs = [(run["t"], run["until_t"]) for run in summary.runs]
    going = summary.state not in ("running", "reached", "gave up") and fold(records).over is None
    summary.unfollowed = going and queue is not None and not any(job.runs or job.waits for job in queue)
    summary.queued_s = queued_s(records, lines, runs, summary.wall_s, now)
    if summary.queued_s is None:
        return
    whole_s = summary.wall_s + summary.queued_s
    if summary.goodput is not None and summary.wall_s:
        summary.chain_goodput = summary.goodput * summary.wall_s / whole_s
        if summary.left_s and summary.chain_goodput:
            summary.expected_end_t = now + summary.left_s / summary.chain_goodput


def render(summary: Summary) -> Group:
    """The summary for a terminal."""
    table = Table(show_header=False, box=None, pad_edge=False)
    left = f", {duration(summary.left_s)} left" if summary.left_s and summary.state == "running" else ""
    rows: list[tuple[str, str | None]] = [
        ("campaign", f"{summary.name}: {summary.state}"),
        ("not written", summary.unwritten and f"{summary.unwritten}: the job keeps in memory what has happened since"),
        ("chain", "no job of it runs or waits: `resilient submit` goes on" if summary.unfollowed else None),
        ("branched off", _origin(summary.forked_from)),
        ("accepted", "; ".join(map(_accepted, summary.accepted)) or None),
        ("step", f"{summary.step} of {summary.target_step}{left}" if summary.target_step is not None else f"{summary.step}"),
        ("speed", None if summary.steps_per_s is None else f"{summary.steps_per_s:.3g} steps/s"),
        ("loss", None if summary.loss is None else f"{summary.loss:.4f}"),
        ("validation loss", None if summary.validation_loss is None else f"{summary.validation_loss:.4f}"),
        ("skipped", f"the last {summary.skipped} batches, as bad" if summary.skipped else None),
        ("speed", None if summary.tokens_per_s is None else f"{summary.tokens_per_s:,.0f} tokens/s"),
        (
            "checkpoint",
            None
            if summary.checkpoint_step is None
            else f"step {summary.checkpoint_step}, {duration(summary.checkpoint_age_s or 0)} ago",
        ),
        ("generation", str(summary.generation)),
        ("left out", without(summary.left_out) or None),
        ("goodput", None if summary.goodput is None else f"{summary.goodput:.1%} of {duration(summary.wall_s)}"),
        (
            "with the queue",
            None
            if summary.chain_goodput is None
            else f"{summary.chain_goodput:.1%}, {duration(summary.queued_s or 0)} without a job",
        ),
        ("expected end", None if summary.expected_end_t is None else _clock(summary.expected_end_t)),
        (
            "faults",
            f"{summary.faults}, of which {summary.recovered} recovered; {summary.downtime_s:.1f} s down, "
            f"{summary.lost_steps} steps computed again",
        ),
        ("process ids", ", ".join(f"{who} {pid}" for who, pid in summary.pids.items()) or None),
    ]
    for name, value in rows:
        if value is not None:
            table.add_row(Text(name, style="dim"), _cell(value))
    recent = [_line(f"{_clock(line['t'])}  {describe(line)}") for line in summary.recent]
    blocks: list[Sequence[RenderableType]] = [_jobs(summary), _bad_nodes(summary), _times(summary), _incidents(summary), recent]
    return Group(table, *[each for block in blocks if block for each in (Text(""), *block)])


def _cell(text: str, style: str = "") -> Text:
    """What is written in a file or by a rank, as it stands there: no markup, and nothing that a terminal would act upon."""
    return Text(harmless(text), style=style)


def _line(text: str) -> Text:
    return Text(harmless(text), overflow="ellipsis")


def _origin(lineage: Mapping[str, Any] | None) -> str | None:
    return None if lineage is None else f"{lineage['parent']} at step {lineage['step']}"


def _accepted(each: Mapping[str, Any]) -> str:
    at = "" if each["step"] is None else f" at step {each['step']}"
    return f"{each['key']} {' → '.join(shown_change(each['old'], each['new']))}{at}"


def _waits_for(reason: str) -> str:
    return f"{reason}: `resilient submit` lets it begin" if reason == UNSTARTABLE else reason


def _jobs(summary: Summary) -> list[Table]:
    """The last jobs of the chain, and the one that waits."""
    if not summary.jobs:
        return []
    table = Table("job", "state", Column("from step", justify="right"), "began", "took", "", box=None, pad_edge=False)
    for each in summary.jobs[-RECENT:]:
        began, ended, until = each["started_t"], each["ended_t"], each["until_t"]
        note = _waits_for(each["reason"]) if until is None else f"until {_clock(until)}"
        took = "" if began is None or ended is None else duration(ended - began)
        step = "" if each["step"] is None else str(each["step"])
        when = "" if began is None else _clock(began)
        table.add_row(_cell(each["job"]), _cell(each["state"]), step, when, took, _cell(note, style="dim"))
    return [table]


def _bad_nodes(summary: Summary) -> list[Text]:
    """The nodes that further jobs do without."""
    return [_line(f"without {each['host']} until {_clock(each['until_t'])}: {each['reason']}") for each in summary.bad_nodes]


def _clock(t: float) -> str:
    """In local time; with the year where it is not this one, as of a job whose partition has no limit."""
    year = local_time(t, "%Y")
    return local_time(t, "%m-%d %H:%M:%S" if year == time.strftime("%Y") else "%Y-%m-%d %H:%M:%S")


def _times(summary: Summary) -> list[Table]:
    """Where the time went."""
    total = sum(summary.rank_seconds.values())
    if not total:
        return []
    table = Table("part", Column("s x ranks", justify="right"), Column("share", justify="right"), "", box=None, pad_edge=False)
    for part, seconds in sorted(summary.rank_seconds.items(), key=lambda item: -item[1]):
        if seconds > 0:
            table.add_row(part, f"{seconds:,.1f}", f"{seconds / total:.2%}", Text(PARTS[part], style="dim"))
    return [table]


def _incidents(summary: Summary) -> list[Table]:
    """What each of the last faults has cost."""
    if not summary.incidents:
        return []
    table = Table("incident", "kind", "ranks", "action", Column("lost steps", justify="right"), "seconds", box=None, pad_edge=False)
    for each in summary.incidents[-RECENT:]:
        costs = ", ".join(f"{part} {seconds:.2f}" for part, seconds in each["seconds"].items() if seconds >= 0.005)
        if each["incident_id"] != each["fault_id"]:
            costs = f"counted with {each['incident_id']}"
        lost = "" if each["lost_steps"] is None else str(each["lost_steps"])
        ranks = ", ".join(map(str, each["ranks"]))
        table.add_row(*map(_cell, (each["fault_id"], each["kind"], ranks, each["action"], lost, costs)))
    return [table]


def show(run_dir: Path, *, as_json: bool) -> None:
    """Print the summary."""
    summary = inspect(run_dir)
    if as_json:
        print_json(asdict(summary))
    else:
        Console(highlight=False).print(render(summary))


def watch_forever(run_dir: Path) -> Never:
    """Show the summary anew until Ctrl-C, which ends the process with status 0; without a terminal, one below the other."""
    try:
        reader, console = Reader(run_dir), Console(highlight=False)
        if not console.is_terminal or console.is_dumb_terminal:  # where nothing can be shown in place of what is there
            while True:
                console.print(render(inspect(run_dir, reader)), "")
                time.sleep(WATCH_S)
        with Live(render(inspect(run_dir, reader)), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(WATCH_S)
                live.update(render(inspect(run_dir, reader)), refresh=True)
    except KeyboardInterrupt:
        raise SystemExit(0) from None
