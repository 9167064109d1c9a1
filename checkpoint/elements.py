"""Element types: what they are called in torch, what Zarr stores for them, and their size.

Owns the table. Zarr has no bfloat16 and no 8-bit floats: their bits are stored as unsigned integers, and the array's attribute
`bits_of` says what they are the bits of. Pure; imports no torch.
"""

from dataclasses import dataclass

BITS_OF = "bits_of"
"""The attribute of an array whose integers are the bits of another type."""


@dataclass(frozen=True)
class Element:
    """One element type: `stored` is Zarr's name for what is in the files."""

    name: str
    stored: str
    size_bytes: int


def _table() -> dict[str, Element]:
    native = {
        "bool": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8,
        "float16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16,
    }  # fmt: skip
    bits = {"bfloat16": ("uint16", 2), "float8_e4m3fn": ("uint8", 1), "float8_e5m2": ("uint8", 1)}
    table = {name: Element(name, name, size) for name, size in native.items()}
    return table | {name: Element(name, stored, size) for name, (stored, size) in bits.items()}


_ELEMENTS = _table()


def element(name: str) -> Element:
    """The element type that torch calls `name`, without the `torch.`. Raises ValueError for one that cannot be stored."""
    if name not in _ELEMENTS:
        raise ValueError(f"elements of type {name} cannot be stored; there are {', '.join(_ELEMENTS)}")
    return _ELEMENTS[name]
