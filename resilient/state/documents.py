"""What is saved of a rank beside its arrays: schedulers, random numbers, the position in the data, and what a script gives.

Owns the *document* of a rank: JSON, in a row of bytes of an array over the ranks. Of its parts some are each rank's own, and the
others mean the same on any number of ranks, if all ranks had the same.
"""

import json
from collections import Counter, OrderedDict
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer

from checkpoint.local_shard import LocalShard
from resilient.state import optimizers, randomness
from resilient.state.encoding import decode, encode
from resilient.state.modules import ModelTensors
from resilient.state.position import Position
from resilient.state.restored import Restoring

ARRAY = "ranks/state"
LEAST_BYTES = 1 << 14
_LENGTH_BYTES = 8
_OWN = ("random", "loader", "trained", "own")
_KEPT = (dict, OrderedDict, Counter, list, tuple, torch.Size)  # or as good as kept


class TooLong(Exception):
    """A document has grown beyond its row."""


@runtime_checkable
class HasOwn(Protocol):
    """A part of `extra` of which something is each rank's own, and need not be alike on all of them."""

    def own_state(self) -> Mapping[str, Any]: ...

    def load_own_state(self, state: Mapping[str, Any], *, same: bool) -> None:
        """After `load_state_dict`. Args: same: it is this rank's; else that of the first rank of as many as there were."""
        ...


