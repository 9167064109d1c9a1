"""What configured tiers come to on the nodes."""

import json
import os
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from resilient.config import Config, ConfigError
from resilient.exits import EnvironmentUnusable
from resilient.storage import FILE, Storage, arrange, cost_of_a_kill, lies_in_ram, needed, read, storage_of, write


def config(*tiers: dict[str, Any], **more: Any) -> Config:
    return Config.model_validate({"name": "gpt", "checkpoint": {"every_steps": 50, "tiers": list(tiers)}, **more})


RAM, NVME = {"name": "ram", "path": "/dev/shm/me"}, {"name": "nvme", "path": "/nvme", "every_steps": 5, "replicas": 1}
DURABLE = {"name": "scratch", "path": "/scratch/run"}
WHERE = {Path("/dev/shm/me"): True, Path("/nvme"): False, Path("/scratch/run"): False}


def test_a_durable_tier_alone_gets_memory_to_copy_into() -> None:
    found = arrange(config(DURABLE), 1, "id", WHERE)
    assert [(tier.name, tier.kind) for tier in found.tiers] == [("memory", "memory"), ("scratch", "durable")]
    assert (found.memory.every_steps, found.durable.every_steps, found.buffers) == (None, 50, 2)


def test_a_durable_tier_alone_has_snapshots_in_ram_as_often_as_they_cost_little() -> None:
    found = arrange(config(DURABLE), 1, "id", WHERE)
    assert (found.memory.every_cost, found.durable.every_cost) == (0.005, None)
    assert "one step" in cost_of_a_kill(found) and "0.5 %" in cost_of_a_kill(found)


def test_who_wants_none_gets_none() -> None:
    off = Config.model_validate({"checkpoint": {"every_steps": 50, "memory_cost": 0}})
    found = arrange(off, 1, "id", {off.checkpoint.tiers[0].path: False})
    assert found.memory.every_cost is None
    assert cost_of_a_kill(found) == "up to 50 steps"


def test_tiers_that_are_named_are_all_there_are() -> None:
    assert arrange(config(NVME, DURABLE), 1, "id", WHERE).memory.every_cost is None
    assert cost_of_a_kill(arrange(config(NVME, DURABLE), 1, "id", WHERE)) == "up to 5 steps"
    named = arrange(config(RAM, DURABLE), 1, "id", WHERE)
    assert named.memory.every_cost is None
    assert cost_of_a_kill(named) == "one step"


def test_a_first_tier_in_ram_is_the_memory_and_is_due_at_every_step() -> None:
    found = arrange(config(RAM, NVME, DURABLE), 2, "id", WHERE)
    assert [(tier.name, tier.kind, tier.every_steps) for tier in found.tiers] == [
        ("ram", "memory", 1),
        ("nvme", "node", 5),
        ("scratch", "durable", 50),
    ]
    assert [tier.keep_last for tier in found.tiers] == [1, 2, 3]
    assert found.buffers == 3


def test_replicas_that_are_left_open_are_kept_in_ram_alone() -> None:
    tiers = [{**each, "replicas": "auto"} for each in (RAM, NVME, DURABLE)]
    assert [tier.replicas for tier in arrange(config(*tiers), 2, "id", WHERE).tiers] == [True, False, False]


def test_where_nodes_hold_the_same_each_needs_room_for_its_share_and_in_ram_for_no_copy() -> None:
    found = arrange(config({**RAM, "replicas": 1}, NVME, DURABLE), 4, "id", WHERE)
    memory, disk, durable = found.tiers
    assert [needed(found, tier, 4, (400, 10))[0] for tier in (memory, disk, durable)] == [600, 600, 1600]
    assert [needed(found, tier, 4, (400, 10), same=2)[0] for tier in (memory, disk, durable)] == [600, 1200, 1600]


def test_nodes_keep_out_of_each_others_way() -> None:
    found = arrange(config(RAM, NVME, DURABLE), 3, "id", WHERE)
    assert found.tiers[1].roots == ("/nvme/gpt-id/node0", "/nvme/gpt-id/node1", "/nvme/gpt-id/node2")
    assert found.durable.roots == ("/scratch/run",)


def test_a_tier_called_memory_does_not_clash() -> None:
    found = arrange(config({"name": "memory", "path": "/nvme"}, DURABLE), 1, "id", WHERE)
    assert len({tier.name for tier in found.tiers}) == 3


def test_seconds_take_the_place_of_steps() -> None:
    found = arrange(config(RAM, {**DURABLE, "every_s": 600.0}), 1, "id", WHERE)
    assert (found.durable.every_steps, found.durable.every_s) == (None, 600.0)


