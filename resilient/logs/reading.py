"""The logs of ranks, read back: files of nodes and archives, as lines in the order of their times."""

import heapq
import io
import math
import re
import resource
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import BinaryIO

from resilient.exits import EnvironmentUnusable
from resilient.logs import archive, packing
from resilient.logs.archive import DamagedArchive
from resilient.logs.paths import DIRECTORY, generation_directory

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


def generations(run_dir: Path) -> list[int]:
    """The generations that have logs, packed ones among them."""
    directory = run_dir / DIRECTORY
    found = {packing.generation_of(folder) for folder in packing.folders(directory)}
    for path in directory.glob("g*.tar.zst"):
        with suppress(DamagedArchive):
            found |= {packing.generation_of(Path(each.name)) for each in archive.contents(path)}
    return sorted(found)


def lines(run_dir: Path, generation: int, wanted: Wanted) -> Iterator[str]:
    """The wanted lines of a generation, without their ends, by time.

    Raises:
        EnvironmentUnusable: it has no logs, or they cannot be read.
    """
    try:
        folder = generation_directory(run_dir, generation)
        if not folder.is_dir():
            yield from _packed(run_dir, generation, wanted)
            return
        with ExitStack() as stack:
            paths = {node: path for path in folder.iterdir() if (node := _node_of(path.name)) is not None}
            _allow_files(len(paths))
            files = [stack.enter_context(path.open("rb")) for node, path in sorted(paths.items()) if wanted.node in (None, node)]
            yield from _merged(files, wanted)
            for rank, path in sorted((rank, path) for path in folder.iterdir() if (rank := _rank_of(path.name)) is not None):
                with path.open("rb") as file:
                    yield from _of_rank(rank, file, wanted)
    except (OSError, DamagedArchive) as error:
        raise EnvironmentUnusable(f"the logs of generation {generation} cannot be read: {error}") from error


def _packed(run_dir: Path, generation: int, wanted: Wanted) -> Iterator[str]:
    path = packing.archive_of(run_dir / DIRECTORY, generation)
    found = [each for each in archive.contents(path) if each.name == f"g{generation}"]
    if not found:
        raise EnvironmentUnusable(f"there are no logs of generation {generation} in {run_dir / DIRECTORY}; {_there(run_dir)}")
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


def _of_rank(rank: int, file: BinaryIO, wanted: Wanted) -> Iterator[str]:
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
