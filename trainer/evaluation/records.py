"""What evaluations have found, kept in the run directory: a line of JSON each, and the same for TensorBoard."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

FILE = "evaluations.jsonl"
TENSORBOARD = "tensorboard/evaluation"  # of its own: a reader of a directory follows the newest of its files only


def as_line(record: Mapping[str, Any]) -> str:
    """As JSON; null for what is no finite number, which JSON does not know."""
    return msgspec.json.encode(record).decode()


class Records:
    """The evaluations of a run directory, a line each; a line that was cut off counts as none."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE

    def read(self) -> Iterator[Mapping[str, Any]]:
        """Oldest first. Raises OSError."""
        try:
            lines = self._path.read_bytes().splitlines()
        except FileNotFoundError:
            return
        for line in lines:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict):
                yield record

    def steps(self, text: str) -> set[int]:
        """Those that were evaluated on a text. Raises OSError."""
        return {record["step"] for record in self.read() if record.get("text") == text and isinstance(record.get("step"), int)}

    def add(self, record: Mapping[str, Any]) -> None:
        """Append a line, in one call, behind whatever a writer that was cut off has left. Raises OSError."""
        fd = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            size = os.fstat(fd).st_size
            torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
            data = b"\n" * torn + as_line(record).encode() + b"\n"
            if os.write(fd, data) < len(data):
                raise OSError(f"{self._path}: not all could be written")
        finally:
            os.close(fd)

    def plot(self, step: int, scalars: Mapping[str, float]) -> None:
        """Show numbers of a step in TensorBoard. Raises OSError."""
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(self._path.parent / TENSORBOARD))
        for name, value in scalars.items():
            writer.add_scalar(name, value, step)
        writer.close()
