"""What a node has in RAM beside its tiers, where others have left no room in /dev/shm."""

import tempfile
from pathlib import Path

import pytest
from mounts import needs_root, small_disk

from resilient.agent import memory


@needs_root
@pytest.mark.parametrize("size_bytes", [memory.LEAST_BYTES - 4096, 2 * memory.LEAST_BYTES])
def test_what_a_node_keeps_is_in_the_temporary_directory_where_shared_memory_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size_bytes: int
) -> None:
    (tmp_path / "tmp").mkdir()
    with small_disk(tmp_path / "shm", size_bytes) as shm:
        monkeypatch.setattr(memory, "MEMORY", shm)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
        roomy = size_bytes >= memory.LEAST_BYTES
        regions = memory.region_directory(tmp_path / "run", 0)
        assert regions.parent == (shm if roomy else tmp_path / "tmp")
        memory.salvaged(regions)
        (shm / "filling").write_bytes(bytes(size_bytes // 2 + memory.LEAST_BYTES // 4))
        assert memory.region_directory(tmp_path / "run", 0) == regions, "it is found also where there is no room any more"
        assert memory.region_directory(tmp_path / "run", 1).parent == tmp_path / "tmp"


def test_of_two_places_that_are_full_the_temporary_directory_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "LEAST_BYTES", 1 << 62)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert memory.region_directory(tmp_path / "run", 0).parent == tmp_path
