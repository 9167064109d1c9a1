"""At which addresses processes listen, as `ss -ltn` has it."""

import ipaddress
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

_LISTENS = "0A"


def listeners(*pids: int) -> set[tuple[str, int]]:
    """Address and port of every TCP socket at which these processes listen, all in one network namespace."""
    inodes = {inode for pid in pids for inode in _sockets(pid)}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in _table(table, pids):
            fields = line.split()
            if fields[3] == _LISTENS and fields[9] in inodes:
                address, _, port = fields[1].partition(":")
                found.add((_address(address), int(port, 16)))
    return found


def descendants(pid: int) -> Iterator[int]:
    """This process and all below it."""
    yield pid
    children: Iterable[str] = []
    with suppress(OSError):
        children = [word for task in Path(f"/proc/{pid}/task").iterdir() for word in (task / "children").read_text().split()]
    for child in children:
        yield from descendants(int(child))


def _table(name: str, pids: Sequence[int]) -> list[str]:
    for pid in pids:
        with suppress(OSError):  # it has ended
            return Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
    return []


def _sockets(pid: int) -> Iterator[str]:
    try:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(fd)  # noqa: PTH115 - it leads to no path
            except OSError:
                continue
            if target.startswith("socket:["):
                yield target[len("socket:[") : -1]
    except OSError:
        return


def _address(text: str) -> str:
    """Words of 32 bits in the order of this machine, as hexadecimal digits."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(words)))