class Documents:
    """The document of this rank.

    Args:
        extra: a mapping from names to modules, things with `state_dict`, generators, or plain values; or one such thing. What is
            each rank's own of a `HasOwn` among them is kept beside it.
        modules: the modules among them and the model, by the prefix of their names.

    Attributes:
        trained: which parameters of each module were, in the document that was restored; None if it does not say.
    """

    def __init__(
        self,
        *,
        modules: Sequence[ModelTensors],
        all_optimizers: Sequence[Optimizer],
        schedulers: Sequence[Any],
        extra: Any,
        position: Position,
    ) -> None:
        self.trained: Sequence[str] | None = None
        self._modules, self._optimizers, self._schedulers = modules, all_optimizers, schedulers
        self._extra, self._position = extra, position
        self._row = torch.zeros(0, dtype=torch.uint8)

    def capture(self) -> bytes:
        """The document now. Raises TypeError, ValueError for what cannot be saved."""
        found = {
            "random": encode(randomness.capture()),
            "loader": encode(self._position.capture(), "loader"),
            "schedulers": [encode(each.state_dict(), f"scheduler {number}") for number, each in enumerate(self._schedulers)],
            "extra": self._captured_extra(),
            "own": {name: encode(each.own_state(), f"extra[{name!r}]") for name, each in self._with_own()},
            "trained": [each.trained() for each in self._modules],
            "modules": [encode(each.rest(), "model") for each in self._modules],
            "optimizers": [
                encode(optimizers.other_states(each), f"optimizer {number}.state") for number, each in enumerate(self._optimizers)
            ],
        }
        return json.dumps(found, separators=(",", ":")).encode()

    def check(self) -> None:
        """Raises TypeError, ValueError for what cannot be saved, or would come back as something else."""
        self.capture()
        for name, value in self._extra.items() if isinstance(self._extra, Mapping) else ():
            if not isinstance(value, Module) and _captured(value) is value:
                _must_come_back(value, f"extra[{name!r}]", outermost=True)

    def _captured_extra(self) -> Any:
        extra = self._extra
        if not isinstance(extra, Mapping):
            return None if extra is None or isinstance(extra, Module) else encode(_captured(extra), "extra")
        return {
            name: encode(_captured(value), f"extra[{name!r}]") for name, value in extra.items() if not isinstance(value, Module)
        }

    def _with_own(self) -> list[tuple[str, HasOwn]]:
        extra = self._extra
        return [(name, each) for name, each in extra.items() if isinstance(each, HasOwn)] if isinstance(extra, Mapping) else []

    def may_grow(self, size_bytes: int) -> bool:
        """Whether a document of this size leaves half of its row for what may come."""
        return 2 * (_LENGTH_BYTES + size_bytes) <= len(self._row)

    def set_capacity(self, size_bytes: int) -> None:
        """Give the row so many bytes."""
        self._row = torch.zeros(size_bytes, dtype=torch.uint8)

    def local_shard(self, document: bytes, rank: int, count: int) -> LocalShard:
        """The row with a document in it. Raises TooLong."""
        size = len(self._row)
        if _LENGTH_BYTES + len(document) > size:
            raise TooLong(
                f"the state of a rank beside its arrays has {len(document)} bytes, and there is room for {size}; "
                f"the largest part is {_largest(document)}"
            )
        text = len(document).to_bytes(_LENGTH_BYTES, "little") + document
        self._row[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return LocalShard(ARRAY, (count, size), (rank, 0), self._row.unsqueeze(0), (1, size))

    def restore(self, rows: torch.Tensor, count: int, *, same: bool) -> Mapping[str, Any]:
        """Go on from what was saved; returns the state of the random numbers, or nothing where they are other ranks'.

        Args:
            rows: (1, capacity), this rank's; or (ranks that wrote, capacity).
            count: of the ranks.
            same: as many ranks wrote it.

        Raises ValueError where they do not fit this script, or what is each rank's own was written by another number of ranks.
        """
        saved = [_document(row) for row in rows]
        if not same:
            _check_alike(saved)
        try:
            self._restore_shared(saved[0])
            for name, each in self._with_own():
                each.load_own_state(decode(saved[0].get("own", {}).get(name, {}), self._device()), same=same)
            self.trained = saved[0].get("trained")
            self._position.restore([decode(each["loader"]) for each in saved], count, same=same)
            return decode(saved[0]["random"]) if same else {}
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the checkpoint's state is not this script's: {error!r}") from error

    def _restore_shared(self, found: Mapping[str, Any]) -> None:
        device = self._device()
        for name, wanted in (("schedulers", self._schedulers), ("modules", self._modules), ("optimizers", self._optimizers)):
            if len(found[name]) != len(wanted):
                raise ValueError(f"the checkpoint has {len(found[name])} {name}, and this script {len(wanted)}")
        for scheduler, state in zip(self._schedulers, found["schedulers"], strict=True):
            scheduler.load_state_dict(decode(state, device))
        for module, state in zip(self._modules, found["modules"], strict=True):
            module.load_rest(decode(state, device))
        for optimizer, state in zip(self._optimizers, found["optimizers"], strict=True):
            optimizers.set_other_states(optimizer, decode(state, device))
        self._restore_extra(found["extra"], device)

    def _device(self) -> torch.device:
        """Of what the models have; the host's memory if all of them are there."""
        devices = (slot.tensor().device for each in self._modules for slot in each.slots)
        return next((each for each in devices if each.type != "cpu"), torch.device("cpu"))

    def _restore_extra(self, found: Any, device: torch.device) -> None:
        extra = self._extra
        tensors = [slot.tensor() for each in self._modules for slot in each.slots]
        restoring = Restoring(extra, [each.to_local() if isinstance(each, DTensor) else each for each in tensors])
        if not isinstance(extra, Mapping):
            if found is not None:
                restoring.restored(extra, decode(found, device))
            return
        for name, state in (found or {}).items():
            value = restoring.restored(extra.get(name), decode(state, device))
            if value is not extra.get(name):
                if not isinstance(extra, MutableMapping):
                    raise ValueError(
                        f"extra is a {type(extra).__name__}, which cannot be changed, and {name} in it is no object with a state"
                    )
                extra[name] = value


def capacity(size_bytes: int) -> int:
    """Room for a document that has this size now, and may grow."""
    wanted = max(LEAST_BYTES, 4 * (size_bytes + _LENGTH_BYTES))
    return 1 << (wanted - 1).bit_length()


def _largest(document: bytes) -> str:
    """The name and the size of what a document is mostly made of."""
    found = json.loads(document)
    extra = found.pop("extra")
    parts = {**found, **{f"extra[{name!r}]": value for name, value in extra.items()}} if isinstance(extra, dict) else found
    sizes = {name: len(json.dumps(value, separators=(",", ":"))) for name, value in parts.items()}
    name = max(sizes, key=lambda each: sizes[each])
    return f"{name:.100} with {sizes[name]} bytes"


def _captured(value: Any) -> Any:
    generator = randomness.generator_state(value)
    if generator is not None:
        return generator
    return value.state_dict() if hasattr(value, "state_dict") else value


def _must_come_back(value: Any, where: str, *, outermost: bool = False) -> None:
    """Raises TypeError where something in a value is of a class that JSON does not keep; the outermost one is there to restore."""
    kind, plain = type(value), next((each for each in (Mapping, list, tuple) if isinstance(value, each)), None)
    if plain is None:
        return
    restored = outermost and (isinstance(value, MutableMapping) or hasattr(value, "_make"))
    if kind not in _KEPT and not restored:
        name = "dict" if plain is Mapping else plain.__name__
        raise TypeError(f"{where:.200} is a {kind.__module__}.{kind.__qualname__}, and would come back as a {name}: save that")
    for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
        _must_come_back(each, f"{where}[{key!r}]")


def _document(row: torch.Tensor) -> Mapping[str, Any]:
    data = row.numpy().tobytes()
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    try:
        found = json.loads(data[_LENGTH_BYTES : _LENGTH_BYTES + length])
    except ValueError as error:
        raise ValueError(f"the state of a rank is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError("the state of a rank is no JSON object")
    return found


def _check_alike(everyone: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError where ranks had different values of what should be the same."""
    first = everyone[0]
    for rank, other in enumerate(everyone):
        for name in first:
            if name not in _OWN and other.get(name) != first[name]:
                raise ValueError(
                    f"{name} of rank 0 and of rank {rank} were different when they were saved by {len(everyone)} ranks, so there "
                    "is no state for another number of ranks"
                )
