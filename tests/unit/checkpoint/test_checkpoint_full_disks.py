"""Exports and imports onto a disk that is full."""

from pathlib import Path

import pytest
import torch
from checkpoint_commands import run, whole
from mounts import needs_root, small_disk

from checkpoint import save, save_one_by_one


@needs_root
@pytest.mark.parametrize("form", ["torch", "zarr"])
@pytest.mark.parametrize("room", [4 << 10, 200 << 10])
def test_an_export_to_a_full_disk_is_told_with_its_place(root: Path, tmp_path: Path, form: str, room: int) -> None:
    path = save(root, 1, [whole("x", torch.ones(1 << 18)), whole("y", torch.ones(10))], {}, generation=0).path
    with small_disk(tmp_path / "disk", room) as disk:
        result = run("export", path, "--format", form, "--out", disk / "out")
        assert (result.exit_code, result.stderr) == (69, f"resilient: {disk}/out: No space left on device\n")
        assert list(disk.iterdir()) == []


@needs_root
def test_a_checkpoint_that_is_imported_to_a_full_disk_is_told_with_its_place(tmp_path: Path) -> None:
    data = torch.ones(1 << 18)
    with small_disk(tmp_path / "disk", 64 << 10) as disk:
        with pytest.raises(OSError, match="No space left") as caught:
            save_one_by_one(disk, 0, [whole("x", data.to("meta"))], [whole("x", data)], {})
        assert caught.value.filename == f"{disk}/step-00000000"
