"""The logs of ranks, read back: files of nodes and archives, as lines in the order of their times."""

import heapq
import io
import math
import os
import re
import resource
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from time import monotonic
from typing import BinaryIO

from resilient.exits import EnvironmentUnusable
from resilient.logs import archive, packing
from resilient.logs.archive import DamagedArchive
from resilient.logs.paths import DIRECTORY, generation_directory
from resilient.spill import CLOCKS_S

LATE_S = 60.0  # that a generation is still followed after the next one has begun

_NODE_LOG = re.compile(r"node(\d+)\.log")
_RANK_LOG = re.compile(r"rank(\d+)\.log")  # of campaigns begun with an earlier version: lines without times
_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}) (?:\[rank (\d+)\] )?")


@dataclass(frozen=True)
class Wanted:
    """Which lines are wanted; None: all.

    Attributes:
        since: a time as the lines have it; earlier ones are not wanted.
    """

    rank: int | None = None
    node: int | None = None
    since: str | None = None

    def takes(self, line: str) -> bool:
        """Whether this line is wanted."""
        found = _LINE.match(line)
        time, rank = (found[1], found[2]) if found is not None else ("", None)
        if self.rank is not None and rank is not None and int(rank) != self.rank:
            return False
        return self.since is None or time >= self.since

    def may_be_in(self, path: Path) -> bool:
        """Whether a file may have a wanted line, by when it was last written. Raises OSError."""
        if self.since is None:
            return True
        return f"{datetime.fromtimestamp(path.stat().st_mtime + CLOCKS_S):%Y-%m-%d %H:%M:%S}" >= self.since


def generations(run_dir: Path) -> list[int]:
    """The generations that have logs, packed ones among them."""
    directory = run_dir / DIRECTORY
    found = {packing.generation_of(folder) for folder in packing.folders(directory)}
    for path in directory.glob("g*.tar.zst"):
        with suppress(DamagedArchive):
            found |= {packing.generation_of(Path(each.name)) for each in archive.contents(path)}
    return sorted(found)


def lines(run_dir: Path, generation: int, wanted: Wanted, limit_bytes: int | None = None) -> Iterator[str]:
    """The wanted lines of a generation, without their ends, by time.

    Args:
        limit_bytes: that are read at most: of larger logs the beginning and the end of each, and none of those that are too old.

    Raises:
        EnvironmentUnusable: it has no logs, they cannot be read, or they are packed and larger than the limit.
    """
    try:
        folder = generation_directory(run_dir, generation)
        if not folder.is_dir():
            yield from _packed(run_dir, generation, wanted, limit_bytes)
            return
        with ExitStack() as stack:
            found = {node: path for path in folder.iterdir() if (node := _node_of(path.name)) is not None}
            paths = [path for node, path in sorted(found.items()) if wanted.node in (None, node)]
            if limit_bytes is not None:
                paths = [path for path in paths if wanted.may_be_in(path)]
            _allow_files(len(paths))
            files = [stack.enter_context(path.open("rb")) for path in paths]
            yield from _merged([_ends(file, limit_bytes, len(files)) for file in files], wanted)
            of_ranks = sorted((rank, path) for path in folder.iterdir() if (rank := _rank_of(path.name)) is not None)
            for rank, path in of_ranks:
                with path.open("rb") as file:
                    yield from _of_rank(rank, _ends(file, limit_bytes, len(of_ranks)), wanted)
    except (OSError, DamagedArchive) as error:
        raise EnvironmentUnusable(f"the logs of generation {generation} cannot be read: {error}") from error


def _ends(file: BinaryIO, limit_bytes: int | None, files: int) -> Iterable[bytes]:
    """The lines of one of so many files; of what is larger than its part of the limit, those at its beginning and at its end."""
    size = os.fstat(file.fileno()).st_size
    if limit_bytes is None or size <= limit_bytes // files:
        return file
    half = limit_bytes // files // 2
    beginning = file.read(half)
    file.seek(size - half)
    end = file.read(half)
    return io.BytesIO(beginning[: beginning.rfind(b"\n") + 1] + end[end.find(b"\n") + 1 :])


def _packed(run_dir: Path, generation: int, wanted: Wanted, limit_bytes: int | None) -> Iterator[str]:
    path = packing.archive_of(run_dir / DIRECTORY, generation)
    found = [each for each in archive.contents(path) if each.name == f"g{generation}"]
    if not found:
        raise EnvironmentUnusable(f"there are no logs of generation {generation} in {run_dir / DIRECTORY}; {_there(run_dir)}")
    size = sum(sum(each.files.values()) for each in found)
    if limit_bytes is not None and size > limit_bytes:
        raise EnvironmentUnusable(f"the logs of generation {generation} are packed, and have {size} bytes")
    files: dict[str, bytes] = {}
    for each in found:  # more than one where somebody was late: with all that was there, or with what came after
        for name, content in archive.read(path, each):
            before = files.get(name, b"")
            files[name] = content if content.startswith(before) else before + content
    nodes = {node: io.BytesIO(files[name]) for name in files if (node := _node_of(name)) is not None}
    yield from _merged([file for node, file in sorted(nodes.items()) if wanted.node in (None, node)], wanted)
    for rank, content in sorted((rank, files[name]) for name in files if (rank := _rank_of(name)) is not None):
        yield from _of_rank(rank, io.BytesIO(content), wanted)


