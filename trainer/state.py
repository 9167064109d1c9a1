"""Everything that training goes on from, to and from a checkpoint.

Weights and the optimizer's moments are global arrays, layers stacked along a first dimension; random number generators are one
array over the ranks; the rest is a small mapping in the checkpoint's attributes.
"""

import functools
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError

import checkpoint
from checkpoint import agreement, fence
from resilient import worker
from trainer.model import GPT
from trainer.parallel import Ranks

WEIGHTS_ONLY = "weights_only"  # in a checkpoint's state: it has no optimizer, and training begins with a new one
LAST_WAIT_S = 20.0  # for memory that is still being copied to a slower tier

_LAYER = re.compile(r"blocks\.(\d+)\.(.+)")


@dataclass
class Progress:
    """How far training has come. The consumed samples are the whole state of the data loader.

    Attributes:
        losses: of the last steps, as many as the guard against spikes looks at.
        skipped: batches skipped in a row.
        updates: of the weights: one each step, but for batches that were skipped or left out.
    """

    step: int
    consumed_samples: int
    losses: list[float] = field(default_factory=list)
    skipped: int = 0
    updates: int = 0


@dataclass(frozen=True)
class _Known:
    """Arrays, and the tensors that they were made of, with the places of those in memory."""

    tensors: Sequence[torch.Tensor]
    where: Sequence[int]
    arrays: list[checkpoint.LocalShard]


_PROGRESS = TypeAdapter(Progress)


