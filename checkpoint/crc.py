"""crc32c of bytes that are put together, from the crc32c of the parts.

Owns the arithmetic: a crc is a polynomial over GF(2) modulo Castagnoli's, and bytes that follow multiply what came before by
a power of x (see Mark Adler's crc32_combine, 2006, for the idea). Pure; reads no data but constants.
"""

import struct
from functools import lru_cache

import crc32c as _crc32c

_POLYNOMIAL = 0x82F63B78  # reflected
_ONE = 1 << 31  # the polynomial 1, reflected

SEALED: int = 0x48674BC7
"""crc32c of any bytes that are followed by their own crc32c, little-endian: the same for all of them."""


def combine(first: int, second: int, second_bytes: int) -> int:
    """crc32c of two byte strings one after the other, from that of each and the length of the second."""
    return _multiply(_power(second_bytes), first) ^ second


def repeat(crc: int, size_bytes: int, times: int) -> int:
    """crc32c of a block of `size_bytes` written `times` times in a row."""
    total, total_bytes = 0, 0
    while times:
        if times & 1:
            total = combine(total, crc, size_bytes)
            total_bytes += size_bytes
        crc = combine(crc, crc, size_bytes)
        size_bytes *= 2
        times >>= 1
    return total


def zeros(size_bytes: int) -> int:
    """crc32c of so many zero bytes."""
    return repeat(_crc32c.crc32c(b"\0"), 1, size_bytes)


def sealed(crc: int) -> bytes:
    """The 4 bytes that follow a chunk whose crc32c is `crc`."""
    return struct.pack("<I", crc)


def _multiply(a: int, b: int) -> int:
    product = 0
    bit = _ONE
    while a:
        if a & bit:
            product ^= b
            a ^= bit
        bit >>= 1
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


@lru_cache(maxsize=4096)
def _power(size_bytes: int) -> int:
    """x to the power of 8 × size_bytes."""
    square, result = _ONE >> 8, _ONE  # x^8
    while size_bytes:
        if size_bytes & 1:
            result = _multiply(square, result)
        square = _multiply(square, square)
        size_bytes >>= 1
    return result
