"""The diagnosis: when a run gives up, one page on what it died of.

Pure: lines of the ledger to a `Diagnosis`, and that to a page (Markdown that reads well in a terminal too) or to a few lines. It
knows nothing but what the ledger tells and which logs of agents there are, so that the page can be made again of the run directory
at any time.
"""

import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resilient.excerpts import head
from resilient.exits import Exit
from resilient.logs.paths import STEP_OF_MANY, agent_log, step_log
from resilient.recovery.frames import has_frames, place

FILE = "diagnosis.md"
TRACEBACK_LINES = 12  # of the short form
LINE_CHARACTERS = 500  # of each of them

Line = Mapping[str, Any]

_EVERY_STEP = ("snapshot", "replicated")  # of no account here, and many
_LEFT = re.compile(r"exit code (\d+)")  # of a fault's detail


@dataclass(frozen=True)
class Tried:
    """One fault, what was done about it, and what came of that."""

    t: float
    fault_id: str
    kind: str
    who: str
    step: int | None
    action: str
    outcome: str


@dataclass(frozen=True)
class OwnCheckpoint:
    """What a script has written by itself, as far as was seen. Attributes: t: unix seconds, when it was finished, if known."""

    step: int
    path: str
    t: float | None = None


@dataclass(frozen=True)
class Diagnosis:
    """What a run died of.

    Attributes:
        what: in a sentence: the reason for giving up.
        failure: what happened the last time, in a line; empty where no fault is on record.
        who: rank, node and host.
        where: step and phase.
        place: of an exception: file, line and function of its last frame outside libraries.
        traceback: the evidence of the first rank that failed.
        verdict: the class of the cause, where it is known.
        checkpoint: the newest step that is durable.
        own: the newest checkpoint of the script, where it has written one by itself.
        logs: where to look, relative to the run directory.
        advice: what one may try next.
        left_out: newer checkpoints that were due, and that a tier did without.
        also: what the end of the job has left undone.
        alone: the rank's own message says everything.
    """

    code: Exit
    name: str
    what: str
    failure: str = ""
    who: str = ""
    where: str = ""
    place: str = ""
    traceback: str = ""
    verdict: str | None = None
    checkpoint: int | None = None
    own: OwnCheckpoint | None = None
    left_out: Sequence[str] = ()
    tried: Sequence[Tried] = ()
    logs: Sequence[str] = ()
    advice: Sequence[str] = ()
    also: str = ""
    alone: bool = False


def diagnose(
    events: Iterable[Line],
    *,
    durable: Iterable[int] = (),
    own: OwnCheckpoint | None = None,
    code: Exit,
    message: str,
    agents: Collection[str] = (),
) -> Diagnosis:
    """The diagnosis of the last job in the ledger.

    Args:
        events: of that job at least.
        durable: steps that are known to be durable and were not rejected.
        own: the newest checkpoint that the script is known to have written by itself.
        message: what the run ends with; its first line is the reason where no fault is to blame.
        agents: logs of agents that are there, and of steps of Slurm that were to start some, relative to the run directory.
    """
    job, checkpoint, own, name = _last_job(events, durable, own)
    faults = [line for line in job if line["event"] == "fault" and line["kind"] != "storage"]
    actions = {line["fault_id"]: line for line in job if line["event"] == "action"}
    tried = _tried(job, faults, actions)
    last = next((fault for fault in reversed(faults) if actions.get(fault["fault_id"], {}).get("name") == "give_up"), None)
    what = message.partition("\n")[0].rstrip(":")
    if last is None:
        storage = [line["detail"] for line in job if line["event"] == "fault" and line["kind"] == "storage"]
        return Diagnosis(
            code,
            name,
            what,
            traceback="\n".join(storage),
            checkpoint=checkpoint,
            own=own,
            left_out=_left_out(job, checkpoint),
            tried=tried,
            logs=_logs(faults, agents),
            advice=_advise(code, None, _goes_on(checkpoint, own)),
        )
    # Of all failures at this step the first that has a traceback tells most: later ones may be its echoes.
    alike = [fault for fault in faults if fault["step"] == last["step"]]
    telling = next((fault for fault in alike if has_frames(fault["evidence"])), last)
    alone = message == last["evidence"]
    return Diagnosis(
        code=code,
        name=name,
        what=what if alone else actions[last["fault_id"]]["reason"],
        failure=last["detail"],
        who=_who(last, job),
        where=_where(last),
        place=place(telling["evidence"]),
        traceback=telling["evidence"].rstrip(),
        verdict=last.get("class"),
        checkpoint=checkpoint,
        own=own,
        left_out=_left_out(job, checkpoint),
        tried=tried,
        logs=_logs([*alike, last], agents),
        advice=_advise(code, last, _goes_on(checkpoint, own)),
        also=_behind(message, last["evidence"].rstrip()).strip("; \n"),
        alone=alone,
    )


