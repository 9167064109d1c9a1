"""What operations of torch allocate: the bytes of all storages that are alive at one time."""

import weakref
from typing import Any

from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Counts the storages that operations make while it is active; views of others are none, and a freed one has no bytes.

    Attributes:
        peak_bytes: the most that were alive after an operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._alive: dict[int, weakref.ref[UntypedStorage]] = {}

    @property
    def live_bytes(self) -> int:
        """Of those that are alive."""
        return sum(storage.nbytes() for storage in (each() for each in list(self._alive.values())) if storage is not None)

    def add(self, tensor: Tensor) -> None:
        """Count a tensor's storage."""
        tensor = getattr(tensor, "_local_tensor", tensor)
        if tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            key = storage._cdata
            self._alive[key] = weakref.ref(storage, lambda dead: self._forget(key, dead))
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _forget(self, key: int, dead: "weakref.ref[UntypedStorage]") -> None:
        if self._alive.get(key) is dead:
            del self._alive[key]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not any(each.alias_info for each in function._schema.returns):
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self.add(leaf)
        return result