class TrainingState:
    """Model, optimizer and progress of one rank, saved and loaded as one."""

    def __init__(
        self,
        config: worker.Config,
        stages: Sequence[GPT],
        optimizer: torch.optim.Optimizer,
        context: worker.Context,
        ranks: Ranks,
    ) -> None:
        self._config = config
        self._stages = stages
        self._optimizer = optimizer
        self._context = context
        self._ranks = ranks
        self._root = config.checkpoint.tiers[-1].path
        session = context.session
        self._snapshots = checkpoint.Snapshots(session, settled=self._settled) if session is not None else None
        # Ranks with the same shard that share a node, which have a copy of it in the snapshots of each node; None: there is one.
        self._together = ranks.layout.together(self._snapshots.session.ranks) if self._snapshots is not None else None
        self._told: dict[str, int] = {}
        self._known: _Known | None = None
        self._as_json = config.model_dump(mode="json")
        self._clock: checkpoint.Clock | None = None
        self._saved_step: int | None = None
        self._untouched = False
        self._started = False
        self._generation = context.generation  # on whose behalf it saves
        self._identity = worker.identity(config)
        self.progress = Progress(0, 0)

    def start(self) -> None:
        """Make ready to save, once: before the first `save_if_due` or `save` that has something new to save."""
        if self._started:
            return
        self._started = True
        tier = self._config.checkpoint.tiers[-1]
        if self._snapshots is not None:
            with worker.phase("snapshot"):
                self._snapshots.start([*self.arrays(), *self._random_numbers(random_state())])
                self._snapshots.ready()
            if self._snapshots.on_gpu:
                snapshots = self._snapshots
                self._optimizer.register_step_pre_hook(lambda *_: snapshots.before_change())
            return
        self._generation = self._generation_of_fence()
        every_steps = self._config.checkpoint.every_steps if tier.every_steps is None else tier.every_steps
        every = checkpoint.Every(None if tier.every_s is not None else every_steps, tier.every_s)
        self._clock = checkpoint.Clock({tier.name: every}, checkpoint.mean_time_between_failures(0, 0.0), time.monotonic())

    def _generation_of_fence(self) -> int:
        """The generation of the tier's fence, which a supervisor before this run has raised and nobody raises now. Collective."""
        return agreement.Ranks(None).first(lambda: fence.newest_generation(self._root) or 0)

    def _settled(self, tier: str, every_steps: int) -> None:
        """So many steps apart are the snapshots of a tier by cost."""
        if self._told.get(tier) != every_steps:
            self._told[tier] = every_steps
            worker.report({"step": self.progress.step, "tier": tier, "every_steps": every_steps}, event="cadence")

    def passed_by(self) -> None:
        """The last step has left the weights as they were."""
        self._untouched = True

    def save_if_due(self) -> None:
        """Take a snapshot for the tiers that want one of this step."""
        step = self.progress.step
        if self._snapshots is not None:
            tiers = self._snapshots.due(step)
            # While batches are skipped the weights are those of the snapshot before, and that is what a roll-back wants.
            if tiers and (not self.progress.skipped or self._config.checkpoint.tiers[-1].name in tiers):
                self._snapshot(tiers)
        elif self._clock is not None:
            due = [bool(self._clock.due(step, time.monotonic()))]
            if self._clock.timed and self._context.world_size > 1:
                dist.broadcast_object_list(due, src=0)  # the first rank's clock decides for all
            if due[0]:
                self._save()

    def save(self) -> None:
        """Save this step for good: the last one of an attempt."""
        if self._snapshots is None:
            self._save()
            return
        if self._snapshots.left_out(self._saved_step == self.progress.step):
            self._snapshot(frozenset([self._config.checkpoint.tiers[-1].name]), wait_s=LAST_WAIT_S, again=1)

    def _snapshot(self, tiers: frozenset[str], wait_s: float = 0.0, *, again: int = 0) -> None:
        assert self._snapshots is not None
        with worker.phase("snapshot"):
            local_shards = [*self._known_arrays(), *self._random_numbers(random_state())]
            changed = self._saved_step is not None and self.progress.skipped == 0 and not self._untouched
            result = self._snapshots.take(
                self.progress.step,
                local_shards,
                self._small(),
                tiers,
                changed=changed,
                wait_s=wait_s,
                again=again,
                late=[True] * len(local_shards),  # nothing but the optimizer changes weights and moments
            )
        if result.copied:
            self._saved_step, self._untouched = self.progress.step, False

    def _save(self) -> None:
        """Save to the durable tier, together with all ranks, while they wait; tells the ledger."""
        tier = self._config.checkpoint.tiers[-1]
        if self._saved_step == self.progress.step:
            return
        with worker.phase("snapshot"):
            saved = checkpoint.save(
                self._root,
                self.progress.step,
                [*self.arrays(), *self._random_numbers(random_state())],
                self._small(),
                generation=self._generation,
                keep_last=3 if tier.keep_last == "auto" else tier.keep_last,
                keep_every=tier.keep_every,
            )
        self._saved_step = self.progress.step
        if self._clock is not None:
            self._clock.taken(frozenset([tier.name]), saved.write_s, time.monotonic())
        if self._context.rank == 0:
            where = {"step": saved.step, "tier": tier.name, "bytes": saved.bytes}
            worker.report({**where, "stall_s": saved.write_s, "write_s": saved.write_s}, event="snapshot")
            worker.report({**where, "files": saved.files}, event="committed")

    def resume(self, initialize: Callable[[], None]) -> None:
        """Load the newest good checkpoint, or where there is none call `initialize`.

        Raises:
            checkpoint.NoUsableCheckpoint: there are checkpoints, and all are damaged.
            checkpoint.CheckpointMismatch: they are of another model.
        """
        durable = self._config.checkpoint.tiers[-1].name

        def rejected(step: int, tier: str, reason: str) -> None:
            worker.report({"step": step, "tier": tier, "reason": reason}, event="checkpoint_rejected")

        numbers = torch.empty_like(random_state())
        arrays = self.arrays()

        def local_shards(state: Mapping[str, Any]) -> list[checkpoint.LocalShard]:
            if state.get(WEIGHTS_ONLY):
                return [each for each in arrays if each.array.startswith("model/")]
            return [*arrays, self._row(numbers, self._context.rank)] if state.get("layout") == self._layout() else arrays

        session = self._snapshots.session if self._snapshots is not None else None
        found = checkpoint.restore(
            self._root,
            local_shards,
            tier=durable,
            held=session.candidates if session is not None else (),
            on_reject=rejected,
            durable_step=session.durable_step if session is not None else 0,
        )
        if found is None:
            initialize()
        else:
            self._go_on(found.state, numbers)
            self._saved_step = found.step
        if self._context.rank == 0:
            worker.report({"step": self.progress.step, "tier": found.tier if found is not None else durable}, event="resumed")

    def _go_on(self, state: Mapping[str, Any], numbers: torch.Tensor) -> None:
        """Take over what is not in the arrays."""
        same_ranks = state.get("layout") == self._layout()
        names = [each.name for each in fields(Progress)]
        known = {"updates": state.get("step"), **{name: state[name] for name in names if name in state}}  # of older checkpoints
        try:
            self.progress = _PROGRESS.validate_python(known)
        except ValidationError as error:
            raise checkpoint.CheckpointMismatch(f"the checkpoint's state is not this trainer's: {error}") from error
        # Generators belong to ranks: on other ranks they start anew, and not where they started before.
        set_random_state(numbers) if same_ranks else seed_random(self._config.seed + self.progress.step, self._ranks, self._config)
        for moments in self._optimizer.state.values():
            moments["step"].fill_(float(self.progress.updates))

    def arrays(self) -> list[checkpoint.LocalShard]:
        """Everything that is saved of this rank, but its random numbers."""
        local_shards = []
        shape, peer = self._stages[0].shape, self._ranks.embedding_peer
        apart = {"apart": ("dp_replicate", self._together)} if self._together is not None else {}
        for model in self._stages:
            for local_name, parameter in model.named_parameters():
                name = model.global_name(local_name)
                array, stack = array_of(name, shape.layers)
                # A tied embedding that the pipeline has parted is there twice.
                twice = shape.tied and name == "embedding.weight" and peer is not None
                which: dict[str, Any] = {"replica": int(self._ranks.pp_rank > 0), "replicas": 2} if twice else {}
                which |= apart
                state = self._optimizer.state[parameter]
                local_shards.append(checkpoint.local_shard_of(f"model/{array}", parameter, stack=stack, **which))
                for moment in _moments(state):
                    local_shards.append(
                        checkpoint.local_shard_of(f"optimizer/{moment}/{array}", state[moment], stack=stack, **which)
                    )
        return local_shards

    def _known_arrays(self) -> list[checkpoint.LocalShard]:
        """`arrays`, made anew only where a tensor is another one by now: for small models that takes longer than the copy."""
        tensors = list(self._tensors())
        where = [getattr(tensor, "_local_tensor", tensor).data_ptr() for tensor in tensors]
        known = self._known
        if known is None or known.where != where or any(now is not then for now, then in zip(tensors, known.tensors, strict=True)):
            known = self._known = _Known(tensors, where, self.arrays())
        return known.arrays

    def _tensors(self) -> Iterator[torch.Tensor]:
        """Those that `arrays` are made of."""
        for model in self._stages:
            for parameter in model.parameters():
                yield parameter
                state = self._optimizer.state[parameter]
                for moment in _moments(state):
                    yield state[moment]

    def _random_numbers(self, numbers: torch.Tensor) -> list[checkpoint.LocalShard]:
        """This rank's random numbers; and where nodes hold the same of the state, those of the ranks that hold what this one does.

        Collective then, so that each of the nodes has all that the others had.
        """
        layout, together = self._ranks.layout, self._together
        if together is None or layout.dp_replicate == together:
            return [self._row(numbers, self._context.rank)]
        number, apart = self._ranks.dp_rank // layout.dp_shard, layout.dp_shard * layout.cp * layout.tp
        own = numbers.to(next(self._stages[0].parameters()).device)
        rows = [torch.empty_like(own) for _ in range(layout.dp_replicate)]
        dist.all_gather(rows, own, group=self._ranks.mesh.get_group("dp_replicate"))
        first = self._context.rank - number * apart
        copy, replica = divmod(number, together)
        held = {"replica": replica, "replicas": together, "copy": copy, "copies": layout.dp_replicate // together}
        return [self._row(row.cpu(), first + each * apart, **held) for each, row in enumerate(rows)]

    def _row(self, numbers: torch.Tensor, rank: int, **held: int) -> checkpoint.LocalShard:
        size = len(numbers)
        return checkpoint.LocalShard(
            "random/torch", (self._context.world_size, size), (rank, 0), numbers.unsqueeze(0), unit=(1, size), **held
        )

    def _layout(self) -> dict[str, Any]:
        layout = self._ranks.layout
        sizes = {name: getattr(layout, name) for name in ("world_size", "tp", "cp", "pp", "dp")}
        hybrid = {"dp_replicate": layout.dp_replicate} if layout.dp_replicate > 1 else {}
        return {**sizes, **hybrid, "random": len(random_state())}

    def _small(self) -> Mapping[str, Any]:
        return {
            **asdict(self.progress),
            "layout": self._layout(),
            "generation": self._context.generation,
            "config": self._as_json,
            **({"identity": self._identity} if self._identity is not None else {}),
            "versions": _versions(),
        }


def _moments(state: Mapping[str, torch.Tensor]) -> list[str]:
    """The names of what an optimizer keeps of a parameter, but the number of the step."""
    return [name for name in state if name != "step"]


@functools.cache
def _versions() -> Mapping[str, str]:
    """Read from files, and so once: a snapshot of every step must cost next to nothing."""
    return {name: version(name) for name in ("resilient", "torch", "zarr", "numpy")}


def array_of(name: str, layers: int) -> tuple[str, tuple[int, int] | None]:
    """The array that holds a parameter, and its (index, count) there: those of all layers are one array."""
    layer = _LAYER.fullmatch(name)
    return (f"blocks.{layer[2]}", (int(layer[1]), layers)) if layer else (name, None)


def seed_random(seed: int, ranks: Ranks, config: worker.Config) -> None:
    """Start this rank's generators: ranks that hold the same activations draw the same numbers, all others their own."""
    layout, parallel = ranks.layout, config.parallel
    number = (ranks.pp_rank * layout.dp + ranks.dp_rank) * layout.cp + ranks.cp_rank
    if parallel.sequence_parallel:
        number = number * layout.tp + ranks.tp_rank
    torch.manual_seed((seed * 1_000_003 + number) % 2**63)


def random_state() -> torch.Tensor:
    """State of this rank's generators as bytes: the CPU's, and behind it the GPU's where the rank computes on one."""
    states = [torch.get_rng_state()]
    if _on_gpu():
        states.append(torch.cuda.get_rng_state())
    return torch.cat(states)


def set_random_state(numbers: torch.Tensor) -> None:
    """Set what `random_state` gave."""
    length = len(torch.get_rng_state())
    torch.set_rng_state(numbers[:length].clone())
    if len(numbers) > length and _on_gpu():
        torch.cuda.set_rng_state(numbers[length:].clone())


def _on_gpu() -> bool:
    """Whether the rank computes on a GPU; to ask one that only is there would make a context on it."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
