"""Who may work in a run directory: the rule as a table, and real processes."""

import errno
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from checkpoint import fence
from checkpoint.fence import raise_fence
from resilient.driver import lease
from resilient.driver.lease import LEASE_S, LOCK_WAIT_S, Owner, RunLease, Seen, holder, judge
from resilient.exits import EnvironmentUnusable

ROOT = Path(__file__).parents[3]
OTHER = Owner("n7", 4711, "42", "another machine", "t")

# A driver in small: it takes the lease, says so, and renews it whenever it is told to.
OWNER = """
import sys
from pathlib import Path
from resilient.driver import lease
lease.LEASE_S, lease.SETTLE_S, lease.LOCK_WAIT_S = map(float, sys.argv[3:6])
mine = lease.RunLease(Path(sys.argv[1]), sys.argv[2])
print("taken", flush=True)
for line in sys.stdin:
    print(mine.renew(), flush=True)
mine.close()
"""


class Process:
    def __init__(self, run_dir: Path, machine: str, *limits: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(run_dir), machine, *map(str, limits or (LEASE_S, 0.0, 0.3))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT), "SLURM_JOB_ID": "42"},
            text=True,
        )

    def said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def renew(self) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.said()

    def close(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.communicate(timeout=120)


@pytest.mark.parametrize(
    ("seen", "verdict"),
    [
        (Seen(True, None, False, 0.0, False, 0.0), "take"),
        (Seen(False, None, False, 0.0, False, 0.0), "wait"),
        (Seen(False, None, False, 0.0, False, LOCK_WAIT_S), "refuse"),
        (Seen(True, OTHER, True, 0.0, False, 0.0), "take"),  # of this machine: its process is gone, however young the lease is
        (Seen(False, OTHER, True, 0.0, False, 0.0), "wait"),
        (Seen(False, OTHER, True, 9 * LEASE_S, False, LOCK_WAIT_S), "refuse"),  # it is stopped, but it lives
        (Seen(True, OTHER, False, 5.0, False, 0.0), "wait"),
        (Seen(True, OTHER, False, 5.0, True, 5.0), "refuse"),
        (Seen(True, OTHER, False, LEASE_S, False, 0.0), "take"),
        (Seen(False, OTHER, False, LEASE_S, False, 0.0), "take"),  # a server still holds the lock for a machine that is gone
        (Seen(True, OTHER, False, -900.0, False, LEASE_S), "take"),  # clocks that do not agree
        (Seen(True, OTHER, False, -900.0, True, LEASE_S), "refuse"),
    ],
)
def test_the_lock_decides_on_one_machine_and_the_lease_between_machines(seen, verdict):
    assert judge(seen) == verdict


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of NFS without its lock daemon: of no file system of a test's, so the call itself is replaced."""

    def refused(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(lease.fcntl, "flock", refused)


def test_a_file_system_without_locks_is_told_from_any_other_trouble(tmp_path: Path, without_locks: None):
    with pytest.raises(OSError, match=r"no flock\(2\).*`flock`") as raised:
        RunLease(tmp_path)
    assert raised.value.filename == str(tmp_path / lease.LOCK)
    with pytest.raises(OSError, match=r"no flock\(2\).*`flock`") as raised:
        raise_fence(tmp_path, 1)
    assert raised.value.filename == str(tmp_path / fence.LOCK)


def test_where_the_file_system_has_no_locks_nobody_is_seen(tmp_path: Path, without_locks: None):
    (tmp_path / lease.LOCK).touch()
    assert holder(tmp_path) is None
    (tmp_path / lease.LEASE).write_text(json.dumps(asdict(OTHER)))
    assert holder(tmp_path) == OTHER  # that another machine has it is told by its lease


def test_a_run_directory_is_held_by_one_and_free_again_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lease, "LOCK_WAIT_S", 0.1)
    first = RunLease(tmp_path)
    assert holder(tmp_path) == first.owner
    with pytest.raises(EnvironmentUnusable, match=rf"in use by pid {os.getpid()} on "):
        RunLease(tmp_path)
    first.close()
    assert holder(tmp_path) is None
    RunLease(tmp_path).close()
    assert [path.name for path in tmp_path.iterdir()] == [lease.LOCK]


def test_a_live_owner_on_another_machine_is_left_alone_and_named(tmp_path: Path):
    owner = Process(tmp_path, "one")
    assert owner.said() == "taken"
    newcomer = Process(tmp_path, "two")
    while newcomer.process.poll() is None:
        assert owner.renew() == "None"
    assert newcomer.process.stderr is not None
    assert f"in use by pid {owner.process.pid} on " in (told := newcomer.process.stderr.read())
    assert "(job 42)" in told
    newcomer.close()
    owner.close()


def test_a_driver_that_was_killed_leaves_its_directory_to_the_next_one_on_the_machine(tmp_path: Path):
    owner = Process(tmp_path, "one")
    assert owner.said() == "taken"
    owner.process.kill()
    owner.process.wait()
    following = Process(tmp_path, "one")
    assert following.said() == "taken"
    following.close()
    owner.close()


def test_an_expired_lease_is_taken_over_and_the_old_owner_finds_out(tmp_path: Path):
    """The owner is stopped, as a machine that hangs; its lock is never given up."""
    owner = Process(tmp_path, "one")
    assert owner.said() == "taken"
    owner.process.send_signal(signal.SIGSTOP)
    old = time.time() - 60
    os.utime(tmp_path / lease.LEASE, (old, old))
    newcomer = Process(tmp_path, "two", 30.0, 0.1, 0.3)
    assert newcomer.said() == "taken"
    owner.process.send_signal(signal.SIGCONT)
    assert owner.renew().startswith(f"pid {newcomer.process.pid} on ")
    owner.close()
    assert json.loads((tmp_path / lease.LEASE).read_text())["pid"] == newcomer.process.pid  # the old owner took nothing away
    assert newcomer.renew() == "None"
    newcomer.close()
    assert not (tmp_path / lease.LEASE).exists()


def test_of_two_that_take_an_expired_lease_at_once_one_has_it(tmp_path: Path):
    (tmp_path / lease.LEASE).write_text(json.dumps({"host": "n7", "pid": 1, "job": "", "machine": "gone", "token": "x"}))
    os.utime(tmp_path / lease.LEASE, (0, 0))
    both = [Process(tmp_path, name, LEASE_S, 3.0, 0.3) for name in ("one", "two")]
    ready, _, _ = select.select([each.process.stdout for each in both], [], [])
    (first,) = [each for each in both if each.process.stdout in ready]
    (second,) = [each for each in both if each is not first]
    assert first.said() == "taken"
    while second.process.poll() is None:  # it sees the lease renewed, and gives up
        assert first.renew() == "None"
    assert second.said() == ""
    for each in both:
        each.close()


def test_a_lease_that_somebody_deleted_is_written_again(tmp_path: Path):
    mine = RunLease(tmp_path)
    (tmp_path / lease.LEASE).unlink()
    assert mine.renew() is None
    assert lease.read(tmp_path / lease.LEASE)[0] == mine.owner
    mine.close()


@pytest.mark.parametrize("left", ["", '{"host": "n'], ids=["empty", "cut"])
def test_a_lease_that_names_nobody_any_more_is_written_again_by_its_owner(tmp_path: Path, left: str):
    mine = RunLease(tmp_path)
    (tmp_path / lease.LEASE).write_text(left)
    assert mine.renew() is None
    assert lease.read(tmp_path / lease.LEASE)[0] == mine.owner == holder(tmp_path)
    mine.close()
    assert [path.name for path in tmp_path.iterdir()] == [lease.LOCK]


def test_an_owner_that_another_one_comes_before_has_not_seen_that_the_lease_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    mine = RunLease(tmp_path)
    (tmp_path / lease.LEASE).unlink()
    mine._seen_t = seen_t = 1.0
    with monkeypatch.context() as patch:  # between the look at the lease and the link that makes it
        patch.setattr(lease, "must_be_there", lambda *_: (tmp_path / lease.LEASE).write_text(json.dumps(asdict(OTHER))))
        assert mine.renew() is None
    assert mine._seen_t == seen_t
    assert mine.renew() == OTHER
    mine.close()


def test_no_lease_is_written_into_another_run_directory_in_the_place(tmp_path: Path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    mine = RunLease(run_dir)
    run_dir.rename(tmp_path / "away")
    run_dir.mkdir()
    (run_dir / lease.LOCK).touch()  # of a campaign that has ended
    with pytest.raises(FileNotFoundError, match="another directory"):
        mine.renew()
    assert [path.name for path in run_dir.iterdir()] == [lease.LOCK]
    mine.leave()


def test_a_lease_that_names_nobody_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lease, "SETTLE_S", 0.0)
    (tmp_path / lease.LEASE).write_text('{"host": "n')
    mine = RunLease(tmp_path)
    assert lease.read(tmp_path / lease.LEASE)[0] == mine.owner
    mine.close()


@pytest.fixture
def without_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without hard links."""

    def refused(old: Path, new: Path) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(old), None, str(new))

    monkeypatch.setattr(os, "link", refused)


@pytest.mark.usefixtures("without_links")
def test_a_file_system_without_hard_links_has_a_lease_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lease, "SETTLE_S", 0.0)
    mine = RunLease(tmp_path)
    assert lease.read(tmp_path / lease.LEASE)[0] == mine.owner == holder(tmp_path)
    (tmp_path / lease.LEASE).unlink()
    assert mine.renew() is None
    mine.close()
    assert [path.name for path in tmp_path.iterdir()] == [lease.LOCK]


@pytest.mark.usefixtures("without_links")
def test_of_two_that_take_a_new_lease_without_hard_links_at_once_one_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    must_be_refused_by_another_that_takes_it(tmp_path, monkeypatch)


def test_of_two_that_take_a_lease_that_names_nobody_at_once_one_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / lease.LEASE).write_text('{"host": "n')
    must_be_refused_by_another_that_takes_it(tmp_path, monkeypatch)


def must_be_refused_by_another_that_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = json.dumps({**asdict(OTHER), "token": "other"})
    settled = []

    def sleep(seconds: float) -> None:
        if seconds == lease.SETTLE_S and not settled:  # the other one has seen nobody's name either
            settled.append(seconds)
            (tmp_path / lease.LEASE).write_text(other)
        elif (tmp_path / lease.LEASE).exists():  # which it renews
            os.utime(tmp_path / lease.LEASE)

    monkeypatch.setattr(time, "sleep", sleep)
    with pytest.raises(EnvironmentUnusable, match="in use by pid 4711 on n7"):
        RunLease(tmp_path)
    assert settled and (tmp_path / lease.LEASE).read_text() == other


def test_a_lease_that_is_a_link_to_nothing_is_not_waited_for(tmp_path: Path):
    (tmp_path / lease.LEASE).symlink_to("nothing")
    with pytest.raises(FileExistsError) as refused:
        RunLease(tmp_path)
    assert refused.value.filename == str(tmp_path / lease.LEASE)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_lock_that_somebody_deleted_or_replaced_is_made_anew_and_keeps_others_out(tmp_path: Path, replaced: bool):
    mine = RunLease(tmp_path)
    (tmp_path / lease.LOCK).rename(tmp_path / "old")  # its inode is not used again
    if replaced:
        (tmp_path / lease.LOCK).write_text("")
    assert holder(tmp_path) is None
    assert mine.renew() is None
    assert holder(tmp_path) == mine.owner
    lease.must_be_there(tmp_path, mine.lock_fd)
    newcomer = Process(tmp_path, lease.machine_id())
    assert newcomer.said() == ""
    newcomer.close()
    mine.close()
    assert holder(tmp_path) is None
