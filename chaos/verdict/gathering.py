"""Gathers what a verdict is made of: from the run directories of a campaign and its reference run, and from their machines.

Owns all the reading; nothing is decided here. The hosts of a run are inspected by a command of the same kind on each of them.
"""

import json
import logging
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chaos import faults
from chaos.verdict import machine, record
from chaos.verdict.leftovers import files, processes
from chaos.verdict.matching import Line
from chaos.verdict.observation import Checked, JobRun, Observation, Weights
from resilient import ledger
from resilient.account import account
from resilient.config import Config, load
from resilient.imports import shadowing

if TYPE_CHECKING:
    import numpy as np

log = logging.getLogger(__name__)

Hosts = Mapping[str, Sequence[str]]
"""By name of a host, the command that runs another one there: of a lab, or `srun --overlap --nodelist=n2`; nothing: here."""

ON_THIS_ONE: Hosts = {"": ()}

INSPECT_S = 120.0


def places(config: Config) -> list[Path]:
    """The directories of a run: mounts that concern them must be as they were."""
    return [config.run_dir, *(tier.path for tier in config.checkpoint.tiers if isinstance(tier.path, Path))]


def inspect(where: Sequence[Path], hosts: Hosts = ON_THIS_ONE) -> dict[str, machine.State]:
    """How each host is set up. Call it before anything is broken, and give it to `observe`.

    A host that cannot be inspected, as one that a job has lost, is missing: nothing can be said of it afterwards either.

    Args:
        where: the `places` of the run.
    """
    found: dict[str, machine.State] = {}
    for host, prefix in hosts.items():
        try:
            found[host] = _asked(prefix, "chaos.verdict.machine", where) if prefix else machine.inspect(where)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            log.warning("%s cannot be inspected, and is left out of the verdict: %s", host, _reason(error))
    return found


def observe(
    run_dir: Path,
    jobs: Sequence[JobRun],
    before: Mapping[str, machine.State],
    *,
    experiment: str,
    injections: Sequence[record.Injection] | None = None,
    left_out: Mapping[str, str] | None = None,
    seed: int = 0,
    reference: Path | None = None,
    tolerance: float = 0.0,
    wall_s: float = 0.0,
    hosts: Hosts = ON_THIS_ONE,
) -> Observation:
    """All that is known of a campaign that is over, or, without jobs, of one that goes on.

    Args:
        jobs: of a campaign that is over. Of one that goes on, checkpoints and machines are not looked at: they are in use.
        before: as `inspect` found it.
        injections: those of this experiment; None: all that the run directory tells of, which others may have made before.
        left_out: of the plan, with the reasons.
        reference: run directory of the same campaign without faults.
    """
    config = load(run_dir / "config.yaml", [])
    injections = record.read(run_dir) if injections is None else record.in_order(injections)
    events = list(ledger.read_events(run_dir / ledger.EVENTS))
    metrics = _metrics(run_dir)
    return Observation(
        experiment=experiment,
        seed=seed,
        target_step=config.train.steps,
        injections=injections,
        expected={each.id: faults.kind(each.fault)(**each.params).expects() for each in injections},
        events=events,
        metrics=metrics,
        jobs=jobs,
        account=account(events, metrics),
        reference=None if reference is None else _metrics(reference),
        weights=None if reference is None else weights(run_dir, reference),
        checkpoints=checkpoints(run_dir) if jobs else [],
        left=left(run_dir, places(config), before, hosts) if jobs else {},
        tolerance=tolerance,
        wall_s=wall_s,
        left_out=left_out or {},
    )


def _metrics(run_dir: Path) -> list[Line]:
    return [line for line in ledger.read_metrics(run_dir / ledger.METRICS) if "step" in line]


