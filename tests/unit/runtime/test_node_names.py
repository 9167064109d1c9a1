"""Which names `resilient evacuate` takes for a node, and what it says of the others."""

import fcntl
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from stranger import UID, needs_root, shared_place, stranger_for_a_while

from resilient import evacuate as evacuation
from resilient import ledger
from resilient.driver.lease import RunLease, holder
from resilient.evacuate import FILE, LOCK, Request, evacuate, requested
from resilient.exits import EnvironmentUnusable
from resilient.node_names import Nodes, meant, nodes_of


@pytest.fixture(autouse=True)
def _umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """A driver that is there, in its second generation; a spare has taken the place of node 1."""
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"cluster": {"nodes": "auto", "spares": 1}}))
    lease = RunLease(tmp_path)
    begin(tmp_path, [["x1", "x2", "x3", "x4", "x5"]], [["a.site", "b.site"]], [["a.site", "c.site"]])
    yield tmp_path
    lease.close()


def begin(run_dir: Path, *generations: list[list[str]]) -> None:
    """An older job of five nodes, then one of two and a spare."""
    with ledger.Ledger(run_dir) as written:
        for number, (hosts,) in enumerate(generations):
            layout = {"nodes": len(hosts)}
            if number < 2:
                written.event("run_started", {"name": "x", "target_step": 9, "layout": layout}, generation=0, t=1.0)
            members = [0, 2] if number == 2 else list(range(len(hosts)))
            fields = {"nodes": hosts, "members": members, "world_size": 4, "layout": layout, "resumed_step": 0, "tier": None}
            written.event("generation_started", fields, generation=number, t=2.0)


@pytest.mark.parametrize("name", ["foo", "3", "-1", "x1", "01", "", "."])
@pytest.mark.parametrize("resume", [False, True])
def test_a_node_that_there_is_not_is_refused_and_nothing_is_asked(run_dir: Path, name: str, resume: bool):
    with pytest.raises(EnvironmentUnusable) as refused:
        evacuate(run_dir, name, resume=resume)
    assert f"has no node {name!r}: there are 0 (a.site), 1 (b.site), 2 (c.site)" in str(refused.value)
    assert not (run_dir / FILE).exists()


@pytest.mark.parametrize("name", ["0", "1", "2", "a", "b.site", "c.elsewhere"])
def test_a_node_by_number_or_host_is_asked_for_a_spare_and_one_that_was_lost_too(run_dir: Path, name: str):
    assert evacuate(run_dir, name, resume=False).endswith(f"leaves node {name} at a step boundary, if it can")
    assert (run_dir / FILE).exists()


def test_of_a_name_that_a_spare_may_have_the_driver_says_whether_it_knows_it(tmp_path: Path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"cluster": {"spares": 1}}))
    lease = RunLease(tmp_path)
    try:
        begin(tmp_path, [["a", "b"]])
        assert evacuate(tmp_path, "c", resume=False).endswith(
            "is asked to leave node c, and says so if it knows no node of that name"
        )
        assert "leaves node 2" in evacuate(tmp_path, "2", resume=False)
        with pytest.raises(EnvironmentUnusable, match=r"there are 0 \(a\), 1 \(b\), 2$"):
            evacuate(tmp_path, "3", resume=False)
    finally:
        lease.close()


@needs_root
def test_what_root_asks_for_the_users_driver_reads_and_he_can_ask_again():
    with shared_place() as shared:
        run_dir = shared / "run"
        run_dir.mkdir(mode=0o700)
        lease = RunLease(run_dir)
        try:
            for path in (run_dir, *run_dir.iterdir()):
                os.chown(path, UID, UID)
            evacuate(run_dir, "0", resume=False)
            with stranger_for_a_while():
                assert requested(run_dir, lease.owner.token).nodes == ("0",)
                evacuate(run_dir, "1", resume=False)
            evacuate(run_dir, "2", resume=False)
            assert requested(run_dir, lease.owner.token).nodes == ("0", "1", "2")
            assert {(path.stat().st_uid, path.stat().st_gid) for path in run_dir.glob("evacuate*")} == {(UID, UID)}
        finally:
            lease.close()


@needs_root
def test_what_root_asks_is_written_nowhere_else_where_the_user_has_put_links(
    run_dir: Path, tmp_path_factory: pytest.TempPathFactory
):
    target = tmp_path_factory.mktemp("of root") / "shadow"
    target.write_text("root:x:")
    for name in (FILE, f"{FILE}.{os.getpid()}"):
        (run_dir / name).symlink_to(target)
    (run_dir / LOCK).symlink_to(target.with_name("new"))
    with pytest.raises(EnvironmentUnusable, match="cannot write"):
        evacuate(run_dir, "0", resume=False)
    (run_dir / LOCK).unlink()
    evacuate(run_dir, "0", resume=False)
    assert target.read_text() == "root:x:" and target.stat().st_uid == 0 and not (run_dir / FILE).is_symlink()
    assert list(target.parent.iterdir()) == [target]


def test_two_that_ask_at_once_are_both_heard(run_dir: Path, monkeypatch: pytest.MonkeyPatch):
    both = threading.Barrier(2)

    def late(directory: Path, token: str) -> Request:
        try:
            return requested(directory, token)
        finally:
            with suppress(threading.BrokenBarrierError):
                both.wait(1.0)  # the other one has read, too, where it may

    monkeypatch.setattr(evacuation, "requested", late)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda node: evacuate(run_dir, node, resume=False), ["0", "1"]))
    owner = holder(run_dir)
    assert owner is not None and sorted(requested(run_dir, owner.token).nodes) == ["0", "1"]


def test_one_that_asks_does_not_wait_for_another_without_end(run_dir: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(evacuation, "LOCK_S", 0.1)
    with (run_dir / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(EnvironmentUnusable, match=r"has held .*evacuate\.lock for .*: call again"):
            evacuate(run_dir, "0", resume=False)
    evacuate(run_dir, "0", resume=False)


def test_a_job_that_has_told_nothing_yet_is_asked(tmp_path: Path):
    assert nodes_of(tmp_path) == Nodes({}, None)
    assert Nodes({}, None).has("foo") is None


def test_a_node_whose_host_is_not_known_is_called_by_its_number_alone():
    assert meant("", {0: ""}) == meant(".x", {0: ""}) == set()
    assert meant("0", {0: ""}) == {0}
    assert meant("a.x", {0: "a", 1: "a.y", 2: "b"}) == {0, 1}
