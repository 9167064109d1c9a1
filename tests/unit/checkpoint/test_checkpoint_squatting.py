"""A snapshot daemon whose places another user of the machine has made before it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from lone_daemon import LoneDaemon
from stranger import needs_root, shared_place, stranger

from checkpoint import step_path
from checkpoint.protocol import Inventory, Retain, TakeInventory

pytestmark = needs_root


@pytest.fixture
def shared() -> Iterator[Path]:
    with shared_place() as path:
        yield path


def evil(target: Path) -> tuple[str, str]:
    """A blueprint whose one document is a file of the attacker's choice."""
    arrays = json.dumps({"arrays": [], "documents": {str(target): "ssh-rsa mallory"}})
    return arrays, json.dumps({"generation": 1, "digest": "evil", "slots": {}})


def test_a_blueprint_in_a_directory_of_somebody_else_writes_nothing(shared: Path, tmp_path: Path) -> None:
    target = tmp_path / "authorized_keys"
    stranger(
        'mkdir -m 0777 "$1"; printf %s "$2" >"$1/arrays-evil.json"; printf %s "$3" >"$1/slots-rank0.json"; chmod 0666 "$1"/*',
        shared / "k",
        *evil(target),
    )
    with LoneDaemon(shared) as daemon:
        daemon.start()
        try:
            daemon.begin(1)
            daemon.wait_for_lease()
        except (AssertionError, BrokenPipeError):  # it has ended, perhaps before it was told of the session
            daemon.process.wait(60)
        log = daemon.log.read_text()
    assert not target.exists()
    assert f"{shared / 'k'} is not used: it belongs to uid" in log and "Traceback" not in log


def test_buffers_are_made_elsewhere_where_their_place_is_somebody_elses(shared: Path, tmp_path: Path) -> None:
    stranger('mkdir -m 0777 "$1" "$1/buffer-0"', shared / "ram")
    with LoneDaemon(shared) as daemon:
        daemon.start()
        daemon.begin(1)
        daemon.send(TakeInventory(generation=1))
        daemon.wait_for(Inventory)
        log = daemon.log.read_text()
    assert f"no buffers in {shared / 'ram'}: {shared / 'ram'} is not used: it belongs to uid" in log
    assert sorted(path.name for path in (shared / "ram").iterdir()) == ["buffer-0"]


def test_what_is_behind_a_link_of_somebody_else_is_neither_taken_for_a_snapshot_nor_deleted(shared: Path, tmp_path: Path) -> None:
    mine = step_path(tmp_path / "checkpoints", 5)
    mine.mkdir(parents=True)
    (mine / "weights").write_text("of a month")
    stranger('mkdir -m 0777 "$1"; ln -s "$2" "$1/replica-0"', shared / "nvme", mine.parent)
    with LoneDaemon(shared) as daemon:
        daemon.start()
        daemon.begin(1)
        daemon.send(Retain(generation=1, tier="nvme", steps=(), upto=9))
        daemon.sync(1)
        daemon.send(TakeInventory(generation=1))
        assert daemon.wait_for(Inventory).shards == ()
    assert (mine / "weights").read_text() == "of a month"
