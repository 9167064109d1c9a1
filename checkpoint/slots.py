"""Slots in memory as they lie in a shard file: chunk, checksum, zeros up to the next page.

Owns what is written behind chunks, and the check of it. Touches no file. Needs no NumPy, so that the daemon starts without it.
"""

import struct
from functools import lru_cache

import crc32c

from checkpoint import crc
from checkpoint.layout import CRC_BYTES, ArrayInfo

RUN_BYTES = 2 << 20
"""Laid out or checked, and written or read, at once: it is still in the processor's cache when it is needed again."""


def seal(array: ArrayInfo, slots: memoryview) -> list[int]:
    """Put its crc32c and zeros behind every chunk; return the checksums."""
    count, size, end = _shape(array, slots)
    gap = bytes(size - end - CRC_BYTES)
    sums = []
    for start in range(0, count * size, size):
        checksum = int(crc32c.crc32c(slots[start : start + end]))
        struct.pack_into("<I", slots, start + end, checksum)
        slots[start + end + CRC_BYTES : start + size] = gap
        sums.append(checksum)
    return sums


def seals(array: ArrayInfo, slots: memoryview) -> list[int]:
    """The checksums behind the chunks, as they are there."""
    count, size, end = _shape(array, slots)
    return [struct.unpack_from("<I", slots, start + end)[0] for start in range(0, count * size, size)]


def unsound(array: ArrayInfo, slots: memoryview) -> tuple[int, str] | None:
    """The first slot that is not as it must be, counted from 0, and what is wrong with it."""
    count, size, end = _shape(array, slots)
    if crc32c.crc32c(slots) == _sound(end, size, count):
        return None
    for number in range(count):
        slot = slots[number * size : (number + 1) * size]
        if crc32c.crc32c(slot[:end]) != struct.unpack_from("<I", slot, end)[0]:
            return number, "has a wrong checksum"
        if crc32c.crc32c(slot) != _sound(end, size, 1):
            return number, "is followed by something else than zeros"
    raise AssertionError("sound slots have the checksum of sound slots")


def _shape(array: ArrayInfo, slots: memoryview) -> tuple[int, int, int]:
    """How many slots, bytes of each, and bytes of each one's chunk."""
    return len(slots) // array.slot_bytes, array.slot_bytes, array.chunk_bytes


@lru_cache(maxsize=1024)
def _sound(chunk_bytes: int, slot_bytes: int, count: int) -> int:
    """crc32c of so many sound slots, whatever their chunks are: bytes and their own checksum have always the same."""
    gap = slot_bytes - chunk_bytes - CRC_BYTES
    return crc.repeat(crc.combine(crc.SEALED, crc.zeros(gap), gap), slot_bytes, count)
