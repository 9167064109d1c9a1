"""The spill file: what the run directory has not taken yet, in RAM, so that a driver that is killed loses none of it.

Owns one file in a directory of this user's alone (0700), which is found by the run directory's path, the campaign's identity and
its owner; see `checkpoint.safe_dir`. A file system in RAM does not stall. The next driver on this machine takes the file in before
it reads the ledger.
"""

import hashlib
import logging
import os
import secrets
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from checkpoint import safe_dir
from checkpoint.safe_name import safe_name
from checkpoint.typed import built
from resilient.ledger import AppendFile
from resilient.protocol.disk import Item

log = logging.getLogger(__name__)

READ_BYTES = 1 << 20
_encoder, _decoder = msgspec.json.Encoder(), msgspec.json.Decoder(built(Item))


def new_directory(run_dir: Path, identity: str, root: Path) -> Path:
    """A name for a directory of spill files that nobody can have guessed; it is made when it is needed. root: in RAM."""
    return safe_dir.new(root, _prefix(run_dir, identity))


def directories_of(run_dir: Path, identity: str, root: Path) -> list[Path]:
    """Where earlier drivers of this user have left spill files of a campaign; those of one that was begun anew are another's."""
    before = root / f"resilient-{os.getuid()}"  # where they were as long as RAM was no tier of its own
    places = (root, before) if safe_dir.is_private(before) else (root,)  # everybody may make a directory of that name
    prefixes = (_prefix(run_dir, identity), _prefix(run_dir, ""))  # the last one of earlier versions, by the run directory alone
    return [path for place in places for prefix in prefixes for path in safe_dir.find(place, prefix)]


def _prefix(run_dir: Path, identity: str) -> str:
    name = hashlib.sha256(os.fsencode(run_dir.resolve()) + identity.encode()).hexdigest()[:16]
    return f"resilient-spill-{os.getuid()}-{name}"


class SpillFile:
    """The items that were spilled, in order. There is a file only while it holds any.

    Invariant: `last` is the number of the last item in it; items are read in order, those that were read stay until `remove`.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.path = directory / f"{os.getpid()}-{secrets.token_hex(4)}.jsonl"
        self._fd = -1
        self._size_bytes = 0
        self._read_bytes = 0
        self.last = 0

    @property
    def empty(self) -> bool:
        return self._fd < 0

    def append(self, items: Iterable[Item]) -> None:
        """Add items. Raises OSError: none of them counts as added."""
        if self._fd < 0:
            safe_dir.make_private(self._directory)
            self._fd = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            self._size_bytes = self._read_bytes = 0
        last, data = self.last, bytearray()
        for item in items:
            data += _encoder.encode(item) + b"\n"
            last = item.number
        done = 0
        while done < len(data):  # what a failure leaves behind is written over
            done += os.pwrite(self._fd, memoryview(data)[done:], self._size_bytes + done)
        self._size_bytes += done
        self.last = last

    def read(self, limit_bytes: int = READ_BYTES) -> list[Item]:
        """The next items, at least one if there is one."""
        data = self._read(limit_bytes, self._read_bytes)
        while data and b"\n" not in data:
            data += self._read(limit_bytes, self._read_bytes + len(data))
        whole = data[: data.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        return [_decoder.decode(line) for line in whole.splitlines()]

    def _read(self, limit_bytes: int, offset: int) -> bytes:
        """Bytes of what was added: behind it may be the rest of an append that has failed."""
        return os.pread(self._fd, min(limit_bytes, self._size_bytes - offset), offset) if self._fd >= 0 else b""

    def rewind(self) -> None:
        """Read from the beginning again."""
        self._read_bytes = 0

    def remove(self) -> None:
        """All of it is in the run directory."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self.path.unlink(missing_ok=True)
            with suppress(OSError):
                self._directory.rmdir()

    def close(self) -> None:
        """Leave the file where it is."""
        if self._fd >= 0:
            os.ftruncate(self._fd, self._size_bytes)
            os.close(self._fd)
            self._fd = -1


def take_in(run_dir: Path, directory: Path) -> int:
    """Write what earlier drivers have spilled, and was not written, into the run directory; returns how many items were found.

    Raises:
        OSError: the run directory cannot be written, or the directory is somebody else's; what is there stays.
    """
    if not directory.exists():
        return 0
    safe_dir.make_private(directory)
    count = 0
    for path in sorted(directory.glob("*.jsonl"), key=lambda each: each.stat().st_mtime_ns):
        lines: dict[str, deque[bytes]] = {}
        for item in items(path):
            count += 1
            if item.whole:
                replace_text(run_dir / item.path, item.text)
            else:
                lines.setdefault(item.path, deque()).append(item.text.encode())
        for name, pending in lines.items():
            file = AppendFile(run_dir / name)
            try:
                file.append(pending)
            finally:
                file.close()
        path.unlink()
    directory.rmdir()
    return count


def replace_text(path: Path, text: str) -> None:
    """Make a file whole with this text, at once. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def items(path: Path) -> list[Item]:
    """Those that are whole: the driver may have been killed while it wrote the last one."""
    found = []
    for line in path.read_bytes().splitlines():
        try:
            item = _decoder.decode(line)
            safe_name(item.path)
            found.append(item)
        except (ValueError, RecursionError) as error:  # msgspec's are ValueErrors
            log.warning("a line of %s is left out: %s", path, error)
    return found
