"""Small file systems of a test's own."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from mounts import make_read_only

MOUNTS = pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED HERE: mounting a file system needs root")
PATIENCE_S = 120.0


def command(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True, capture_output=True)


class Volume:
    """An ext4 on a loop device."""

    def __init__(self, directory: Path, mib: int = 16, options: str = "loop,errors=remount-ro") -> None:
        self.image, self.path, self._options = directory / "image", directory / "volume", options
        with self.image.open("wb") as file:
            file.truncate(mib << 20)
        command("mkfs.ext4", "-q", "-m", "0", "-O", "quota" if "quota" in options else "^has_journal", self.image)
        self.path.mkdir()
        self.mount()
        self.frozen = False

    def mount(self) -> None:
        command("mount", "-o", self._options, self.image, self.path)

    def freeze(self) -> None:
        command("fsfreeze", "-f", self.path)
        self.frozen = True

    def thaw(self) -> None:
        if self.frozen:
            self.frozen = False
            command("fsfreeze", "-u", self.path)

    def fill(self) -> None:
        """Leave no byte free."""
        with (self.path / "filling").open("ab", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                try:
                    while True:
                        file.write(b"x" * size)
                except OSError:
                    continue

    def empty(self) -> None:
        (self.path / "filling").unlink()

    def read_only(self) -> None:
        make_read_only(self.path)

    def gone(self) -> None:
        command("umount", "-l", self.path)

    def close(self) -> None:
        self.thaw()
        while self.path.is_mount():
            subprocess.run(["umount", "-l", str(self.path)], check=True)


@contextmanager
def volume(directory: Path, **settings: Any) -> Iterator[Volume]:
    made = Volume(directory, **settings)
    try:
        yield made
    finally:
        made.close()