def _behind(message: str, evidence: str) -> str:
    """What a message says after the evidence, which the reason before it may have in it, too."""
    _, found, after = message.rpartition(evidence)
    return after if found else ""


def _last_job(
    events: Iterable[Line], known: Iterable[int], own: OwnCheckpoint | None
) -> tuple[list[Line], int | None, OwnCheckpoint | None, str]:
    """The lines since the last start, the newest step that is durable, the script's newest checkpoint, and the campaign's name."""
    job: list[Line] = []
    name, durable = "", set(known)
    for line in events:
        match line.get("event"):
            case "run_started":
                job, name = [], str(line.get("name", ""))
            case "committed":
                durable.add(int(line["step"]))
            case "script_checkpoint":
                own = OwnCheckpoint(int(line["step"]), str(line["path"]), float(line["t"]))
            case "checkpoint_rejected":
                durable.discard(int(line["step"]))
        if line.get("event") not in (None, *_EVERY_STEP):
            job.append(line)
    return job, max(durable, default=None), own, name


def _left_out(job: Sequence[Line], checkpoint: int | None) -> list[str]:
    """Of each tier the newest checkpoint that was due and left out, if none is as new as that."""
    newest = {line["tier"]: line["step"] for line in job if line["event"] == "checkpoint_missed"}
    return [f"step {step} was due on tier {tier} and left out" for tier, step in newest.items() if step > (checkpoint or 0)]


def _tried(job: Sequence[Line], faults: Sequence[Line], actions: Mapping[str, Line]) -> list[Tried]:
    recovered = {line["fault_id"]: line for line in job if line["event"] == "recovered"}
    found = []
    for fault in faults:
        action, after = actions.get(fault["fault_id"]), recovered.get(fault["fault_id"])
        outcome = ""
        if after is not None:
            outcome = f"step {after['step']} after {after['downtime_s']:.1f} s, {after['lost_steps']} computed again"
        elif action is not None and action["name"] != "give_up":
            outcome = "no step was finished"
        done = "" if action is None else str(action["name"]).replace("_", " ")
        if action is not None and "step" in action:
            left_out = ", ".join(f"{first}-{last}" for first, last in action.get("skip", []))
            done += f" to step {action['step']}" + (f", without {left_out}" if left_out else "")
        found.append(Tried(float(fault["t"]), fault["fault_id"], fault["kind"], _ranks(fault), fault["step"], done, outcome))
    return found


def _ranks(fault: Line) -> str:
    ranks = ", ".join(map(str, fault["ranks"]))
    return f"rank {ranks}" if ranks else f"node {', '.join(map(str, fault['nodes']))}" if fault["nodes"] else "all ranks"


def _who(fault: Line, job: Sequence[Line]) -> str:
    """Rank, node and host."""
    started = [line for line in job if line["event"] == "generation_started" and line["generation"] <= fault["generation"]]
    hosts: Sequence[str] = started[-1]["nodes"] if started else ()
    named = [f"{node} ({hosts[node]})" if node < len(hosts) else f"{node}" for node in fault["nodes"]]
    where = f" on node {', '.join(named)}" if named else ""
    return f"{_ranks(fault)}{where}" if fault["ranks"] else where.strip() or "all ranks"