def test_an_identity_stays_and_goes_with_the_durable_tier(tmp_path: Path) -> None:
    durable = tmp_path / "durable"
    durable.mkdir()
    made = Config.model_validate({"checkpoint": {"tiers": [{"name": "d", "path": str(durable)}]}})
    first = storage_of(made, 1).identity
    assert storage_of(made, 1).identity == first
    (durable / ".identity").unlink()
    assert storage_of(made, 1).identity != first


def test_what_is_written_names_the_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = arrange(config(DURABLE), 1, "id", WHERE)
    monkeypatch.chdir(tmp_path)
    write(Path(), found)
    assert read(tmp_path)["run_dir"] == str(tmp_path)
    described = json.loads((tmp_path / FILE).read_text())
    del described["run_dir"]  # as an earlier version writes it
    (tmp_path / FILE).write_text(json.dumps(described))
    assert read(tmp_path)["identity"] == "id"


@pytest.mark.parametrize("copy", [shutil.copy2, os.link])
def test_a_copied_run_directory_has_places_of_its_own_on_the_nodes_and_a_moved_one_keeps_them(tmp_path: Path, copy: Any) -> None:
    def stored(name: str) -> Storage:
        tiers = [{"name": "d", "path": str(tmp_path / name / "checkpoints")}]
        return storage_of(Config.model_validate({"run_dir": str(tmp_path / name), "checkpoint": {"tiers": tiers}}), 1)

    first = stored("a")
    write(tmp_path / "a", first)
    shutil.copytree(tmp_path / "a", tmp_path / "b", copy_function=copy)
    copied = stored("b")
    assert copied.identity == first.identity
    assert copied.memory.roots != first.memory.roots
    (tmp_path / "a").rename(tmp_path / "c")
    assert stored("c").memory.roots == first.memory.roots


def begun(tmp_path: Path, durable: Path) -> Config:
    """The config of a campaign with this durable tier."""
    (tmp_path / "run").mkdir(exist_ok=True)
    tiers = [{"name": "d", "path": str(durable)}]
    return Config.model_validate({"run_dir": str(tmp_path / "run"), "checkpoint": {"tiers": tiers}})


@pytest.fixture
def durable(tmp_path: Path) -> Path:
    """Of a campaign that has had a job, and a checkpoint of step 520."""
    path = tmp_path / "durable"
    write(tmp_path / "run", storage_of(begun(tmp_path, path), 1))
    (path / "step-00000520").mkdir()
    return path


@pytest.mark.parametrize("empty", [False, True])
def test_a_durable_tier_that_is_away_is_refused_and_nothing_is_made_there(tmp_path: Path, durable: Path, empty: bool) -> None:
    durable.rename(tmp_path / "away")
    if empty:  # as where a file system is to be mounted
        durable.mkdir()
    with pytest.raises(EnvironmentUnusable, match=f"step 520 was committed on {re.escape(str(durable))}, .*mounted"):
        storage_of(begun(tmp_path, durable), 1, committed=520)
    assert list(durable.iterdir()) == [] if empty else not durable.exists()


def test_another_path_that_has_nothing_is_refused_with_the_old_one(tmp_path: Path, durable: Path) -> None:
    other = tmp_path / "other"
    with pytest.raises(ConfigError, match=f"step 520 was committed on {re.escape(str(durable))}") as refused:
        storage_of(begun(tmp_path, other), 1, committed=520)
    (problem,) = refused.value.problems
    assert (problem.key, problem.value) == ("checkpoint.tiers.0.path", str(other)) and not other.exists()


def test_another_campaigns_place_without_a_checkpoint_is_not_taken_for_this_ones(tmp_path: Path, durable: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / ".identity").write_text("0123456789ab\n")
    with pytest.raises(ConfigError, match="step 520 was committed on"):
        storage_of(begun(tmp_path, other), 1, committed=520)


def test_a_durable_tier_that_was_moved_with_what_it_holds_goes_on(tmp_path: Path, durable: Path) -> None:
    before = storage_of(begun(tmp_path, durable), 1, committed=520)
    moved = durable.rename(tmp_path / "moved")
    found = storage_of(begun(tmp_path, moved), 1, committed=520)
    assert (found.identity, found.durable.roots) == (before.identity, (str(moved),))
    (moved / ".identity").unlink()  # as `mv durable/* moved` leaves it
    storage_of(begun(tmp_path, moved), 1, committed=520)


