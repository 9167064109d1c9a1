"""Another user of the machine has made the directories in RAM that a campaign would use, before it starts."""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from stranger import UID, needs_root, shared_place, stranger, stranger_for_a_while

from resilient import storage
from resilient.agent import memory
from resilient.config import Config
from resilient.driver import spill_file

pytestmark = needs_root


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with shared_place() as path:
        yield path


def guessed(run_dir: Path, node: int) -> Path:
    """What everybody can work out who knows where the run directory is."""
    digest = hashlib.blake2b(str(run_dir).encode(), digest_size=6).hexdigest()
    return Path("/dev/shm") / f"resilient-{os.getuid()}-{digest}-node{node}"


def test_a_link_in_the_place_of_the_heartbeat_regions_costs_no_file_and_keeps_no_agent_from_starting(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home/thesis.tex").write_text("years of work")
    squatted = guessed(tmp_path / "run", 0)
    stranger('ln -s "$1" "$2"', tmp_path / "home", squatted)
    try:
        pages = memory.region_directory(tmp_path / "run", 0)
        memory.salvaged(pages)
        memory.leave_record(pages, "127.0.0.1:1")
        record = memory.agent_record(tmp_path / "run", 0)
        assert record is not None and record.pid == os.getpid()
        assert (tmp_path / "home/thesis.tex").read_text() == "years of work"
        memory.clear_up(pages)
        assert not pages.exists()
    finally:
        squatted.unlink()


def test_a_run_finds_its_own_directories_again_and_those_of_before_an_update(tmp_path: Path) -> None:
    pages = memory.region_directory(tmp_path / "run", 1)
    assert memory.region_directory(tmp_path / "run", 1) != pages  # nobody can know it before it is there
    memory.salvaged(pages)
    assert memory.region_directory(tmp_path / "run", 1) == pages
    assert memory.directories(tmp_path / "run") == [pages]
    pages.rmdir()
    old = guessed(tmp_path / "run", 1)
    old.mkdir(mode=0o700)
    assert memory.region_directory(tmp_path / "run", 1) == old
    old.rmdir()


def campaign(tmp_path: Path, ram: Path) -> Config:
    tiers = [{"name": "ram", "path": str(ram), "every_steps": 1}, {"name": "durable", "path": str(tmp_path / "durable")}]
    (tmp_path / "durable").mkdir(exist_ok=True)
    (tmp_path / "run").mkdir(exist_ok=True)
    return Config.model_validate({"name": "gpt", "run_dir": str(tmp_path / "run"), "checkpoint": {"tiers": tiers}})


def test_places_on_the_nodes_have_a_random_part_which_the_next_job_finds(shared: Path, tmp_path: Path) -> None:
    config = campaign(tmp_path, shared)
    first = storage.storage_of(config, 2)
    storage.write(tmp_path / "run", first)
    assert first.nonce is not None and len(first.nonce) == 16
    assert [Path(root).parent.name for root in first.memory.roots] == [f"gpt-{first.identity}-{first.nonce}"] * 2
    assert storage.storage_of(config, 2) == first
    Path(first.memory.roots[0]).mkdir(parents=True, mode=0o700)
    assert storage.storage_of(config, 2) == first


def test_a_place_that_somebody_has_taken_meanwhile_is_given_up_for_another(shared: Path, tmp_path: Path) -> None:
    config = campaign(tmp_path, shared)
    first = storage.storage_of(config, 1)
    storage.write(tmp_path / "run", first)
    stranger('mkdir -m 0777 "$1"', Path(first.memory.roots[0]).parent)
    second = storage.storage_of(config, 1)
    assert second.nonce != first.nonce and second.identity == first.identity


def test_a_campaign_of_before_an_update_finds_its_snapshots_where_they_are(shared: Path, tmp_path: Path) -> None:
    config = campaign(tmp_path, shared)
    described = json.loads(json.dumps(storage.storage_of(config, 1).__dict__, default=lambda each: each.__dict__))
    del described["nonce"]
    (tmp_path / "run/storage.json").write_text(json.dumps(described))
    assert storage.storage_of(config, 1).memory.roots == (str(shared / f"gpt-{described['identity']}/node0"),)


def test_what_a_driver_has_spilled_is_found_and_what_a_stranger_has_put_there_is_not(shared: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    name = spill_file.new_directory(tmp_path / "run", "0123456789ab", shared).name.rsplit("-", 1)[0]
    item = json.dumps({"number": 1, "path": "events.jsonl", "text": "forged\n", "whole": False})
    stranger('mkdir "$1" "$2"; echo "$3" | tee "$1/1.jsonl" >"$2/1.jsonl"', shared / name, shared / f"{name}-{'0' * 16}", item)
    assert spill_file.directories_of(tmp_path / "run", "0123456789ab", shared) == []
    mine = spill_file.new_directory(tmp_path / "run", "0123456789ab", shared)
    mine.mkdir(mode=0o700)
    assert spill_file.directories_of(tmp_path / "run", "0123456789ab", shared) == [mine]


def test_a_directory_that_may_not_be_read_in_the_place_of_spill_files_keeps_nobody_from_starting(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: UID)
    (shared / f"resilient-{UID}").mkdir(mode=0o700)  # where an earlier version had them, and here root's
    (shared / "of-${USER}").mkdir(mode=0o700)  # as a tier of this name is made
    with stranger_for_a_while():
        assert spill_file.directories_of(Path("/run-of-a-stranger"), "0123456789ab", shared) == []
        assert spill_file.directories_of(Path("/run-of-a-stranger"), "0123456789ab", shared / "of-${USER}") == []
