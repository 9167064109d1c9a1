"""How far a sink has come in the files of the run directory, kept there: `sinks/<name>.json`."""

import fcntl
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec

from checkpoint.locks import has_no_links
from checkpoint.typed import built

DIRECTORY = "sinks"
OVERLAP_S = 60.0  # rather twice than never


class _Kept(msgspec.Struct, frozen=True):
    since_t: float  # unix seconds
    at_bytes: dict[str, Annotated[int, msgspec.Meta(ge=0)]] = {}
    newest_t: dict[str, float] = {}


class Position:
    """The offsets of one sink. As long as it is open nobody else feeds this sink. Belongs to one thread.

    Args:
        since_t: unix seconds from which on lines are wanted, if the sink is used for the first time; 0: all.

    Attributes:
        since_t: what that was when it was used for the first time; where that cannot be read, a minute before it was written.
        is_lost: whether what was kept cannot be read.
        at_bytes: up to where lines were taken, by file; none of a file of which all that was read was there before `since_t`.
        newest_t: the latest of the times of the lines up to there, and maybe of some after them, by file.

    Raises:
        BlockingIOError: somebody else feeds the sink.
        OSError: the run directory cannot be used.
    """

    def __init__(self, run_dir: Path, name: str, since_t: float) -> None:
        self._path = run_dir / DIRECTORY / f"{name}.json"
        self._path.parent.mkdir(exist_ok=True)
        self._lock = os.open(self._path.with_suffix(".lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
        self.since_t = since_t
        self.at_bytes: dict[str, int] = {}
        self.newest_t: dict[str, float] = {}
        self.is_lost = False
        try:
            self._take_lock()
            kept = self._read()
            if kept is not None:
                self.since_t, self.at_bytes, self.newest_t = kept.since_t, dict(kept.at_bytes), dict(kept.newest_t)
            else:
                self._write({}, {})  # what comes from now on is not lost, even if nothing is ever taken in this job
        except BaseException:
            self.close()  # or the next try would find that this process feeds the sink
            raise

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            why = "another process feeds this sink; that of a job which has ended does so for some seconds more"
            raise BlockingIOError(error.errno, why) from None
        except OSError:
            pass  # a file system without locks

    def _read(self) -> _Kept | None:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=built(_Kept))
        except FileNotFoundError:
            return None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            self.is_lost = True
            written_t = self._path.stat().st_mtime - OVERLAP_S
            self.since_t = min(self.since_t or written_t, written_t)
            return None

    def keep(self, at_bytes: dict[str, int], newest_t: dict[str, float] | None = None) -> None:
        """Lines up to here were taken. Raises OSError."""
        newest_t = self.newest_t if newest_t is None else newest_t
        if (at_bytes, newest_t) != (self.at_bytes, self.newest_t):
            self._write(at_bytes, newest_t)
            self.at_bytes, self.newest_t = dict(at_bytes), dict(newest_t)

    def _write(self, at_bytes: dict[str, int], newest_t: dict[str, float]) -> None:
        new = self._path.with_suffix(".new")
        with new.open("wb") as file:
            file.write(msgspec.json.encode(_Kept(self.since_t, at_bytes, newest_t)))
            file.flush()
            os.fsync(file.fileno())  # or it may be empty after a crash of the node
        new.replace(self._path)

    def close(self) -> None:
        """Let somebody else feed the sink."""
        os.close(self._lock)


def identity_of(run_dir: Path) -> str:
    """What tells this campaign from all others, drawn once. Raises OSError."""
    path = run_dir / DIRECTORY / "id"
    path.parent.mkdir(exist_ok=True)
    with suppress(FileExistsError):
        mine = path.with_name(f".id.{secrets.token_hex(4)}")
        mine.write_text(secrets.token_hex(8))
        try:
            os.link(mine, path)
        except OSError as error:
            if not has_no_links(error):
                raise
            if not path.exists():
                mine.rename(path)
        finally:
            mine.unlink(missing_ok=True)
    return path.read_text()[:64].strip()
