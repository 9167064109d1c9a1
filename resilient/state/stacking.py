"""The layers of a model as one array: which parameters are stacked along a first dimension.

Owns the rule, which depends on names, shapes and types alone, so that it comes to the same on any layout. Pure.
"""

from collections.abc import Mapping, Sequence

Kind = tuple[tuple[int, ...], str]
"""Global shape, and type of the elements."""
Place = tuple[str, tuple[int, int] | None]
"""An array, and (index, count) in it; None where the array is this tensor alone."""


def places(kinds: Mapping[str, Kind]) -> dict[str, Place]:
    """Where each tensor lies. `layers.0.weight` and `layers.1.weight`, equal in shape and type, are one array `layers.weight`.

    Args:
        kinds: by array name, in whose last part dots separate modules.
    """
    families: dict[str, list[tuple[int, str]]] = {}
    for name in kinds:
        group, slash, last = name.rpartition("/")
        parts = last.split(".")
        at = next((number for number, part in enumerate(parts) if part.isdecimal()), None)
        if at is not None:
            stem = ".".join([*parts[:at], *parts[at + 1 :]])
            if stem and not stem.startswith("__"):
                families.setdefault(f"{group}{slash}{stem}", []).append((int(parts[at]), name))
    found: dict[str, Place] = {name: (name, None) for name in kinds}
    for stem, members in families.items():
        if stem not in kinds and _alike(members, kinds):
            for index, (_, name) in enumerate(sorted(members)):
                found[name] = (stem, (index, len(members)))
    return found


def _alike(members: Sequence[tuple[int, str]], kinds: Mapping[str, Kind]) -> bool:
    """Whether there is more than one, and all are of the same shape and type."""
    names = [name for _, name in members]
    return len({number for number, _ in members}) == len(names) > 1 and len({kinds[name] for name in names}) == 1
