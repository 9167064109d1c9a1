"""What the disk process does once, when asked: fence, quarantine, bad nodes, chain, diagnosis, old logs. Each in its own thread."""

import asyncio
from pathlib import Path

from resilient.protocol.disk import (
    Answer,
    Call,
    Diagnose,
    PackLogs,
    QuarantineCheckpoints,
    RaiseDurableFence,
    RememberBadNodes,
    SeeToSuccessor,
)


def answered(call: Call, run_dir: str) -> Answer:
    """Do it, and say how it went. What is needed for it is imported only now."""
    from checkpoint.errors import CheckpointError
    from resilient.exits import ForeseenError
    from resilient.logs.archive import DamagedArchive

    try:
        return _do(call, Path(run_dir))
    except OSError as error:
        return Answer(call=call.call, error=str(error))
    except (CheckpointError, ForeseenError, DamagedArchive, ValueError) as error:
        return Answer(call=call.call, error=str(error))


def _do(call: Call, run_dir: Path) -> Answer:
    match call:
        case RaiseDurableFence():
            from checkpoint.fence import raise_fence
            from checkpoint.marked import must_be_there

            root = Path(call.root)
            must_be_there(root, *call.mark)
            raise_fence(root, call.generation, timeout_s=call.patience_s)
        case QuarantineCheckpoints():
            return _quarantine(call)
        case RememberBadNodes():
            from resilient.slurm import badnodes

            badnodes.remember(run_dir, call.reasons, now=call.now, for_s=call.for_s)
        case SeeToSuccessor():
            return Answer(call=call.call, text=asyncio.run(_see_to_successor(call, run_dir)))
        case PackLogs():
            from resilient.logs import packing

            packing.pack(run_dir)
        case Diagnose():
            return Answer(call=call.call, text=_diagnose(call, run_dir))
    return Answer(call=call.call)


def _quarantine(call: QuarantineCheckpoints) -> Answer:
    from checkpoint.quarantine import quarantine
    from resilient.recovery.rollback import InvalidationRule

    invalidated = [InvalidationRule(*each) for each in call.invalidated]
    renamed = quarantine(
        Path(call.root),
        lambda step, generation: any(each.covers(step, generation) for each in invalidated),
        "rolled-back",
        generation=call.generation,
    )
    return Answer(call=call.call, renamed=tuple((step, path.name) for step, path in renamed))


async def _see_to_successor(call: SeeToSuccessor, run_dir: Path) -> str:
    from resilient.exits import Exit
    from resilient.slurm.succession import Succession

    succession = Succession(run_dir, call.name)
    match call.duty:
        case "ensure":
            return await succession.ensure(call.job_id, call.max_jobs, call.patience_s)
        case "avoid_bad_nodes":
            await succession.avoid_bad_nodes()
        case "ended":
            await succession.ended(call.job_id, Exit(call.exit_code))
    return ""


def _diagnose(call: Diagnose, run_dir: Path) -> str:
    from resilient import diagnosis, entries, ledger
    from resilient.exits import Exit
    from resilient.logs.paths import DIRECTORY
    from resilient.past import record as past

    code = Exit(call.exit_code)
    known = past.read(run_dir)
    last_job = entries.events(ledger.read(run_dir / ledger.EVENTS, known.began_at))
    own = diagnosis.OwnCheckpoint(known.saved.step, known.saved.path, known.saved.t) if known.saved is not None else None
    agents = {str(path.relative_to(run_dir)) for path in (run_dir / DIRECTORY).glob("agent*.log")}
    found = diagnosis.diagnose(last_job, durable=known.durable, own=own, code=code, message=call.message, agents=agents)
    text = diagnosis.page(found)
    if call.traceback:
        text += f"\n## The defect\n\n```\n{call.traceback}\n```\n"
    path = run_dir / diagnosis.FILE
    path.write_text(text, encoding="utf-8")
    short = (
        diagnosis.short(found)
        if code is Exit.GAVE_UP and not call.traceback and found.failure and not found.alone
        else call.message
    )
    return f"{short}\nmore in {path}"
