"""Whether a tier can be written, how fast, and whether it has the room that it must have.

`look` touches the file system, and may hang with it: it is run in a process of its own. What is written has no name, or loses it at
once, so that nothing is left behind wherever it is killed. `judge` is pure.
"""

import errno
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from checkpoint import direct
from checkpoint.errors import has_no_inodes
from resilient.health.clock import Skew, judge_skew
from resilient.health.quota import Quota, quotas
from resilient.health.report import Finding, Verdict, size

SIZE_BYTES = 48 << 20
BLOCK_BYTES = 4 << 20
MEASURE_S = 2.0  # for writing, and as long for reading
SLOW_BYTES_PER_S = 20 << 20
FEW_FILES = 1000
LITTLE_BYTES = 64 << 20


@dataclass(frozen=True)
class TierSpec:
    """A tier, as far as one machine is concerned.

    Attributes:
        path: where it is, or will be.
        needed_bytes, needed_files: what it must hold, where that is known.
        held: pattern of the directories whose files count as room, since what must be held may be there already; the last
            `held_newest` of them.
        measured: whether the speed is wanted, too.
        quotas: whether quotas are asked for.
    """

    name: str
    path: Path
    needed_bytes: int | None = None
    needed_files: int | None = None
    held: str = ""
    held_newest: int = 1
    measured: bool = True
    quotas: bool = False

    @property
    def check(self) -> str:
        return f"tier {self.name}"


@dataclass(frozen=True)
class DiskState:
    """What was seen of a tier.

    Attributes:
        place: the directory that was looked at: the tier's, or the nearest one above that is there.
        trouble: why nothing can be written; empty if it can.
        free_files: None where the file system does not count.
        held_bytes, held_files: of the tier's own.
        skew: how far the clock of the file system is from this machine's.
        quotas: that hold there.
    """

    place: Path
    trouble: str = ""
    free_bytes: int = 0
    free_files: int | None = None
    held_bytes: int = 0
    held_files: int = 0
    write_bytes_per_s: float | None = None
    read_bytes_per_s: float | None = None
    fsync_s: float | None = None
    skew: Skew | None = None
    quotas: tuple[Quota, ...] = ()


def check(tier: TierSpec, clock_too: bool) -> Iterator[Finding]:
    """Inspect and judge; with the clock of the file system as a finding of its own, where that is wanted."""
    seen = inspect(tier)
    yield judge(tier, seen)
    if clock_too:
        yield judge_skew(seen.skew, f"the file system of {tier.path}")


