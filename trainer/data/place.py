"""Where a config's prepared dataset lies in its directory: `corpus`, or, once checkpoints were trained on that and other text was
accepted, beside it, under the name that the file `current` has.

Owns that file. Light to import.
"""

import re
from pathlib import Path

from trainer.data.durable import beside as temporary
from trainer.data.durable import sync_directory, write_beside

FIRST = "corpus"
CURRENT = "current"
_NAME = re.compile(r"corpus(-[0-9a-f]{8})?")


def prepared_prefix(directory: Path) -> Path:
    """The prefix of the dataset in use, which need not be there yet."""
    try:
        name = (directory / CURRENT).read_text(errors="replace").strip()
    except OSError:
        name = FIRST
    return directory / (name if _NAME.fullmatch(name) else FIRST)


def beside(directory: Path, mark: str) -> Path:
    """The prefix of another dataset. Args: mark: a hash in hexadecimal digits of what it is made of."""
    return directory / f"{FIRST}-{mark[:8]}"


def use(prefix: Path) -> None:
    """Have a dataset used from now on. Raises OSError."""
    path = prefix.parent / CURRENT
    write_beside(path, f"{prefix.name}\n".encode())
    temporary(path).replace(path)
    sync_directory(path.parent)
