"""Snapshots: a worker copies its state into a buffer and computes on.

Owns the worker's side: the copy into a leased buffer, and what is reported of it over `checkpoint.tiers.daemon_link`. Training
stands still for the copy alone, and a GPU copies while it computes. Nothing here waits for a disk, and nothing that goes wrong here
stops training: a snapshot for which there is no buffer is left out.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from checkpoint import points, shard_manifest, state
from checkpoint.agreement import Ranks
from checkpoint.device import Device, device_of
from checkpoint.local_shard import LocalShard
from checkpoint.saving import Layout, agree, spec_of
from checkpoint.state import JSON
from checkpoint.tiers import blueprint, session
from checkpoint.tiers.affordable import MOST_STEPS, Affordable
from checkpoint.tiers.arrivals import Arrivals
from checkpoint.tiers.cadence import Clock
from checkpoint.tiers.daemon_link import DaemonLink
from checkpoint.tiers.lease import LINK, STATE, attempt_of
from checkpoint.tiers.leases import Leases
from checkpoint.tiers.mapped import WritePlan
from checkpoint.tiers.mappings import Mappings
from checkpoint.tiers.session import Session
from checkpoint.worker_news import BufferBroken, LayoutAnnounced, LayoutWriteFailed, StateCopied, StepSkipped

READY_S = 60.0
AT_ONCE_BYTES = 256 << 20  # of a rank whose buffers are waited for also where a GPU copies: they are there in a moment
RAM = Path("/dev/shm")


@dataclass(frozen=True)
class SnapshotResult:
    """What became of a snapshot on this rank.

    Attributes:
        step: that it is of.
        copied: the bytes are the daemon's; otherwise there was no buffer to copy them into.
        size_bytes: that this rank has copied.
        stall_s: for which training stood still; not what a GPU was held back for its copies later.
    """

    step: int
    copied: bool
    size_bytes: int
    stall_s: float


def all_have_it(reported: Sequence[tuple[bool, int, int]]) -> bool:
    """Whether all ranks have copied a step, those of each node into one buffer.

    Args:
        reported: by rank, whether it has copied it, the first rank of its node, and the lease that it has used last.
    """
    lease_of_node = {node: lease for _, node, lease in reported}
    return all(copied and lease == lease_of_node[node] for copied, node, lease in reported)


class Snapshots:
    """Takes snapshots of one rank. All ranks make one, and call its methods alike.

    Args:
        path: of this node's session.
        group: one that carries objects (gloo does); None for the default group.
        settled: told on the first rank, of a tier by cost, how many steps apart its snapshots are from now on.

    Raises OSError, ValueError where the session cannot be read.
    """

    def __init__(
        self, path: Path, *, group: dist.ProcessGroup | None = None, settled: Callable[[str, int], None] | None = None
    ) -> None:
        self.session: Session = session.read(path)
        self._group = group
        self._settled = settled
        self._ranks = Ranks(group)
        self._local = self._ranks.rank - self.session.first_rank
        self._daemon = DaemonLink(self.session.socket)
        self._leases = Leases(self.session, self._ranks.rank, self._daemon)
        self._clock: Clock | None = None
        self._affordable: dict[str, Affordable] = {}
        self._clock_of_copies = time.perf_counter
        self._asked_t = 0.0  # by that clock: when a step was asked about
        self._size_bytes = 0  # of this rank's tensors
        self._mappings: Mappings | None = None
        self._announcement: Callable[[], LayoutAnnounced] | None = None  # that is to be made; raises OSError
        self._failure_reported = False  # the daemon knows that it cannot be
        self._announcement_delivered = True  # the daemon has taken that which was made last
        self._everywhere = False  # all ranks had made theirs when they started
        self._device: Device | None = None
        self._arrivals: Arrivals | None = None  # of what a GPU copies
        self._cost_s: float | None = None  # of a snapshot whose whole cost a GPU has yet to tell
        self._digest = ""  # of the arrays that were announced last

    def start(self, local_shards: Sequence[LocalShard], device: Device | None = None) -> None:
        """Announce what will be copied, or what it is from now on; the daemon makes buffers for it meanwhile. Collective.

        Where there is no room for the announcement, it is tried again by each `take`, which leaves its snapshot out until then.

        Args:
            device: the GPU that tensors are on; None: that which they say they are on.

        Raises CheckpointError where the ranks' local shards do not fit together.
        """
        first = self._mappings is None
        if self._mappings is None:
            self._clock = Clock(self.session.every, self.session.mtbf_s, time.monotonic())
            self._affordable = {name: Affordable(every.cost) for name, every in self.session.every.items() if every.cost}
            self._device = device or device_of([each.data for each in local_shards])
            if self._device is None:  # this thread copies by itself; what else runs here is left out
                self._clock_of_copies = time.thread_time
            else:
                self._arrivals = Arrivals(self._device)
        else:
            self.finish()
            with self._leases.stopped():
                self._mappings.close()
        self._size_bytes = sum(each.data.nbytes for each in local_shards)
        layout = agree(self._ranks, [spec_of(local_shard) for local_shard in local_shards])
        ordinals = layout.ordinals
        write_plans = [WritePlan.of(each, layout.arrays[ordinals[each.array]], ordinals[each.array]) for each in local_shards]
        slots: dict[str, list[int]] = {}
        for write_plan in write_plans:
            for shard, slot, count in write_plan.chunk_runs:
                slots.setdefault(shard.path, []).extend(range(slot, slot + count))
        place = self._place(slots) if any(each.copies > 1 for each in local_shards) else None
        self._mappings = Mappings(self.session.directory / LINK, write_plans, self._device)
        self._digest = blueprint.arrays_digest(layout.arrays)
        self._leases.announced(self._digest, anew=not first)
        self._announcement = partial(self._written, layout, slots, place)
        self._everywhere = all(self._ranks.all(self._announced()))

    def _announced(self) -> bool:
        """Whether this rank has announced what it will copy, by now."""
        if self._announcement is None:
            return True
        try:
            self._announcement_delivered = self._daemon.report(self._announcement())
        except OSError as error:
            if not self._failure_reported:
                generation, number = self.session.generation, error.errno
                self._daemon.report(
                    LayoutWriteFailed(generation=generation, rank=self._ranks.rank, reason=f"{error}", errno=number)
                )
            self._failure_reported = True
            return False
        self._announcement, self._failure_reported = None, False
        return True

    def _written(self, layout: Layout, slots: Mapping[str, Sequence[int]], place: tuple[int, int] | None) -> LayoutAnnounced:
        """Write down what this rank will copy. Raises OSError."""
        directory, generation, rank = self.session.directory, self.session.generation, self._ranks.rank
        if self._local == 0 and not blueprint.arrays_path(directory, self._digest).exists():
            blueprint.write_arrays(directory, layout.arrays, layout.documents)
        blueprint.write_slots(directory, rank, generation, self._digest, slots, place)
        return LayoutAnnounced(generation=generation, rank=rank, digest=self._digest)

    def _place(self, slots: Mapping[str, Sequence[int]]) -> tuple[int, int] | None:
        """Number of this node's shard, and how many there are, where several nodes hold the same. Collective."""
        digests: list[str] = self._ranks.all(blueprint.slots_digest(slots))
        return blueprint.places(digests, self.session.ranks)[self.session.node]

    def due(self, step: int) -> frozenset[str]:
        """The tiers that want a snapshot of this step. Collective where a tier goes by time, or now and then by cost."""
        assert self._clock is not None, "start comes first"
        wanted = self._clock.due(step, time.monotonic())
        if self._clock.timed and self._ranks.count > 1:
            shared: list[Any] = [wanted]
            dist.broadcast_object_list(shared, group=self._group, group_src=0)
            wanted = shared[0]
        if self._cost_s is not None and self._device is not None and self._affordable:
            self._costs(self._cost_s + self._device.held_s())
        wanted |= self._affordable_at(step)
        self._asked_t = self._clock_of_copies()
        return wanted

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """What is done in here, between `due` and the end of `take`, is no part of what a snapshot costs. Not within another."""
        clock = self._clock_of_copies
        began = clock()
        try:
            yield
        finally:
            self._asked_t += clock() - began

    def _affordable_at(self, step: int) -> frozenset[str]:
        """The tiers by cost that want one."""
        for name, affordable in self._affordable.items():
            if affordable.asked(step, time.monotonic()):
                # Where there was no room in RAM, buffers are on a disk, and snapshots are for slower tiers alone.
                proposal = affordable.proposal() if self._in_ram() else (MOST_STEPS, MOST_STEPS)
                affordable.settle(step, self._ranks.all(proposal))
                if self._ranks.rank == 0 and self._settled is not None:
                    self._settled(name, affordable.every)
        return frozenset(name for name, affordable in self._affordable.items() if affordable.due(step))

    def _in_ram(self) -> bool:
        try:
            return (self.session.directory / LINK).stat().st_dev == RAM.stat().st_dev
        except OSError:
            return False

    def left_out(self, copied: bool) -> bool:
        """Whether some rank has left a step out, and all must take it `again`. Waits for what a GPU is copying. Collective.

        So it is where ranks of a node have copied it into different buffers, none of which is whole: one of them with a lease that
        another had used for the step before.

        Args:
            copied: whether this rank has it.
        """
        self.finish()
        self._daemon.redeliver(wait=True)
        first, used = self.session.first_rank, self._leases.used
        reported = self._ranks.all((copied and self._daemon.has_all, first, used))
        if all_have_it(reported):
            return False
        latest = max(used for _, _, used in reported[first : first + self.session.ranks])
        if used < latest:  # the ranks of a node use the same buffer: this one does without that which another has used
            self._leases.pass_on(latest)
        return True

    def take(
        self,
        step: int,
        local_shards: Sequence[LocalShard],
        small: Mapping[str, JSON],
        tiers: frozenset[str],
        *,
        changed: bool = True,
        wait_s: float = 0.0,
        again: int = 0,
        late: Sequence[bool] = (),
    ) -> SnapshotResult:
        """Copy the local shards' tensors; they may change again as soon as this returns, but for those that are `late`.

        A GPU copies by itself, and what it is asked to do with other tensors meanwhile comes behind that.

        Args:
            step: that they are of.
            local_shards: as they were in `start`, with whatever tensors hold the values now.
            small: the rest of the state, the same on all ranks.
            tiers: that are to have it.
            changed: whether anything but `small` has changed since the last snapshot; equal bytes are refused where it has.
            wait_s: how long to wait for a buffer, and then for its report; without one, a snapshot that finds no buffer waits a
                little, see `Clock.patience_s`, and is left out.
            again: how often the step was taken before, and left out by some rank; see `left_out`.
            late: of each local shard, whether it is on a GPU that is told `before_change` before it changes; none: none is.
        """
        assert self._mappings is not None, "start comes first"
        began = time.perf_counter()
        generation, rank = self.session.generation, self._ranks.rank
        self._daemon.redeliver(wait=wait_s > 0)
        attempt = attempt_of(step, again)
        index = self._acquire(wait_s or self._patience_s(tiers), attempt) if self._announced() else None
        if index is None:
            self._leases.leave_out(attempt)
            delivered = self._announcement_delivered and not self._leases.layout_changed  # the daemon may not have got the message
            if self._announcement is None and not delivered:
                news = LayoutAnnounced(generation=generation, rank=rank, digest=self._digest)
                self._announcement_delivered = self._daemon.report(news, may_be_lost=True)
            wants = tuple(sorted(tiers))
            skipped = StepSkipped(generation=generation, rank=rank, step=step, again=again, wants=wants)
            self._daemon.report(skipped, may_be_lost=not again)
            return SnapshotResult(step, False, 0, time.perf_counter() - began)
        self.finish()  # nothing to wait for: a lease follows when all ranks have reported, unless a daemon has been started anew
        try:
            buffer = self._mappings.buffer(index)
            points.reached("snapshot_acquired")
            with suppress(FileNotFoundError):
                (buffer.directory / shard_manifest.NAME).unlink()
            mark = buffer.copy(local_shards, late)
            if self._local == 0:
                (buffer.directory / STATE).write_bytes(json.dumps(state.plain(small), ensure_ascii=False).encode())
        except OSError as error:  # somebody has deleted it, or there is no room for a page
            number, why = error.errno, f"{error}"
            self._daemon.report_lease(
                BufferBroken(generation=generation, rank=rank, step=step, lease=self._leases.used, reason=why, errno=number)
            )
            return SnapshotResult(step, False, 0, time.perf_counter() - began)
        stall_s = time.perf_counter() - began
        copied = StateCopied(
            generation=generation,
            rank=rank,
            step=step,
            lease=self._leases.used,
            stall_s=stall_s,
            wants=tuple(sorted(tiers)),
            changed=changed,
            size_bytes=buffer.size_bytes,
            again=again,
        )
        if self._arrivals is None:
            self._copied(self._mappings, copied)
        else:
            self._arrivals.expect(mark, partial(self._copied, self._mappings, copied))
        if wait_s:
            self.finish()
            stall_s = time.perf_counter() - began
        if self._clock is not None:
            self._clock.taken(tiers, stall_s, time.monotonic())
        self._cost_s = self._clock_of_copies() - self._asked_t
        if self._device is None:
            self._costs(self._cost_s)
        return SnapshotResult(step, True, buffer.size_bytes, stall_s)

    def leave_out(self, step: int, tiers: frozenset[str], *, again: int = 0, why: str = "") -> None:
        """This rank has nothing to copy for a step of which others may `take` a snapshot: no buffer waits for it.

        Args:
            tiers, again: as for `take`.
            why: for the ledger.
        """
        self.finish()
        self._daemon.redeliver()
        generation, rank = self.session.generation, self._ranks.rank
        wants, reason = tuple(sorted(tiers)), f"rank {rank} has left it out" + (f": {why:.300}" if why else "")
        skipped = StepSkipped(generation=generation, rank=rank, step=step, again=again, wants=wants, reason=reason)
        self._daemon.report(skipped, may_be_lost=not again)  # before the others, who do not know why
        self._leases.leave_out(attempt_of(step, again))
        self._leases.pass_what_others_use()

    def _copied(self, mappings: Mappings, news: StateCopied) -> None:
        """The bytes are there: the buffer is the daemon's from now on."""
        mappings.arrived()
        points.reached("snapshot_copied")
        self._daemon.report_lease(news)
        points.reached("snapshot_reported")

    def _costs(self, cost_s: float) -> None:
        """Training stood still for so long for the last snapshot."""
        self._cost_s = None
        for affordable in self._affordable.values():
            affordable.taken(cost_s)

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU copies while training goes on, so that there is something to be `late`."""
        return self._device is not None

    @property
    def recording(self) -> bool:
        """Whether what the GPU is asked to do is recorded in a graph, so that nobody tells `before_change` when it is done."""
        return self._device is not None and self._device.recording()

    def before_change(self) -> None:
        """The GPU is about to be asked, on this thread's stream, to change what is `late`: it does that behind the copy."""
        if self._arrivals is not None and not self.recording:
            self._arrivals.before_change()

    def finish(self) -> None:
        """Wait until what was copied is reported. Raises RuntimeError where the GPU has failed."""
        if self._arrivals is not None:
            self._arrivals.wait()

    def ready(self, patience_s: float = READY_S) -> bool:
        """Wait until there are buffers, and touch their pages, so that the first snapshots are as fast as the others.

        Where a GPU copies, pages are also locked. Of many gigabytes that takes seconds, and goes on while training does, which
        takes no snapshots meanwhile. Returns whether buffers are ready by now.
        """
        assert self._mappings is not None, "start comes first"
        leased = partial(self._leases.look, patience_s)
        if not self._everywhere:
            return False
        if self._device is None or self._size_bytes <= AT_ONCE_BYTES:
            return self._mappings.map_all(leased)
        self._mappings.start_mapping_all(leased)
        return False

    def close(self) -> None:
        """Give back what is open; what was copied is the daemon's."""
        if self._arrivals is not None:
            self._arrivals.close()
            self._arrivals = None
        if self._mappings is not None:
            self._mappings.close()
        self._daemon.close()

    def _acquire(self, wait_s: float, attempt: int) -> int | None:
        """The buffer for the next snapshot, whose lease is used from now on; None where none is leased or mapped in time."""
        with self.waiting():
            until = time.monotonic() + wait_s
            mapped = self._mappings is not None and self._mappings.done_within(wait_s)
            return self._leases.acquire(attempt, max(0.0, until - time.monotonic())) if mapped else None

    def _patience_s(self, tiers: frozenset[str]) -> float:
        return 0.0 if self._clock is None else self._clock.patience_s(tiers, time.monotonic())