def _where(fault: Line) -> str:
    step = "before the first step" if fault["step"] is None else f"step {fault['step']}"
    return f"{step}, phase {fault['phase']}" if fault.get("phase") else step


def _logs(faults: Sequence[Line], agents: Collection[str]) -> list[str]:
    found: list[str] = []
    for fault in faults:
        found += [f"logs/g{fault['generation']}/node{node}.log" for node in fault["nodes"][:4]] if fault["ranks"] else []
        if fault["kind"] in ("hang", "stopped", "collective_timeout"):
            found.append(f"incidents/{fault['fault_id']}/")
        if fault["kind"] == "node_lost":  # an agent that has not started has no log of its own
            of_agents = [*(agent_log(Path(), node) for node in fault["nodes"]), step_log(Path(), STEP_OF_MANY)]
            found += [str(path) for path in of_agents if str(path) in agents]
    return list(dict.fromkeys(found))[-8:]


def _goes_on(checkpoint: int | None, own: OwnCheckpoint | None) -> str:
    """From where the same command does; of its own checkpoint the script itself finds out whether it is whole."""
    if own is not None and own.step >= (checkpoint or 0):
        return f"Then the same command goes on from what the script finds of its own: step {own.step}, if that checkpoint is whole."
    return f"Then the same command goes on {'from the start' if checkpoint is None else f'from step {checkpoint}'}."


def _advise(code: Exit, fault: Line | None, go_on: str) -> list[str]:
    """What one may try next."""
    if code is Exit.UNUSABLE:
        return ["Make room, or mend what the environment lacks.", go_on]
    if fault is None:
        return ["Look at the logs that are named above.", go_on]
    at = "the start-up" if fault["step"] is None else f"step {fault['step']}"
    if fault["kind"] in ("not_finite", "loss_spike"):
        return [
            "Older weights did not help: look for a learning rate that is too high (optimizer.lr, warm-up), too small a precision",
            "(train.precision), data that is no text, or a kernel that errs; train.guard says what counts as bad.",
            go_on,
        ]
    if fault.get("files"):
        return [f"Bring back what is missing or unreadable, {fault['files']}, or look at the file system that it is on.", go_on]
    match fault.get("class"):
        case "deterministic":
            return [f"The same will happen again, wherever it runs: change what {at} needs or does.", go_on]
        case "node":
            return [f"A machine is to blame, and not the program: take {_nodes(fault)} out of the job until it is mended.", go_on]
        case "transient":
            return ["Nothing seems broken for good, yet it came again and again: look at the network between the nodes.", go_on]
    if fault["kind"] == "exception":
        return [f"The program raised it, each time at the same place: mend the code, or the data that {at} reads.", go_on]
    left = _LEFT.match(fault["detail"]) if fault["kind"] == "exit" else None
    if left is not None and left[1] == "0":
        return [
            f"{_ranks(fault).capitalize()} ended well while others still needed it: all ranks must take the same number of steps.",
            "Look for data that ends earlier there, or a return or sys.exit that the others do not come to.",
            go_on,
        ]
    if left is not None:
        return [
            f"The program left with {left[0]} by itself, and nobody killed it: by sys.exit, os._exit or what a library calls.",
            "What it printed before is in the rank's log.",
            go_on,
        ]
    if fault["kind"] == "exit":
        return [
            f"Ranks ended without an exception at {at}: the kernel's log (dmesg) may name who killed them; where a library or",
            "a kernel crashed is said above, if Python could still say it. The rank's log has what it printed before.",
            go_on,
        ]
    if fault["kind"] == "node_lost":
        return [f"Take {_nodes(fault)} out of the job.", go_on]
    return [
        f"The stacks of all ranks are in the incident's folder: they say what {at} waits for. If it was no hang, and only",
        "takes long, raise `resilience.hang_floor_s`.",
        go_on,
    ]


