"""Everything of a rank that is saved in arrays, as local shards, kept from step to step.

Owns which array a tensor is, and whose blocks of it are whose: a DTensor lies as its placements say; a plain parameter is the same
on all ranks, which share the writing of it; a plain buffer is each rank's own, a row of an array over the ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from checkpoint.local_shard import LocalShard, local_shard_of
from resilient.state import optimizers, stacking
from resilient.state.dense import reason_against
from resilient.state.fingerprint import BITS
from resilient.state.modules import MODEL, ModelTensors, node_name
from resilient.state.optimizers import LIKE, NUMBER, Entry, Table
from resilient.state.stacking import Kind, Place

Mesh = tuple[int, ...]
"""The ranks of a device mesh, ascending."""


class StateChangedShape(Exception):
    """What is saved is not what was announced: parameters, buffers or states of an optimizer have gone, or changed their shape."""


@dataclass(frozen=True)
class Ranks:
    """Who this rank is, and who else holds what it holds.

    Attributes:
        rank: to read, the row of those that were written.
        count: of the ranks that write, or have written.
        shares: by mesh, this one's index among the meshes that hold the same tensors, and how many they are; only to write.
        own_parameters: plain parameters differ from rank to rank, and are rows as buffers are.
    """

    rank: int
    count: int
    shares: Mapping[Mesh, tuple[int, int]] = field(default_factory=dict)
    own_parameters: bool = False


class Arrays:
    """The arrays of models and optimizers.

    Args:
        models: the model's tensors, and those of modules beside it.
        all_optimizers: with, in `tables`, what each of them keeps.

    Raises ValueError where an optimizer has parameters that no model has; StateChangedShape where a tensor of a model has gone.
    """

    def __init__(
        self, models: Sequence[ModelTensors], all_optimizers: Sequence[Optimizer], tables: Sequence[Table], ranks: Ranks
    ) -> None:
        self._models, self._ranks = models, ranks
        self._vectors: list[_Vector] = []
        self._held: list[_Held] = []
        for model in models:
            model.reshard()
        slots = [slot for model in models for slot in model.slots]
        for slot in slots:
            _present(slot.tensor)
        kinds = {slot.name: _kind(slot.tensor()) for slot in slots if not self._is_row(slot.tensor(), slot.is_buffer)}
        self._places = stacking.places(kinds)
        names = {id(slot.tensor()): slot.name for slot in slots if not slot.is_buffer}
        optimized = {id(parameter) for optimizer in all_optimizers for parameter in optimizers.parameters_of(optimizer)}
        for slot in slots:
            row, stepped = self._is_row(slot.tensor(), slot.is_buffer), id(slot.tensor()) in optimized
            self._hold(slot.tensor, "", slot.name, self._places.get(slot.name), row=row, stepped=stepped)
        for number, (optimizer, table) in enumerate(zip(all_optimizers, tables, strict=True)):
            self._hold_states(optimizer, table, names, "optimizer" if len(tables) == 1 else f"optimizer.{number}")

    def _is_row(self, tensor: torch.Tensor, is_buffer: bool) -> bool:
        return not isinstance(tensor, DTensor) and (is_buffer or self._ranks.own_parameters)

    def _hold_states(self, optimizer: Optimizer, table: Table, names: Mapping[int, str], prefix: str) -> None:
        parameters = optimizers.parameters_of(optimizer)
        missing = [number for number, parameter in enumerate(parameters) if id(parameter) not in names]
        if missing:
            raise ValueError(
                f"parameter {missing[0]} of {prefix} {tuple(parameters[missing[0]].shape)} belongs to no module that is saved; "
                "name its module in extra={...}"
            )
        named = [names[id(parameter)] for parameter in parameters]
        for entry in table:
            if entry.form == NUMBER:
                taken = [vector.name for vector in self._vectors]
                name = next(each for each in (entry.key, *(f"{entry.key}.{again}" for again in range(1, 99))) if each not in taken)
                vector = _Vector(name, optimizer, [parameters[number] for number in entry.parameters], entry)
                self._vectors.append(vector)
                self._hold(vector.get, f"{prefix}.numbers/", node_name(name), None, row=self._ranks.own_parameters)
                continue
            whole = self._whole_stacks({named[number] for number in entry.parameters}) if entry.form == LIKE else {}
            for number in entry.parameters:
                get = partial(optimizers.state_tensor, optimizer, parameters[number], entry.key)
                row = self._is_row(get(), False)
                place = None if row else whole.get(named[number])
                self._hold(get, f"{prefix}/{node_name(entry.key)}/", named[number], place, row=row, stepped=True)

    def _whole_stacks(self, names: set[str]) -> dict[str, Place]:
        """The places of parameters whose stacks are whole."""
        held: dict[str, int] = {}
        for name in names:
            if name in self._places:
                held[self._places[name][0]] = held.get(self._places[name][0], 0) + 1
        found: dict[str, Place] = {}
        for name in names:
            array, stack = self._places.get(name, (name, None))
            if stack is not None and held[array] == stack[1]:
                found[name] = (array, stack)
        return found

    def _hold(self, get: "Get", group: str, name: str, place: Place | None, *, row: bool, stepped: bool = False) -> None:
        array, stack = place or (name, None)
        if group:  # states of the model's own parameters are called as these are
            array, name = array.removeprefix(MODEL), name.removeprefix(MODEL)
        make = partial(self._row, f"ranks/{group}{name}") if row else partial(self._block, f"{group}{array}", stack)
        self._held.append(_Held(group + name, get, make, by_rank=row, stepped=stepped))

    def _row(self, name: str, tensor: torch.Tensor) -> LocalShard:
        """A tensor that is this rank's own: a row of an array over the ranks."""
        shape, ranks = tuple(tensor.shape), self._ranks
        unit = (1, *(max(1, length) for length in shape))
        return LocalShard(name, (ranks.count, *shape), (ranks.rank, *(0 for _ in shape)), tensor.detach().unsqueeze(0), unit)

    def _block(self, name: str, stack: tuple[int, int] | None, tensor: torch.Tensor) -> LocalShard:
        """A tensor that is, or is a part of, what all ranks hold together."""
        ranks = self._ranks
        if not isinstance(tensor, DTensor):
            return local_shard_of(name, tensor, stack=stack, replica=ranks.rank, replicas=ranks.count)
        replica, replicas = ranks.shares.get(_mesh(tensor), (0, 1))
        return local_shard_of(name, tensor, stack=stack, replica=replica, replicas=replicas)

    # -- the tensors ---------------------------------------------------------------------------------------------------

    def local_shards(self) -> list[LocalShard]:
        """All local shards, with what the tensors are now. Raises StateChangedShape."""
        with torch.no_grad():
            for vector in self._vectors:
                vector.gather()
            try:
                return [held.local_shard() for held in self._held]
            except _NotSharded:
                for model in self._models:
                    model.reshard()
                return [held.local_shard() for held in self._held]

    def stepped(self) -> list[bool]:
        """Of each local shard, whether it is a parameter that an optimizer changes, or a state of one."""
        return [held.stepped for held in self._held]

    def spread(self) -> None:
        """Hand numbers that were read to the optimizers."""
        with torch.no_grad():
            for vector in self._vectors:
                vector.spread()

    def meshes(self) -> list[Mesh]:
        """The device meshes of this rank's DTensors, in the order of the tensors, which is the same on all ranks."""
        tensors = (held.get() for held in self._held)
        return list(dict.fromkeys(_mesh(tensor) for tensor in tensors if isinstance(tensor, DTensor)))

    def alike(self) -> list["Get"]:
        """How the tensors are found that are to be the same on all ranks, each of which writes a part of them."""
        return [held.get for held in self._held if not held.by_rank and not isinstance(held.get(), DTensor)]

    def sum_of_bits(self) -> int:
        """Of what is to be the same on all ranks, which it is where this is."""
        with torch.no_grad():
            for vector in self._vectors:
                vector.gather()
            return sum(sum_of_bits(get()) for get in self.alike())


