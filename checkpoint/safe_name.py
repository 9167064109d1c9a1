"""Names of files as other files give them, before anything is opened by them.

A manifest, the metadata of arrays, a blueprint or a spill file says which files there are below its directory. It may come from
anybody, so a name is used only if it stays below that directory: relative, normal, without `..`. Whoever writes keeps to the same
rules (`array_name`), or what is written could not be read.

Owns the rules. Pure.
"""

import re
from collections.abc import Sequence

MOST_BYTES = 1024
MOST_PART_BYTES = 255

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_SHARD = re.compile(r"c(\.\d{1,18})*")
_METADATA = "zarr.json"
_RESERVED = (_METADATA, "manifest.json")


def safe_name(name: str) -> str:
    """The name, if it is that of a file below a directory, whichever that is. Raises ValueError."""
    parts = name.split("/")
    try:
        too_long = len(name.encode()) > MOST_BYTES or any(len(part.encode()) > MOST_PART_BYTES for part in parts)
    except UnicodeEncodeError:
        raise ValueError(f"{_shown(name)} is not text") from None
    if too_long or _CONTROL.search(name) or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"{_shown(name)} is not the name of a file in it")
    return name


def metadata_name(name: str) -> str:
    """The name of a metadata file of Zarr. Raises ValueError."""
    if safe_name(name).split("/")[-1] != _METADATA:
        raise ValueError(f"{_shown(name)} is not the name of a {_METADATA}")
    return name


def shard_name(name: str) -> str:
    """The name of a shard file: an array's, and the place of the file in it. Raises ValueError."""
    *array, last = safe_name(name).split("/")
    if not array or _SHARD.fullmatch(last) is None:
        raise ValueError(f"{_shown(name)} is not the name of a shard file")
    return name


def array_name(name: str, shape: Sequence[int]) -> str:
    """The name of an array to be written, if all of its files have names that are read. Raises ValueError that says why not.

    Args:
        shape: of the array: the name of a shard file has a number for each dimension.
    """
    for node in name.split("/"):
        if not node or node.startswith((".", "__")) or node in _RESERVED:
            raise ValueError(f"{_shown(name)} cannot name an array: {_shown(node)} cannot name a Zarr group or array")
        if _CONTROL.search(node) or "\\" in node:  # Zarr takes a backslash for a slash
            raise ValueError(f"{_shown(name)} cannot name an array: it has a control character or a backslash")
    shard = ".".join(["c", *(str(max(0, length - 1)) for length in shape)])
    try:
        safe_name(f"{name}/{max(shard, _METADATA, key=len)}")
    except ValueError:
        raise ValueError(
            f"{_shown(name)} cannot name an array: it is no text, or too long: {MOST_PART_BYTES} bytes are the most between two "
            f"slashes, and {MOST_BYTES} with the name of a file"
        ) from None
    return name


def checkpoint_name(name: str) -> str:
    """The name of a file that a manifest may list. Raises ValueError."""
    return metadata_name(name) if name.endswith(_METADATA) else shard_name(name)


def _shown(name: str) -> str:
    return ascii(name[:60]) + ("..." if name[60:] else "")
