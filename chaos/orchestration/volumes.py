"""Volumes: small file systems of an experiment's own, for tiers that are to be full, read-only, slow or gone.

A campaign's config names one as `${volume.NAME}`. They are mounted below the directory of results; what mounts them promises
`undoing` to a guard first.
"""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from chaos.injectors.guard import Command
from chaos.orchestration.names import RUN
from resilient.exits import EnvironmentUnusable

DIRECTORY = "volumes"
RUN_DIR = "run_dir"
"""Name of the volume that is mounted at the run directory itself; what it held, but for checkpoints, is kept afterwards."""

_UNMOUNT = 'while mountpoint -q "$1"; do umount -l "$1" || break; done; rm -f "$1.image"; rmdir "$1"'
_KEEP = (
    'if mountpoint -q "$1"; then mkdir -p "$1.kept"; for each in "$1"/*; do case "$each" in */checkpoints | */lost+found) ;; '
    '*) cp -a "$each" "$1.kept/";; esac; done; fi; '
)
_PUT_BACK = '; [ ! -d "$1.kept" ] || mv -T "$1.kept" "$1"'


class Volume(BaseModel):
    """One file system: `ext4` on a loop device, or `tmpfs`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["ext4", "tmpfs"] = Field("ext4", description="tmpfs cannot be frozen, as tier_hanging and tier_slow do")
    mib: int = Field(64, ge=4, description="its size")
    inodes: int | None = Field(None, ge=100, description="files that it has room for; unset: as many as is usual")


def paths(volumes: Mapping[str, Volume], directory: Path) -> dict[str, Path]:
    """Where each is, by name, below a directory."""
    return {name: (directory / RUN if name == RUN_DIR else directory / DIRECTORY / name).absolute() for name in volumes}


def undoing(volumes: Mapping[str, Volume], directory: Path) -> Sequence[Command]:
    """Commands that unmount them, mounted or not, and remove what was under them."""
    found: list[Command] = []
    for name, path in paths(volumes, directory).items():
        script = _KEEP + _UNMOUNT + _PUT_BACK if name == RUN_DIR else _UNMOUNT
        found.append(["sh", "-c", script, "sh", str(path)])
    return found


def mount(volumes: Mapping[str, Volume], directory: Path) -> None:
    """Make and mount them.

    Raises:
        EnvironmentUnusable: that needs root, or a command that is not there.
    """
    if volumes and os.geteuid() != 0:
        raise EnvironmentUnusable(f"volumes ({', '.join(volumes)}) are file systems of their own: mounting them needs root")
    for name, path in paths(volumes, directory).items():
        volume = volumes[name]
        path.mkdir(parents=True)
        if volume.kind == "tmpfs":
            inodes = [] if volume.inodes is None else [f"nr_inodes={volume.inodes}"]
            _run("mount", "-t", "tmpfs", "-o", ",".join([f"size={volume.mib}m", *inodes]), "tmpfs", path)
            continue
        image = path.with_name(f"{path.name}.image")
        with image.open("wb") as file:
            file.truncate(volume.mib << 20)
        inodes = [] if volume.inodes is None else ["-N", str(volume.inodes)]
        _run("mkfs.ext4", "-q", "-m", "0", *inodes, image)
        _run("mount", "-o", "loop", image, path)


def filled_in(values: Any, where: Mapping[str, Path]) -> Any:
    """A config in which volumes are named, with their paths."""
    if isinstance(values, Mapping):
        return {key: filled_in(value, where) for key, value in values.items()}
    if isinstance(values, list):
        return [filled_in(value, where) for value in values]
    if isinstance(values, str):
        for name, path in where.items():
            values = values.replace(f"${{volume.{name}}}", str(path))
    return values


def _run(*words: str | Path) -> None:
    try:
        completed = subprocess.run(
            [str(word) for word in words], check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
    except FileNotFoundError:
        raise EnvironmentUnusable(f"there is no command {words[0]}, which volumes need") from None
    if completed.returncode:
        raise EnvironmentUnusable(f"`{' '.join(map(str, words))}` failed: {completed.stderr.strip()}")
