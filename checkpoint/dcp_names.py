"""What a checkpoint of torch.distributed.checkpoint adds to the arrays: their names, and the `dcp` of the small state.

Owns the translation between DCP's keys and both, in either direction. Touches no file.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from checkpoint import manifest, metadata
from checkpoint.errors import CheckpointMismatch
from checkpoint.layout import ArrayInfo
from checkpoint.metadata import Contents
from checkpoint.state import JSON

KEY = "dcp"
"""The member of the small state that says what the arrays do not."""
TENSORS = "state"
OBJECTS = "objects"
_RESERVED = (metadata.NAME, manifest.NAME)
_TO_ESCAPE = re.compile(r"[%/\\\x00-\x1f\x7f]")


class PackedObject(NamedTuple):
    """Where the bytes of what is no tensor lie."""

    array: str
    offset_bytes: int
    size_bytes: int


def array_name(fqn: str) -> str:
    """The array of a tensor: `state/<fqn>`, with %XX for what Zarr and file systems do not take in a name.

    That is `%`, `/`, backslashes and control characters anywhere, and the first letter where the name would begin with `.` or
    `__`, or be one that a checkpoint needs for itself; an empty name is a single `%`. What differs stays different.
    """
    if not fqn:
        return f"{TENSORS}/%"
    name = _TO_ESCAPE.sub(lambda found: _escaped(found[0]), fqn)
    if name.startswith((".", "__")) or name in _RESERVED:
        name = f"{_escaped(name[0])}{name[1:]}"
    return f"{TENSORS}/{name}"


def _escaped(letter: str) -> str:
    return f"%{ord(letter):02X}"


def fqn_of(array: str) -> str:
    name = array.removeprefix(f"{TENSORS}/")
    return "" if name == "%" else unquote(name)


def paths_of(planner_data: Any) -> Mapping[str, JSON] | None:
    """What DefaultSavePlanner says, as JSON: for each fqn the keys that lead to the value. Raises ValueError for anything else."""
    if planner_data is None:
        return None
    if not isinstance(planner_data, Mapping):
        raise ValueError(f"the planner's data is a {type(planner_data).__name__}; only a path for each fqn can be stored")
    for fqn, path in planner_data.items():
        if not isinstance(path, tuple) or not all(isinstance(key, str | int) for key in path):
            raise ValueError(f"{fqn}: the path {path!r} cannot be stored; keys of nested dicts must be strings or integers")
    return {fqn: list(path) for fqn, path in planner_data.items()}


def described(
    path: Path, contents: Contents
) -> tuple[Mapping[str, ArrayInfo], Mapping[str, PackedObject], Mapping[str, tuple[str | int, ...]] | None]:
    """Tensors and objects by fqn, and the paths of both; the arrays as they are of what DCP has not written."""
    ours: Any = contents.state.get(KEY)
    if ours is None:
        return contents.arrays, {}, None
    try:
        objects = {fqn: PackedObject(*place) for fqn, place in ours["objects"].items()}
        paths = None if ours["paths"] is None else {fqn: tuple(keys) for fqn, keys in ours["paths"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointMismatch(
            f"{path}: the state's {KEY!r} is not what ZarrWriter writes: {error!r}; read it with `load`"
        ) from error
    tensors = {fqn_of(name): info for name, info in contents.arrays.items() if name.startswith(f"{TENSORS}/")}
    return tensors, objects, paths