def sum_of_bits(tensor: torch.Tensor) -> int:
    """By which it is compared with another one of its shape."""
    if not tensor.numel():
        return 0
    real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    bits = real.contiguous().view(-1).view(BITS[real.element_size()])
    return int(bits.sum(dtype=torch.int64))


Get = Callable[[], torch.Tensor]


class _NotSharded(Exception):
    """A parameter that FSDP shards is whole at the moment."""


@dataclass(eq=False)
class _Held:
    """A tensor that is saved: how it is found, how its local shard is made, and what that came to last.

    Attributes:
        name: in messages.
        stepped: it is an optimizer's parameter or state.
    """

    name: str
    get: Get
    make: Callable[[torch.Tensor], LocalShard]
    by_rank: bool
    stepped: bool
    tensor: torch.Tensor | None = None
    pointer: int = -1
    shard: LocalShard | None = None

    def local_shard(self) -> LocalShard:
        """Its local shard, made anew where the tensor is another one or lies elsewhere. Raises StateChangedShape."""
        tensor = _present(self.get)
        if tensor is self.tensor and _pointer(tensor) == self.pointer and self.shard is not None:
            return self.shard
        before = self.shard
        if isinstance(self.tensor, DTensor) and not isinstance(tensor, DTensor):
            raise _NotSharded
        if (why := reason_against(tensor)) is not None:
            raise StateChangedShape(f"{self.name} is {why}")
        made = self.make(tensor)
        if before is not None:
            expected, found = [(each.shape, each.offset, each.extent, each.dtype) for each in (before, made)]
            if expected != found:
                raise StateChangedShape(f"{made.array} was {before.dtype} {before.shape}, and is {made.dtype} {made.shape}")
        self.tensor, self.pointer, self.shard = tensor, _pointer(tensor), made
        return made


