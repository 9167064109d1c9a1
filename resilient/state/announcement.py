"""What the ranks of a script save: agreed on by all, announced to the snapshot daemons, and announced again when it changes.

Owns the arrays between two announcements. An announcement is collective, so every rank must come to it: after the first step they
all do; later, when optimizers keep other states, each rank finds that by itself and the ranks meet first (`meeting`); and where the
document of one rank grows, all come to know of it when they compare (`reviews`).
"""

import logging
import time
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any
from zlib import crc32

from torch.optim import Optimizer

import checkpoint
from checkpoint.agreement import Ranks as Peers
from resilient import worker
from resilient.state import arrays, documents, optimizers
from resilient.state.arrays import Arrays, Ranks, StateChangedShape
from resilient.state.documents import Documents
from resilient.state.fingerprint import Fingerprint
from resilient.state.meeting import all_come
from resilient.state.modules import ModelTensors
from resilient.state.optimizers import Table
from resilient.state.reviews import Reviews
from resilient.state.stepping import Stepping

log = logging.getLogger(__name__)

MEETING_S = 4.0  # for ranks that find the state changed at the same step; those that do not must not be taken for hanging
MEETINGS = 3  # without all ranks, and no more snapshots are taken
READY_S = 2.0  # for buffers of a new layout; training goes on without


