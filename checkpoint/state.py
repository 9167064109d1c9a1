"""The small state that travels with the arrays: anything that JSON can say, and nothing else.

Owns the check that a state comes back as it was given. Pure.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

JSON: TypeAlias = "Mapping[str, JSON] | Sequence[JSON] | str | int | float | bool | None"


def plain(value: JSON, where: str = "state") -> Any:
    """The value in dicts and lists. Raises ValueError, naming the place, for what JSON cannot say: bytes, NaN, 1 as a key."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"{where} has the key {key!r}, and JSON has only strings for keys")
        return {key: plain(each, f"{where}[{key!r}]") for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each, f"{where}[{number}]") for number, each in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} is {value}, for which JSON has no number; store it as a string")
    if value is not None and not isinstance(value, str | int | float):
        raise ValueError(f"{where} is a {type(value).__name__}, which JSON cannot say; store numbers, strings or lists")
    return value