class _Vector:
    """The numbers of one kind that an optimizer keeps, one for each parameter, as one tensor."""

    def __init__(self, name: str, optimizer: Optimizer, parameters: Sequence[torch.Tensor], entry: Entry) -> None:
        self.name, self._optimizer, self._parameters, self._key = name, optimizer, parameters, entry.key
        self._values = torch.empty(
            len(parameters), dtype=getattr(torch, entry.dtype), device="cpu" if entry.on_host else parameters[0].device
        )

    def get(self) -> torch.Tensor:
        return self._values

    def _numbers(self) -> list[torch.Tensor]:
        state, key = self._optimizer.state, self._key
        try:
            return [optimizers.number_of(state[parameter][key]) for parameter in self._parameters]
        except KeyError:
            raise StateChangedShape(f"an optimizer's {key} is gone") from None

    def gather(self) -> None:
        """Fill it from the optimizer."""
        try:
            torch.stack(self._numbers(), out=self._values)
        except (RuntimeError, TypeError) as error:
            raise StateChangedShape(f"an optimizer's {self._key}: {error}") from None

    def spread(self) -> None:
        """Fill the optimizer from it."""
        for target, value in zip(self._numbers(), self._values, strict=True):
            target.copy_(value)


def _present(get: Get) -> torch.Tensor:
    """What is there now. Raises StateChangedShape where no tensor is."""
    try:
        tensor = get()
    except (KeyError, IndexError) as error:
        raise StateChangedShape(f"{error} is gone") from None
    if not isinstance(tensor, torch.Tensor):
        raise StateChangedShape(f"a tensor is a {type(tensor).__name__} now")
    return tensor


def _pointer(tensor: torch.Tensor) -> int:
    """Where it lies. Without gradients, to_local() is the very tensor that a DTensor holds."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).data_ptr()


def _kind(tensor: torch.Tensor) -> Kind:
    return tuple(tensor.shape), str(tensor.dtype)


def _mesh(tensor: DTensor) -> Mesh:
    return tuple(sorted(int(rank) for rank in tensor.device_mesh.mesh.flatten().tolist()))


def shares(mine: Sequence[Mesh], everyone: Sequence[Sequence[Mesh]]) -> dict[Mesh, tuple[int, int]]:
    """For each mesh of this rank its index among those that hold the same tensors, and how many they are.

    Args:
        everyone: the meshes of all ranks; those at the same place hold the same.
    """
    found = {}
    for place, mesh in enumerate(mine):
        alike = sorted({each[place] for each in everyone if len(each) > place})
        found[mesh] = (alike.index(mesh), len(alike))
    return found
