"""Site profiles: configs in small, whose keys hold where a campaign's own config does not say otherwise.

Owns where profiles lie and how they are put under a config. What a key means, and whether it is good, is the schema's matter.
"""

import difflib
import os
from pathlib import Path
from typing import Any

GENERIC = "generic"
DIRECTORY = Path(__file__).parents[1] / "slurm" / "profiles"


def names() -> list[str]:
    """The profiles that come with this package."""
    return sorted(path.stem for path in DIRECTORY.glob("*.yaml"))


def is_file(name: str) -> bool:
    """Whether a profile is told by its path."""
    return "/" in name or name.endswith((".yaml", ".yml"))


def find(name: str) -> Path | None:
    """The file of a profile, absolute; None if there is none."""
    try:
        path = Path(os.path.expandvars(name)).expanduser().absolute() if is_file(name) else DIRECTORY / f"{name}.yaml"
    except RuntimeError:  # of a user that there is not
        return None
    return path if path.is_file() else None


def unknown(name: str) -> str:
    """What a profile may be, in words, where there is none of this name."""
    if is_file(name):
        return "there is no such file"
    near = difflib.get_close_matches(name, names(), n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"there is no such profile; {hint}allowed: {', '.join(names())}, or the path of a file"


def fill(values: dict[str, Any], below: dict[str, Any], at: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Take over into `values` what only `below` has; mappings are merged, lists are not. Returns what was taken, by key."""
    taken: dict[tuple[str, ...], Any] = {}
    for name, value in below.items():
        key = (*at, name)
        if isinstance(value, dict):
            taken |= fill(inner, value, key) if isinstance(inner := values.setdefault(name, {}), dict) else {}
        elif name not in values:
            values[name] = taken[key] = value
    return taken
