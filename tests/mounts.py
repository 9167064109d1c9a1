"""What tests do to a mounted file system."""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

PATIENCE_S = 30.0

needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="NOT TESTED: mounting a file system takes root; run the tests as root once"
)


@contextmanager
def small_disk(path: Path, size_bytes: int) -> Iterator[Path]:
    """A file system with so much room, at a directory that is made for it."""
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)  # a file may be open yet in a test that has failed


@contextmanager
def freezable_disk(path: Path, size_mib: int) -> Iterator[Path]:
    """An ext4 at a directory that is made for it: `fsfreeze` has whoever writes there wait in the kernel, until the end at most."""
    image = path.with_name(f"{path.name}.image")
    with image.open("wb") as file:
        file.truncate(size_mib << 20)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", image], check=True)
    path.mkdir()
    subprocess.run(["mount", "-o", "loop", image, path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", path], check=False, capture_output=True)
        subprocess.run(["umount", "--lazy", path], check=True)
        image.unlink()


def _is_open(device: Path) -> bool:
    """Whether a process has a device open."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if link.readlink() == device:
                return True
    return False


@contextmanager
def device_on(disk: Path) -> Iterator[Path]:
    """A block device with its blocks on a `freezable_disk`.

    While that is frozen, the kernel keeps a process that has written to the device and is killed: it closes its sockets, and
    writes what it has left before it is gone. So do the drivers of GPUs with processes whose memory they have to free.
    """
    blocks = disk / "blocks"
    with blocks.open("wb") as file:
        file.truncate(1 << 20)
    found = subprocess.run(["losetup", "--find", "--show", blocks], check=True, capture_output=True, text=True)
    device = Path(found.stdout.strip())
    try:
        while _is_open(device):  # by a `mount` that was about to take it, too; whoever closes it last is kept
            time.sleep(0.01)
        yield device
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", disk], check=False, capture_output=True)
        subprocess.run(["losetup", "--detach", device], check=True)


def make_read_only(path: Path) -> None:
    """For all that is opened from now on: by a bind mount over it, which `umount` takes away again.

    The kernel refuses it while a file there is open for writing; who writes a line and closes the file leaves room between.
    """
    subprocess.run(["mount", "--bind", path, path], check=True)
    deadline = time.monotonic() + PATIENCE_S
    while (
        done := subprocess.run(["mount", "-o", "remount,bind,ro", path], capture_output=True, text=True, check=False)
    ).returncode != 0:
        if time.monotonic() > deadline:
            raise AssertionError(f"{path} could not be made read-only for {PATIENCE_S:.0f} s: {done.stderr}")
        time.sleep(0.01)


def _without_a_server(path: Path) -> int:
    """A file system of user space over a directory, whose server never says anything; its connection, by which it is given up."""
    device = os.open("/dev/fuse", os.O_RDWR)
    try:
        options = f"fd={device},rootmode=40000,user_id=0,group_id=0"
        subprocess.run(["mount", "-i", "-t", "fuse", "-o", options, "away", path], check=True, pass_fds=[device])
    except BaseException:
        os.close(device)
        raise
    return device


@contextmanager
def unreachable(path: Path) -> Iterator[None]:
    """What is in a directory cannot be reached meanwhile (ENOTCONN): a file system without its server lies over it."""
    os.close(_without_a_server(path))
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


@contextmanager
def hanging(path: Path) -> Iterator[None]:
    """Whoever asks for anything in a directory waits meanwhile, until it is killed; at the end that fails (ENOTCONN)."""
    device = _without_a_server(path)
    try:
        yield
    finally:
        os.close(device)
        subprocess.run(["umount", "--lazy", path], check=True)
