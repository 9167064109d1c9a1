"""A file of JSON lines that grows: what was added to it since the last read."""

import json
from pathlib import Path
from typing import Any


class Tail:
    """Args: path: need not be there yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0

    def read(self) -> list[dict[str, Any]]:
        """The objects of the lines that were finished since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                text = file.read()
        except FileNotFoundError:
            return []
        whole, end, _ = text.rpartition(b"\n")
        self._at += len(whole) + len(end)
        found = []
        for line in whole.splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue  # cut short by a crash
        return found
