"""What commands print with `--json`: JSON that every parser reads, whatever was measured and wherever it goes."""

from typing import Any

from rich.console import Console

from resilient import strict_json


def print_json(value: Any) -> None:
    """Print plain data. Numbers that JSON does not know are null, and characters that the output cannot show are escaped."""
    console = Console(highlight=False, soft_wrap=True)
    said = strict_json.dumps(value, indent=2, ensure_ascii=False)
    escaped = console.encoding != "utf-8" or not _is_text(said)
    if escaped:
        said = strict_json.dumps(value, indent=2)
    if console.is_terminal:
        console.print_json(said, ensure_ascii=escaped)
    else:  # nobody sees colours, which take longer than all the rest
        console.out(said, highlight=False)


def _is_text(said: str) -> bool:
    """Whether it can be written; names of files may have bytes that are no UTF-8."""
    try:
        said.encode()
    except UnicodeEncodeError:
        return False
    return True