def test_where_all_checkpoints_were_moved_away_the_campaign_begins_again(tmp_path: Path, durable: Path) -> None:
    (durable / "step-00000520").rename(tmp_path / "step-00000520")
    storage_of(begun(tmp_path, durable), 1, committed=520)


def test_a_campaign_that_has_committed_nothing_may_begin_in_another_place(tmp_path: Path) -> None:
    write(tmp_path / "run", storage_of(begun(tmp_path, tmp_path / "durable"), 1))
    storage_of(begun(tmp_path, tmp_path / "other"), 1)
    assert (tmp_path / "other/.identity").is_file()


def test_a_durable_tier_that_cannot_be_read_is_not_taken_for_an_empty_one(tmp_path: Path, durable: Path) -> None:
    durable.rename(tmp_path / "away")
    durable.symlink_to(durable)
    with pytest.raises(EnvironmentUnusable, match=f"cannot read {re.escape(str(durable))}/.identity: .*symbolic links"):
        storage_of(begun(tmp_path, durable), 1, committed=520)


@pytest.mark.parametrize("left", [b"", b"\0" * 13, b"0123", b"0123456789AB\n", b"\xff\xfe"])
def test_a_damaged_identity_is_not_believed_and_is_written_anew_of_what_the_run_directory_tells(
    tmp_path: Path, durable: Path, left: bytes
) -> None:
    mark = durable / ".identity"
    before = mark.read_bytes()
    mark.write_bytes(left)
    stored = read(tmp_path / "run")
    found = storage_of(begun(tmp_path, durable), 1, committed=520)
    assert (found.identity, found.nonce) == (stored["identity"], stored["nonce"]), "the places of snapshots are those of before"
    assert mark.read_bytes() == before


@pytest.mark.parametrize("told", [b"", None])
def test_a_damaged_identity_that_nothing_else_tells_is_no_reason_to_forget_snapshots(
    tmp_path: Path, durable: Path, told: bytes | None
) -> None:
    (durable / ".identity").write_bytes(b"")
    if told is None:
        (tmp_path / "run" / FILE).unlink()
    else:
        (tmp_path / "run" / FILE).write_bytes(told)
    with pytest.raises(EnvironmentUnusable, match=r"\.identity is damaged, .*12 hexadecimal digits.*delete the file"):
        storage_of(begun(tmp_path, durable), 1, committed=520)
    assert (durable / ".identity").read_bytes() == b""
    (durable / ".identity").unlink()
    storage_of(begun(tmp_path, durable), 1, committed=520)


def test_an_identity_that_was_cut_off_before_anything_was_done_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "durable").mkdir()
    (tmp_path / "durable/.identity").write_bytes(b"")
    assert (
        storage_of(begun(tmp_path, tmp_path / "durable"), 1).identity == (tmp_path / "durable/.identity").read_text().strip() != ""
    )


def test_what_says_where_snapshots_are_is_durable_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, str]] = []
    fsync, replace = os.fsync, Path.replace

    def synced(fd: int) -> None:
        done.append(("fsync", Path(f"/proc/self/fd/{fd}").readlink().name))
        fsync(fd)

    def replaced(path: Path, target: Path) -> Path:
        done.append(("replace", target.name))
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    write(tmp_path / "run", storage_of(begun(tmp_path, tmp_path / "durable"), 1))
    mark = [("fsync", ".identity.new"), ("replace", ".identity"), ("fsync", "durable")]
    assert done == [*mark, ("fsync", f"{FILE}.new"), ("replace", FILE), ("fsync", "run")]


def test_a_description_of_the_tiers_that_is_damaged_is_told(
    tmp_path: Path, durable: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run" / FILE).write_bytes(b"")
    storage_of(begun(tmp_path, durable), 1, committed=520)
    assert "storage.json does not describe the tiers" in caplog.text and "are not found" in caplog.text


def test_a_durable_tier_that_answers_late_is_waited_for(tmp_path: Path, durable: Path) -> None:
    mark = durable / ".identity"
    identity = mark.read_text()
    mark.unlink()
    os.mkfifo(mark)  # reading it takes until somebody writes
    late = threading.Timer(0.2, mark.write_text, [identity])
    late.start()
    try:
        assert storage_of(begun(tmp_path, durable), 1, committed=520).identity == identity.strip()
    finally:
        late.join()


def test_ram_is_known_by_its_file_system() -> None:
    assert lies_in_ram(Path("/dev/shm/not/yet/there"))
    assert not lies_in_ram(Path("/usr/not/yet/there"))