def _there(run_dir: Path) -> str:
    found = generations(run_dir)
    return f"there are those of {found[0]} to {found[-1]}" if found else "nothing has been started yet"


def _node_of(name: str) -> int | None:
    match = _NODE_LOG.fullmatch(name)
    return int(match[1]) if match is not None else None


def _rank_of(name: str) -> int | None:
    match = _RANK_LOG.fullmatch(name)
    return int(match[1]) if match is not None else None


def _of_rank(rank: int, file: Iterable[bytes], wanted: Wanted) -> Iterator[str]:
    """The lines of a log of one rank. Nobody knows when they were printed, nor on which node."""
    if wanted.rank in (None, rank) and wanted.node is None and wanted.since is None:
        for raw in file:
            yield f"[rank {rank}] {text(raw)}"


def _merged(files: Iterable[Iterable[bytes]], wanted: Wanted) -> Iterator[str]:
    for _, line in heapq.merge(*map(_timed, files), key=lambda item: item[0]):
        if wanted.takes(line):
            yield line


def _timed(file: Iterable[bytes]) -> Iterator[tuple[str, str]]:
    """Each line with its time; one that has none goes with the one before."""
    time = ""
    for raw in file:
        line = text(raw)
        found = _LINE.match(line)
        time = found[1] if found is not None else time
        yield time, line


def text(raw: bytes) -> str:
    """A line as it can be shown."""
    return raw.rstrip(b"\n").decode(errors="replace")


def _allow_files(count: int) -> None:
    """Have this process open so many files, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, count + 64)), hard))


class Follower:
    """The lines that come to the logs of the newest generation, whichever that is, and for a while to those before it: a rank that
    ended it may say why only then.

    Invariant: a line is given once, when it has its end; what was there before is given by the first call.

    Args:
        generation: to stay with; None: the newest, and those that follow it.
        clock: seconds, monotonic.
    """

    def __init__(self, run_dir: Path, wanted: Wanted, generation: int | None, clock: Callable[[], float] = monotonic) -> None:
        self._run_dir, self._wanted, self._generation, self._clock = run_dir, wanted, generation, clock
        self._until: dict[int, float] = {} if generation is None else {generation: math.inf}  # each generation that is read
        self._places: dict[Path, int] = {}

    def more(self) -> Iterator[str]:
        """What has come since the last call. Raises EnvironmentUnusable: it cannot be read."""
        try:
            now = self._clock()
            self._go_on(now)
            for generation, until in sorted(self._until.items()):
                yield from self._read(generation)
                if now >= until:
                    self._forget(generation)
        except OSError as error:
            raise EnvironmentUnusable(f"the logs cannot be read: {error}") from error

    def _go_on(self, now: float) -> None:
        """To the newest generation, with those that were over before anybody looked."""
        there = {packing.generation_of(folder) for folder in packing.folders(self._run_dir / DIRECTORY)}
        newest, last = max(there, default=None), max(self._until, default=None)
        if self._generation is not None or newest is None or newest == last:
            return
        before = {each for each in there if last is not None and last < each < newest}
        self._until = {each: min(self._until.get(each, math.inf), now + LATE_S) for each in {*self._until, *before}}
        self._until[newest] = math.inf

    def _forget(self, generation: int) -> None:
        folder = generation_directory(self._run_dir, generation)
        del self._until[generation]
        self._places = {path: place for path, place in self._places.items() if path.parent != folder}

    def _read(self, generation: int) -> Iterator[str]:
        with ExitStack() as stack, suppress(FileNotFoundError):  # not made yet, or packed in this moment
            nodes = {node: path for path in generation_directory(self._run_dir, generation).iterdir()
                     if (node := _node_of(path.name)) is not None and self._wanted.node in (None, node)}  # fmt: skip
            grown = [path for _, path in sorted(nodes.items()) if path.stat().st_size > self._places.get(path, 0)]
            _allow_files(len(grown))
            files = [(path, stack.enter_context(path.open("rb"))) for path in grown]
            yield from _merged((self._new(path, file) for path, file in files), self._wanted)

    def _new(self, path: Path, file: BinaryIO) -> Iterator[bytes]:
        """The whole lines that have come to a file."""
        place = file.seek(self._places.get(path, 0))
        for raw in file:
            if not raw.endswith(b"\n"):
                return  # the rest of it may come while this is read
            place += len(raw)
            self._places[path] = place
            yield raw


def follow(follower: Follower, show: Callable[[str], None], pause: Callable[[], None]) -> None:
    """Show the lines as they come, until `pause` ends it. Raises EnvironmentUnusable: they cannot be read."""
    while True:
        for line in follower.more():
            show(line)
        pause()