def weights(run_dir: Path, reference: Path) -> Weights | None:
    """The newest checkpoints of both, compared number by number; None where neither run has one."""
    ours, theirs = (max(_durable(each), default=None) for each in (run_dir, reference))
    if ours is None and theirs is None:
        return None
    if ours is None or theirs is None:
        return Weights(("every array: only one of both runs has a checkpoint",), float("inf"))
    from checkpoint.errors import DamagedCheckpoint
    from checkpoint.tools.diff import Comparison

    try:
        found = Comparison(ours[1], theirs[1]).run()
    except DamagedCheckpoint as error:
        return Weights((f"every array: {error}",), float("inf"))
    bad = [each for each in found.arrays if not each.bit_equal]
    alone = [
        *found.only_a,
        *found.only_b,
        *(each.name for each in bad if each.shapes[0] != each.shapes[1] or each.nan_a != each.nan_b),
    ]
    largest = float("inf") if alone else max((_distance(ours[1], theirs[1], each.name) for each in bad), default=0.0)
    return Weights((*found.only_a, *found.only_b, *(each.name for each in bad)), largest)


def _distance(one: Path, other: Path, name: str) -> float:
    """How far an array is from another, in lengths of the longer one. Bytes, as the state of a generator is, have no distance."""
    import numpy as np

    a, b = _numbers(one, name), _numbers(other, name)
    if a is None or b is None:
        return 0.0
    longer = max(float(np.linalg.norm(a)), float(np.linalg.norm(b)))
    return float(np.linalg.norm(a - b)) / longer if longer else 0.0


def _numbers(root: Path, name: str) -> "np.ndarray[Any, np.dtype[np.float64]] | None":
    """An array of a checkpoint, whatever its type is called in the files; None if it is of bytes."""
    import numpy as np
    import torch
    import zarr

    from checkpoint.elements import BITS_OF

    array = zarr.open_array(root / name, mode="r")  # a group relies on an `assert` of Zarr's, which `python -O` leaves out
    data, kind = np.asarray(array), array.attrs.get(BITS_OF)
    if kind is not None:
        return torch.from_numpy(data).view(getattr(torch, str(kind))).to(torch.float64).numpy()
    return None if data.dtype == np.uint8 else data.astype(np.float64)


def checkpoints(run_dir: Path) -> list[Checked]:
    """Every committed checkpoint of the durable tier, each byte read."""
    from checkpoint.errors import DamagedCheckpoint
    from checkpoint.verification import verify

    found = []
    for step, path in sorted(_durable(run_dir)):
        damage = ""
        try:
            verify(path)
        except DamagedCheckpoint as error:
            damage = error.reason
        found.append(Checked(str(path), step, damage))
    return found


def _durable(run_dir: Path) -> list[tuple[int, Path]]:
    from checkpoint.tools.locations import locations

    return [(each.step, each.path) for each in locations(run_dir) if each.tier is None or each.tier.durable]


# -- the machines ------------------------------------------------------------------------------------------------------


def left(run_dir: Path, where: Sequence[Path], before: Mapping[str, machine.State], hosts: Hosts) -> dict[str, list[str]]:
    """What is left on the hosts of a run, or changed; one that cannot be inspected any more counts as changed."""
    found: dict[str, list[str]] = {"processes": [], "files": [], "machine": []}
    for host, prefix in ((host, prefix) for host, prefix in hosts.items() if host in before):
        name = f"{host}: " if host else ""
        try:
            now = _inspect(run_dir, where, prefix)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            found["machine"].append(f"{name}cannot be inspected: {_reason(error)}")
            continue
        changed = machine.changes(before[host], now["machine"])
        for what, lines in (("processes", now["processes"]), ("files", now["files"]), ("machine", changed)):
            found[what] += [f"{name}{line}" for line in lines]
    return found


def _inspect(run_dir: Path, where: Sequence[Path], prefix: Sequence[str]) -> dict[str, Any]:
    if not prefix:
        return {"processes": processes(run_dir), "files": files(run_dir), "machine": machine.inspect(where)}
    return _asked(prefix, "chaos.verdict.leftovers", [run_dir, *where])


def _reason(error: Exception) -> str:
    """What is wrong with a host, in a line: the last one of a command that failed there."""
    lines = (error.stderr or "").strip().splitlines() if isinstance(error, subprocess.CalledProcessError) else []
    return lines[-1] if lines else str(error)


def _asked(prefix: Sequence[str], module: str, words: Sequence[Path]) -> dict[str, Any]:
    command = [*prefix, *shadowing.running(module), *map(str, words)]
    completed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSPECT_S)
    found: dict[str, Any] = json.loads(completed.stdout)
    return found