def _nodes(fault: Line) -> str:
    return f"node {', '.join(map(str, fault['nodes']))}" if fault["nodes"] else "the node"


_VERDICTS = {
    "deterministic": "deterministic: the same will happen again, wherever it runs",
    "node": "node: a machine is not fit for the work",
    "transient": "transient: nothing is broken for good",
}


def _facts(found: Diagnosis) -> list[tuple[str, str]]:
    rows = [
        ("failure", found.failure),
        ("who", found.who),
        ("where", found.where),
        ("raised in", found.place),
        ("class", _VERDICTS.get(found.verdict or "", "")),
        ("checkpoint", "; ".join((*_saved(found), *found.left_out))),
    ]
    return [(name, text) for name, text in rows if text]


def _saved(found: Diagnosis) -> list[str]:
    """What there is to go on from. A script's own checkpoint is none of ours: nobody has looked whether it is whole."""
    ours, own = found.checkpoint, found.own
    if own is None:
        return ["none" if ours is None else f"step {ours} is the newest"]
    when = "" if own.t is None else f" at {_clock(own.t)}"
    told = [] if ours is None else [f"step {ours} is durable"]
    told.append(f"the script itself wrote step {own.step}{when}, to {own.path}")
    return [*told, "it may be incomplete if a rank ended while writing there again"]


def short(found: Diagnosis) -> str:
    """A few lines for the end of the output."""
    lines = [f"gave up: {found.what}" if found.code is Exit.GAVE_UP else found.what]
    lines += [f"  {name:<11}{text}" for name, text in _facts(found)]
    if found.traceback:
        traceback = found.traceback.splitlines()
        cut = ["  | ..."] if len(traceback) > TRACEBACK_LINES else []
        lines += [*cut, *(f"  | {head(line, LINE_CHARACTERS)}" for line in traceback[-TRACEBACK_LINES:])]
    done = [each.action for each in found.tried if each.action != "give up"]
    if done:
        counted = ", ".join(f"{action} x {done.count(action)}" for action in dict.fromkeys(done))
        lines.append(f"  {'tried':<11}{counted}")
    lines += [f"  {found.also}"] if found.also else []
    return "\n".join([*lines, *(f"  {line}" for line in found.advice)])


def page(found: Diagnosis) -> str:
    """The whole page."""
    how = "gave up" if found.code is Exit.GAVE_UP else "could not go on"
    parts = [f"# {found.name or 'The run'} {how} (exit {int(found.code)})", "", found.what, ""]
    parts += [f"- {name}: {text}" for name, text in _facts(found)]
    parts += [f"- {found.also}"] if found.also else []
    if found.traceback:
        title = "First traceback" if has_frames(found.traceback) else "What was seen"
        parts += ["", f"## {title}", "", "```", found.traceback, "```"]
    if found.tried:
        parts += ["", "## What was tried", "", *_table(found.tried)]
    parts += ["", "## Where the evidence lies", ""]
    parts += [f"- {path}" for path in found.logs] + ["- events.jsonl: every fault, action and recovery, one JSON object a line"]
    parts += ["", "## What to try next", "", *found.advice, ""]
    return "\n".join(parts)


def _clock(t: float) -> str:
    return time.strftime("%m-%d %H:%M:%S", time.localtime(t))


def _table(tried: Sequence[Tried]) -> list[str]:
    rows = [("time", "fault", "kind", "who", "step", "action", "what came of it")]
    for each in tried:
        step = "" if each.step is None else str(each.step)
        rows.append((_clock(each.t), each.fault_id, each.kind, each.who, step, each.action, each.outcome))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]

    def line(row: Sequence[str]) -> str:
        return f"| {' | '.join(text.ljust(width) for text, width in zip(row, widths, strict=True))} |"

    return [line(rows[0]), f"|{'|'.join('-' * (width + 2) for width in widths)}|", *map(line, rows[1:])]
