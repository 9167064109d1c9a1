"""JSON that every parser reads. Python's has NaN and the infinities as bare words, which the standard does not know. Pure."""

import json
import math
from typing import Any


def strict(value: Any) -> Any:
    """The same with null for NaN and the infinities."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [strict(each) for each in value]
    return {name: strict(each) for name, each in value.items()} if isinstance(value, dict) else value


def dumps(value: Any, **settings: Any) -> str:
    """`json.dumps`, with null for NaN and the infinities. Args: settings: of `json.dumps`."""
    try:
        return json.dumps(value, allow_nan=False, **settings)
    except ValueError:
        return json.dumps(strict(value), **settings)
