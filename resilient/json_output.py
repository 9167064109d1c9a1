"""What commands print with `--json`: JSON that every parser reads, whatever was measured and wherever it goes."""

import json
import math
from typing import Any

from rich.console import Console


def print_json(value: Any) -> None:
    """Print plain data. Numbers that JSON does not know are null, and characters that the output cannot show are escaped."""
    console = Console(highlight=False, soft_wrap=True)
    escaped = console.encoding != "utf-8"
    said = json.dumps(strict(value), indent=2, ensure_ascii=escaped)
    if console.is_terminal:
        console.print_json(said, ensure_ascii=escaped)
    else:  # nobody sees colours, which take longer than all the rest
        console.out(said, highlight=False)


def strict(value: Any) -> Any:
    """The same with null for NaN and the infinities."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [strict(each) for each in value]
    return {name: strict(each) for name, each in value.items()} if isinstance(value, dict) else value