class Announcement:
    """What is saved of this rank, as it was announced last.

    Attributes:
        about: what a snapshot's small state says of it, for whoever reads that.
        stepping: None where no GPU copies.
    """

    def __init__(
        self,
        *,
        snapshots: checkpoint.Snapshots,
        models: Sequence[ModelTensors],
        all_optimizers: Sequence[Optimizer],
        documents: Documents,
        peers: Peers,
        generation: int,
    ) -> None:
        self._snapshots, self._models, self._optimizers = snapshots, models, all_optimizers
        self._documents, self._peers, self._generation = documents, peers, generation
        self._group_sizes = self._present_group_sizes()
        self._incomplete_meetings = 0
        self._reviews = Reviews()
        self._own = False  # plain parameters differ from rank to rank, and each writes all of its own
        self._fingerprint: Fingerprint | None = None  # of what each rank writes a part of
        self.about: Mapping[str, Any] = {}
        self.stepping: Stepping | None = None

    def announce(self) -> None:
        """Announce what is saved, after the first step, when the optimizers have their states; waits for buffers. Collective.

        Raises StateChangedShape where ranks keep other states than others do; UnrecoverableError, on all ranks, where one of them
        has something that cannot be saved.
        """
        for model in self._models:
            for name in model.accept_added_names():
                log.warning("%s has come in the first step, and is not saved: make it before resilient.attach", name)
        try:
            self._announce()
        except ValueError as error:
            raise worker.UnrecoverableError(f"the state cannot be saved: {error}") from None
        self._snapshots.ready()

    def announce_changes(self, snapshot: int) -> bool:
        """Announce again where optimizers keep other states by now, as of layers that were frozen; whether a snapshot can be taken.

        Args:
            snapshot: its number, by which the ranks meet: how often one has waited here the others do not know.

        Raises StateChangedShape for what cannot be gone on from, or where not all ranks have changed at this step.
        """
        self._check_unchanged()
        if self._present_keys() == self._keys:
            return True
        with self._snapshots.waiting():
            come = all_come(f"attached/{self._generation}/{snapshot}", self._peers.count, MEETING_S)
        if not come:
            self._incomplete_meetings += 1
            if self._incomplete_meetings == MEETINGS:
                raise StateChangedShape("the optimizers of some ranks keep states by now that those of others do not")
            return False
        self._incomplete_meetings = 0
        self._announce_again()
        return True

    def make_room(self, step: int, *, surely: bool, given_up: bool) -> None:
        """Announce again where the document of a rank has outgrown half of its row, or plain parameters have come to differ.

        All ranks call it at the same steps.

        Args:
            surely: the ranks compare now, and not only when that is due; the same on all.
            given_up: this rank takes no more snapshots, so that none is whole, and nobody needs more room.

        Raises StateChangedShape, on all ranks, for what cannot be gone on from.
        """
        if not (surely or self._reviews.due(step)):
            return
        now, size_bytes, unchanged, fingerprint = time.monotonic(), 0, False, None
        if not given_up:
            try:
                self._check_unchanged()
                self._arrays.local_shards()  # a tensor that has changed its shape would be announced with the new one
                fingerprint = self._fingerprint.read() if self._fingerprint is not None else None
                size_bytes, unchanged = len(self._documents.capture()), self._present_keys() == self._keys
            except (TypeError, ValueError, StateChangedShape):
                pass  # told when this rank takes its snapshot, and until then the others need not wait
        with self._snapshots.waiting():
            answers = self._peers.all((self._reviews.proposal(step, now), size_bytes, unchanged, fingerprint))
        self._reviews.settle(step, now, [proposal for proposal, *_ in answers])
        largest, differ = max(size for _, size, _, _ in answers), len({found for *_, found in answers}) > 1
        outgrown = not self._documents.may_grow(largest)
        if (outgrown or differ) and all(same for _, _, same, _ in answers):
            if outgrown:
                log.info("the state of a rank beside its arrays has %d bytes by now, and gets more room", largest)
            self._announce_again()

    def local_shards(self) -> list[checkpoint.LocalShard]:
        """What a snapshot is taken of now. Raises StateChangedShape, also for what has come and cannot be saved; TooLong."""
        try:
            text = self._documents.capture()
        except (TypeError, ValueError) as error:
            raise StateChangedShape(f"{error}") from error
        found = self._arrays.local_shards()  # first: where that gives up, nobody makes room for what is too long
        return [*found, *self._of_this_rank(text)]

    def _of_this_rank(self, document: bytes) -> list[checkpoint.LocalShard]:
        """What comes behind the arrays. Raises TooLong."""
        rank, count = self._peers.rank, self._peers.count
        rows = [self._documents.local_shard(document, rank, count)]
        return rows if self._fingerprint is None else [*rows, self._fingerprint.local_shard(rank, count)]

    def _check_unchanged(self) -> None:
        """Raises StateChangedShape where something has come that is not saved, whatever was announced."""
        for model in self._models:
            if (unexpected := model.unexpected()) is not None:
                raise StateChangedShape(unexpected)
        for number, (now, before) in enumerate(zip(self._present_group_sizes(), self._group_sizes, strict=True)):
            if now != before:
                raise StateChangedShape(f"optimizer {number} has other groups of parameters: make them before resilient.attach")

    def _check_forms(self) -> None:
        """Raises StateChangedShape where a restart, whose `attach` finds the tensors as they were, could not read what is saved."""
        for model in self._models:
            if (changed := model.changed_form()) is not None:
                raise StateChangedShape(changed)

    def _present_group_sizes(self) -> list[list[int]]:
        return [[len(group["params"]) for group in each.param_groups] for each in self._optimizers]

    def _present_keys(self) -> list[list[tuple[int, list[str]]]]:
        return [optimizers.keys_of(each) for each in self._optimizers]

    def _announce_again(self) -> None:
        with self._snapshots.waiting():
            try:
                self._announce()
            except (ValueError, checkpoint.CheckpointError) as error:
                raise StateChangedShape(f"{error}") from error
            self._snapshots.ready(READY_S)

    def _announce(self) -> None:
        peers = self._peers
        tables: list[Table] = []
        wrong, mine, document, forms = "", None, b"", [form for model in self._models for form in model.plain_forms()]
        try:
            if not self.about:
                self._check_forms()
            tables += (optimizers.table_of(each) for each in self._optimizers)
            document = self._documents.capture()
            found = Arrays(self._models, self._optimizers, tables, Ranks(peers.rank, peers.count))
            found.local_shards()  # what is refused there on one rank must be known to all before they meet again
            mine = (
                found.meshes(),
                found.sum_of_bits(),
                documents.capacity(len(document)),
                self._tables_json(tables),
                crc32(repr(forms).encode()),
            )
        except (TypeError, ValueError, StateChangedShape) as error:
            wrong = str(error)
        answers = peers.all((wrong, mine))
        if any(why for why, _ in answers):
            raise ValueError(next(why for why, _ in answers if why))
        everyone = [each for _, each in answers if each is not None]
        assert mine is not None
        if any(each[4] != mine[4] for each in everyone):
            raise ValueError(_difference(peers.all(forms)))
        if any(each[3] != mine[3] for each in everyone):
            raise StateChangedShape("the optimizers of the ranks keep states of different parameters")
        own = self._own or any(each[1] != mine[1] for each in everyone)
        if own and not self._own:
            log.warning(
                "plain parameters differ from rank to rank%s, and are saved for each%s: only as many ranks can go on from that",
                *((" by now", " from this step on") if self.about else ("", "")),
            )
        self._own = own
        shares = arrays.shares(mine[0], [each[0] for each in everyone])
        self._arrays = Arrays(self._models, self._optimizers, tables, Ranks(peers.rank, peers.count, shares, own))
        self._fingerprint = None if own or peers.count == 1 else Fingerprint(self._arrays.alike())
        self._keys = self._present_keys()
        size = max(each[2] for each in everyone)
        self._documents.set_capacity(size)
        self.about = {
            "ranks": peers.count,
            "document_bytes": size,
            "own_parameters": own,
            "fingerprint": self._fingerprint is not None,
            "tables": mine[3],
        }
        shards = self._arrays.local_shards()
        local_shards = [*shards, *self._of_this_rank(document)]
        self._snapshots.start(local_shards)
        if self._snapshots.on_gpu:
            stepped = [*self._arrays.stepped(), *[False] * (len(local_shards) - len(shards))]
            if self.stepping is None:
                self.stepping = Stepping(self._snapshots, self._optimizers, local_shards, stepped)
            else:
                self.stepping.announced(local_shards, stepped)

    def _tables_json(self, tables: Sequence[Table]) -> Any:
        counts = [len(optimizers.parameters_of(each)) for each in self._optimizers]
        return [optimizers.as_json(table, count) for table, count in zip(tables, counts, strict=True)]


def _difference(forms: Sequence[Sequence[str]]) -> str:
    """What is wrong where ranks have other tensors than rank 0. Args: forms: of all ranks."""
    rank, other = next((rank, each) for rank, each in enumerate(forms) if each != forms[0])
    ours, its = next(pair for pair in zip_longest(forms[0], other, fillvalue="none") if pair[0] != pair[1])
    return (
        f"the models of the ranks differ: rank 0 has {ours} where rank {rank} has {its}. All ranks need the same modules; what "
        "only some of them have, as the stages of a pipeline, must be made on all, or the script saves it by itself, without attach"
    )
