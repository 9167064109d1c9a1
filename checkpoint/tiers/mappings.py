"""The buffers of a node in a worker's process: each is mapped when it is first used, or all of them ahead.

Owns the thread that maps ahead. Mapping many gigabytes takes seconds, on a GPU also for locking their pages; training goes on
meanwhile, and takes no snapshots.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from checkpoint.device import Device
from checkpoint.tiers.lease import PREFIX, buffer_path, index_of, layout_of
from checkpoint.tiers.mapped import MappedBuffer, Replaced, WritePlan

log = logging.getLogger(__name__)


class Mappings:
    """For one rank.

    Args:
        root: directory of the buffers.
        write_plans: what the rank writes there.
        device: the GPU that tensors are copied from; None: they are on the CPU.
    """

    def __init__(self, root: Path, write_plans: Sequence[WritePlan], device: Device | None) -> None:
        self._root, self._write_plans, self._device = root, write_plans, device
        self._buffers: dict[int, MappedBuffer] = {}
        self._replaced = Replaced()
        self._ahead: threading.Thread | None = None  # until it ends the buffers are its own

    def buffer(self, index: int) -> MappedBuffer:
        """A buffer, mapped; anew where the daemon has made it anew. Raises OSError."""
        path = buffer_path(self._root, index)
        buffer = self._buffers.get(index)
        if buffer is None or not buffer.is_at(path):
            if buffer is not None:
                buffer.close()
            buffer = self._buffers[index] = MappedBuffer(path, self._write_plans, self._device, self._replaced)
        return buffer

    def arrived(self) -> None:
        """What was copied last is there: tensors that are replaced each time are not held until their buffer is used again."""
        for buffer in self._buffers.values():
            buffer.let_go(self._replaced.numbers)

    def map_all(self, leased: Callable[[], int | None]) -> bool:
        """Map all buffers of the present layout, and touch their pages; whether that was done.

        Args:
            leased: gives the index of one of them, which it waits for; None: there is none.
        """
        try:
            index = leased()
            if index is None:
                return False
            layout = layout_of(buffer_path(self._root, index))
            for path in sorted(self._root.glob(f"{PREFIX}*")):
                if layout_of(path) == layout:  # others hold what workers of another layout have left
                    self.buffer(index_of(path))
        except (OSError, RuntimeError) as error:  # deleted, or the GPU refuses: the next snapshot finds that out for itself
            log.warning("a buffer for snapshots could not be mapped: %s", error)
            return False
        return True

    def start_mapping_all(self, leased: Callable[[], int | None]) -> None:
        """The same in a thread; see `done_within`."""
        self._ahead = threading.Thread(target=self._map_beside, args=(leased,), name="snapshot-buffers", daemon=True)
        self._ahead.start()

    def _map_beside(self, leased: Callable[[], int | None]) -> None:
        if self._device is not None:
            self._device.beside_recordings()  # training may record a graph meanwhile
        self.map_all(leased)

    def done_within(self, wait_s: float) -> bool:
        """Whether nothing is being mapped (any more), so that a buffer may be used."""
        if self._ahead is not None:
            self._ahead.join(wait_s)
            if self._ahead.is_alive():
                return False
            self._ahead = None
        return True

    def close(self) -> None:
        """Unmap everything, once nothing is being mapped."""
        if self._ahead is not None:
            self._ahead.join()
        for buffer in self._buffers.values():
            buffer.close()
        self._buffers = {}
