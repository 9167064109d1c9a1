"""Faults from inside: what a rank of a campaign that allows it does to itself when an order asks for it.

Runs in the workers. An order is a file of the run directory, so that it reaches ranks on all nodes; it is carried out once, by
whoever makes the mark beside it, and never again when the same step is computed anew. Whoever gave it renews it for as long as
it is wanted: one that outlives its injector, as where a node dies with all that would have taken it back, is not carried out.
"""

import contextlib
import json
import logging
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from chaos.injectors.context import Follower, RankContext
from checkpoint.typed import built
from resilient import worker

log = logging.getLogger(__name__)

DIRECTORY = "chaos"
RENEW_S = 1.0
STALE_S = 30.0  # an order that was not renewed for so long is nobody's any more


@dataclass(frozen=True)
class Order:
    """What a rank is asked to do. `step`: the one at which, 1-based; None: at the next one. `phase`: None: the fault's own."""

    id: str
    fault: str
    rank: int
    step: int | None = None
    phase: str | None = None
    params: dict[str, Any] = field(default_factory=dict)


def give(run_dir: Path, order: Order) -> None:
    """Leave an order for a rank."""
    directory = run_dir / DIRECTORY
    directory.mkdir(exist_ok=True)
    new = directory / f".{order.id}.new"
    new.write_text(json.dumps(asdict(order)))
    new.rename(directory / f"{order.id}.order")


def renew(run_dir: Path, order_id: str) -> None:
    """An order is still wanted; where that cannot be written, or the order is not there any more, nothing is done."""
    with contextlib.suppress(OSError):
        os.utime(run_dir / DIRECTORY / f"{order_id}.order")


def _age_s(path: Path) -> float:
    """Seconds since an order was renewed, by the file system's clock: those of hosts differ. Raises OSError."""
    now = path.with_name(f".{path.name}.{secrets.token_hex(4)}.now")
    try:
        now.touch()
        now_s = now.stat().st_mtime
        with path.open("rb") as file:  # what is opened is not what a client of NFS remembers
            return now_s - os.fstat(file.fileno()).st_mtime
    finally:
        now.unlink(missing_ok=True)


def withdraw(run_dir: Path, order_id: str) -> bool:
    """Take an order back; whether nobody has carried it out, and nobody will."""
    path = run_dir / DIRECTORY / f"{order_id}.order"
    withdrawn = _create_marker(path.with_suffix(".taken"), {})
    path.unlink(missing_ok=True)
    return withdrawn


def _create_marker(path: Path, what: Mapping[str, object]) -> bool:
    """Be the one who makes a mark, which is whole or not there; False: it was made already."""
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    try:
        new.write_text(json.dumps(what))
        path.hardlink_to(new)
    except FileExistsError:
        return False
    finally:
        new.unlink(missing_ok=True)
    return True


def _tell_failed(path: Path, error: Exception) -> None:
    """Put into a mark that nothing was done."""
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    try:
        new.write_text(json.dumps({"failed": str(error)}))
        new.replace(path)
    except OSError as problem:
        log.warning("%s cannot be told: %s", error, problem)
    finally:
        new.unlink(missing_ok=True)


def taken(run_dir: Path, order_id: str) -> dict[str, Any] | None:
    """When and where an order was carried out (`t`, `rank`, `pid`, `step`, `generation`); None if it was not, yet.

    `failed` alone: the rank could not, for this reason.
    """
    try:
        found: dict[str, Any] = json.loads((run_dir / DIRECTORY / f"{order_id}.taken").read_text())
    except (FileNotFoundError, ValueError):
        return None
    return found or None


def arm(context: worker.Context) -> None:
    """Look out for orders from now on; called in every rank before its entry point."""
    if context.run_dir is not None:
        worker.watch(_OrderWatcher(context, context.run_dir / DIRECTORY))


def _order(path: Path) -> Order | None:
    """The order in a file; None where it was withdrawn at this moment, or is none."""
    try:
        order = msgspec.json.decode(path.read_bytes(), type=built(Order))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        log.warning("%s is no order: %s", path, error)
        return None
    return order if order.id == path.stem else None


class _OrderWatcher:
    """Called at every phase and every finished step."""

    def __init__(self, context: worker.Context, directory: Path) -> None:
        self._context, self._directory = context, directory
        self._names: frozenset[str] = frozenset()
        self._orders: list[Order] = []
        self._finished: int | None = None
        self._followers: list[Follower] = []

    def __call__(self, phase: str | None, step: int) -> None:
        if phase is None:
            self._finished = step
        self._followers = [each for each in self._followers if each(phase, step if phase is None else (self._finished or 0) + 1)]
        self._read()
        for order in list(self._orders):
            if self._due(order, phase):
                self._orders.remove(order)
                self._carry_out(order, phase or "")

    def _read(self) -> None:
        try:
            names = frozenset(entry.name for entry in os.scandir(self._directory))
        except FileNotFoundError:
            return
        if names == self._names:
            return
        self._names, self._orders = names, []
        for name in sorted(names):
            path = self._directory / name
            if path.suffix == ".order" and path.with_suffix(".taken").name not in names:
                order = _order(path)
                self._orders += [order] if order is not None and order.rank == self._context.rank else []

    def _due(self, order: Order, phase: str | None) -> bool:
        from chaos.faults import kind

        if phase != (order.phase or getattr(kind(order.fault), "when", "step")):
            return False
        return self._finished is not None and self._finished + 1 >= (order.step or 0)

    def _carry_out(self, order: Order, phase: str) -> None:
        from chaos.fault import CannotInject, Inside
        from chaos.faults import kind

        step = (self._finished or 0) + 1
        marker = {"t": time.time(), "rank": order.rank, "pid": os.getpid(), "step": step, "generation": self._context.generation}
        path = self._directory / f"{order.id}.order"
        try:
            if (age_s := _age_s(path)) > STALE_S:
                log.warning("order %s is not carried out: nobody has renewed it for %.0f s", order.id, age_s)
                withdraw(self._directory.parent, order.id)
                return
            if not _create_marker(path.with_suffix(".taken"), marker):
                return
        except FileNotFoundError:
            return  # it was withdrawn at this moment
        except OSError as error:
            log.warning("order %s is not carried out, since that cannot be told: %s", order.id, error)
            return
        fault = kind(order.fault)(**order.params)
        assert isinstance(fault, Inside)
        run_dir = self._directory.parent
        context = RankContext(order.rank, self._context.world_size, step, phase, run_dir, order.id, self._followers.append)
        try:
            fault.strike(context)
        except CannotInject as error:
            log.warning("order %s is not carried out: %s", order.id, error)
            _tell_failed(path.with_suffix(".taken"), error)
