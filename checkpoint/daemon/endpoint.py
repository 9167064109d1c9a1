"""Where the workers of a node reach its snapshot daemon: the socket for their reports, the control page with the present lease,
and the link to the buffers, all in the daemon's directory.

The directory is in RAM, which others clear: `rm` in /dev/shm, an epilog of a batch system, logind's RemoveIPC. What is gone is made
anew at the same paths. Workers send to the socket by its path; the control page they have mapped, so that those who have mapped one
that was deleted go on being told there.

Owns these three files. Decides nothing.
"""

import os
import socket
from contextlib import suppress
from pathlib import Path

from checkpoint import safe_dir
from checkpoint.tiers.lease import LINK, Lease, LeaseWord
from checkpoint.tiers.session import CONTROL, SOCKET

_WORDS = 3  # of a control page: the lease, and the two of `NodeAgreement`


class Endpoint:
    """The files of one daemon. Args: directory: which is made, of this user alone. Raises OSError.

    Attributes:
        inbox: the socket; another one once `restore` has made it anew.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        safe_dir.make_private(directory)
        self._pages = [LeaseWord(directory / CONTROL, create=True)]
        self._buffers: Path | None = None
        self.inbox, self._bound = self._bind()

    # -- leases --------------------------------------------------------------------------------------------------------

    @property
    def lease(self) -> Lease:
        """What was published last, maybe by the daemon before this one."""
        return self._pages[-1].read()

    def publish(self, lease: Lease) -> None:
        """Tell it to all workers, whichever page they have mapped."""
        for page in self._pages:
            page.publish(lease)

    def begin(self) -> None:
        """Other workers come, who map the page that is there: nobody has mapped one that was deleted."""
        del self._pages[:-1]

    def point(self, buffers: Path) -> None:
        """Where the buffers are from now on. Raises OSError."""
        self._buffers = buffers
        link = self.directory / LINK
        new = link.with_suffix(".new")
        new.unlink(missing_ok=True)
        new.symlink_to(buffers)
        new.replace(link)

    # -- what others delete --------------------------------------------------------------------------------------------

    def missing(self) -> list[str]:
        """Names of what is not there any more."""
        found = {SOCKET: self._bound, CONTROL: self._pages[-1].identity}
        names = [name for name, identity in found.items() if _identity(self.directory / name) != identity]
        if self._buffers is not None and not (self.directory / LINK).is_symlink():
            names.append(LINK)
        return names

    @property
    def taken(self) -> bool:
        """Whether another process has bound a socket at this one's path."""
        return _identity(self.directory / SOCKET) not in (None, self._bound)

    def restore(self) -> None:
        """Make what is missing anew. What workers have sent to a socket that is gone must have been received. Raises OSError."""
        safe_dir.make_private(self.directory)
        missing = self.missing()
        if CONTROL in missing:
            page = LeaseWord(self.directory / CONTROL, create=True)
            page.words[:_WORDS] = self._pages[-1].words[:_WORDS]
            self._pages.append(page)
        if LINK in missing and self._buffers is not None:
            self.point(self._buffers)
        if SOCKET in missing:  # last: workers who reach it find the rest
            before, (self.inbox, self._bound) = self.inbox, self._bind()
            before.close()

    def _bind(self) -> tuple[socket.socket, tuple[int, int] | None]:
        path = self.directory / SOCKET
        path.unlink(missing_ok=True)
        inbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            inbox.setblocking(False)
            inbox.bind(str(path))
        except OSError:
            inbox.close()
            raise
        return inbox, _identity(path)


def _identity(path: Path) -> tuple[int, int] | None:
    """Of the file at a path; its number is not given away while it is open or mapped. None where there is none."""
    with suppress(FileNotFoundError, NotADirectoryError):
        found = os.lstat(path)
        return found.st_dev, found.st_ino
    return None