def inspect(tier: TierSpec) -> DiskState:
    """Inspect a tier; may take as long as its file system pleases."""
    place = tier.path
    try:
        place = next(each for each in (place, *place.parents) if each.exists())
        free = os.statvfs(place)
        fd, skew = _nameless(place)
    except OSError as error:
        return DiskState(place, trouble=_why(error, place))
    free_bytes = free.f_bavail * free.f_frsize
    try:
        began = time.perf_counter()
        direct.write(fd, direct.memory(direct.PAGE_BYTES), 0)
        os.fsync(fd)
        fsync_s = time.perf_counter() - began
        much = min(SIZE_BYTES, free_bytes // 4)  # others write here, too
        write_rate, read_rate = _speed(fd, much) if tier.measured and much >= BLOCK_BYTES else (None, None)
    except OSError as error:
        return DiskState(place, trouble=_why(error, place))
    finally:
        os.close(fd)
    held_bytes, held_files = held(tier)
    return DiskState(
        place,
        free_bytes=free_bytes,
        free_files=free.f_favail if free.f_files else None,
        held_bytes=held_bytes,
        held_files=held_files,
        write_bytes_per_s=write_rate,
        read_bytes_per_s=read_rate,
        fsync_s=fsync_s,
        skew=skew,
        quotas=tuple(quotas(place)) if tier.quotas else (),
    )


def _why(error: OSError, place: Path) -> str:
    """No inodes and no bytes are the same error, and not the same trouble."""
    if error.errno == errno.ENOSPC:
        return "no inodes are left" if has_no_inodes(place) else "no space is left"
    return str(error.strerror)


def _nameless(place: Path) -> tuple[int, Skew]:
    """A new file, past the page cache where that is possible, whose name is gone again; and the clock that it was stamped with."""
    before = time.time()
    fd, name = tempfile.mkstemp(prefix=".doctor-", dir=place)
    try:
        stamped, after = os.fstat(fd).st_mtime, time.time()
        os.close(fd)
        fd = direct.open_to_write_and_read(Path(name))
    finally:
        Path(name).unlink()
    return fd, Skew.between(before, stamped, after)


def _speed(fd: int, size_bytes: int) -> tuple[float, float]:
    """Bytes per second written and made durable, and read."""
    block = direct.memory(BLOCK_BYTES)
    block[:] = os.urandom(BLOCK_BYTES)  # some file systems store nothing for zeros
    began = time.perf_counter()
    done = 0
    while done < size_bytes and time.perf_counter() - began < MEASURE_S:
        direct.write(fd, block, done)
        done += len(block)
    os.fsync(fd)
    write_rate = done / (time.perf_counter() - began)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    began = time.perf_counter()
    back = 0
    while back < done and time.perf_counter() - began < MEASURE_S:
        back += direct.read(fd, [block], back)
    return write_rate, back / (time.perf_counter() - began)


def held(tier: TierSpec) -> tuple[int, int]:
    """Bytes and files that are there already."""
    size_bytes = files = 0
    directories = sorted(tier.path.glob(tier.held)) if tier.held else []
    for directory in directories[-tier.held_newest :]:
        for parent, _, found in os.walk(directory):
            for name in found:
                with suppress(FileNotFoundError):  # gone meanwhile
                    size_bytes += os.lstat(f"{parent}/{name}").st_blocks * 512
                    files += 1
    return size_bytes, files


def judge(tier: TierSpec, seen: DiskState) -> Finding:
    """What a look at a tier means."""
    numbers = {
        "free_bytes": seen.free_bytes,
        "free_files": seen.free_files,
        "write_bytes_per_s": seen.write_bytes_per_s,
        "read_bytes_per_s": seen.read_bytes_per_s,
        "fsync_s": seen.fsync_s,
    }
    measured = {name: round(value, 6) for name, value in numbers.items() if value is not None}
    where = str(seen.place)

    def finding(verdict: Verdict, text: str) -> Finding:
        return Finding(tier.check, verdict, text, measured)

    if seen.trouble:
        return Finding(tier.check, "fail", f"{where} cannot be written: {seen.trouble}")
    room, files = seen.free_bytes + seen.held_bytes, (seen.free_files or 0) + seen.held_files
    if tier.needed_bytes is not None and room < tier.needed_bytes:
        text = f"{where} has room for {size(room)} and must hold {size(tier.needed_bytes)}; make room, or keep fewer (keep_last)"
        return finding("fail", text)
    if tier.needed_files is not None and seen.free_files is not None and files < tier.needed_files:
        text = (
            f"{where} has {files:,} inodes free and must hold {tier.needed_files:,} files; delete some, or keep fewer (keep_last)"
        )
        return finding("fail", text)
    for quota in seen.quotas:
        still = quota.without(seen.held_bytes, seen.held_files)
        if still.short(tier.needed_bytes or LITTLE_BYTES, tier.needed_files or FEW_FILES):
            must = f", and it must hold {size(tier.needed_bytes)}" if tier.needed_bytes is not None else ""
            must += f" and {tier.needed_files:,} files" if tier.needed_files is not None else ""
            text = f"{where}: {still}{must}; delete some, or keep fewer (keep_last)"
            return finding("warn" if tier.needed_bytes is None and tier.needed_files is None else "fail", text)
    if tier.needed_bytes is None and seen.free_bytes < LITTLE_BYTES:
        return finding("warn", f"only {size(seen.free_bytes)} are free in {where}")
    if tier.needed_files is None and seen.free_files is not None and seen.free_files < FEW_FILES:
        return finding("warn", f"only {seen.free_files:,} inodes are free in {where}")
    if seen.write_bytes_per_s is not None and seen.write_bytes_per_s < SLOW_BYTES_PER_S:
        return finding("warn", f"{where} writes {size(seen.write_bytes_per_s)} a second; checkpoints will lag behind")
    return finding("ok", "; ".join([f"{where} can be written", *map(str, seen.quotas)]))
