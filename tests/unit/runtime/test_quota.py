"""Quotas: what the tools of file systems print, and programs in their place that print it."""

import sys
import time
from pathlib import Path

import psutil
import pytest

from resilient.health.disk import DiskState, TierSpec, inspect, judge
from resilient.health.quota import Quota, parse_fileset, parse_lfs, parse_lfs_project, parse_scale, quotas, site_places

KIB, GIB, TIB = 1 << 10, 1 << 30, 1 << 40

# Lustre: limits of blocks alone; a long path on a line of its own; over the soft limit; none at all.
LFS_BLOCKS = """\
Disk quotas for usr alice (uid 4711):
      Filesystem  kbytes   quota   limit   grace   files   quota   limit   grace
        /lustre7 982177580       0 1000000000       - 443208230 0      0       -
uid 4711 is using default file quota setting
"""
LFS_WRAPPED = """\
Disk quotas for prj 200020 (pid 200020):
     Filesystem  kbytes   quota   limit   grace   files   quota   limit   grace
/hpc/projects/group.royer
                 1225350212       0       0       -  714982       0  1000000       -
pid 200020 is using default block quota setting
"""
LFS_OVER = """\
Disk quotas for usr alice (uid 4711):
     Filesystem  kbytes   quota   limit   grace   files   quota   limit   grace
 /lustre/scratch 5242880*  4194304 6291456  6d23h59m58s   [120000]  0  1000000       -
Disk quotas for grp climate (gid 2001):
     Filesystem  kbytes   quota   limit   grace   files   quota   limit   grace
 /lustre/scratch 4194304  8388608 16777216       -     400     800    1600       -
"""
LFS_NONE = """\
Disk quotas for usr alice (uid 4711):
     Filesystem  kbytes   quota   limit   grace   files   quota   limit   grace
              .  1840       0       0       -      23       0       0       -
"""

# Spectrum Scale, with `-Y`.
SCALE_NAMES = (
    "mmlsquota::HEADER:version:reserved:reserved:filesystemName:quotaType:id:name:blockUsage:blockQuota:blockLimit:blockInDoubt:"
    "blockGrace:filesUsage:filesQuota:filesLimit:filesInDoubt:filesGrace:remarks:quota:defQuota:fid:filesetname:\n"
)
SCALE_USER = (
    SCALE_NAMES + "mmlsquota::0:1:::scratch:USR:4711:alice:2097152:10485760:12582912:1024:none:4000:0:500000:7:none:e:on:off:::\n"
    "mmlsquota::0:1:::scratch:USR:4711:alice:5:6:7:0:none:0:0:0:0:none:e:on:off:2:other:\n"
)
SCALE_FILESET = (
    SCALE_NAMES + "mmlsquota::0:1:::scratch:FILESET:9:climate:100:0:0:0:none:3999990:4000000:4400000:0:none:e:on:off:::\n"
)
ATTRIBUTES = """\
file name:            run
metadata replication: 2 max 2
data replication:     1 max 2
storage pool name:    system
fileset name:         climate
snapshot name:
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (LFS_BLOCKS, [Quota("user alice", (1000000000 - 982177580) * KIB, None)]),
        (LFS_WRAPPED, [Quota("project 200020", None, 1000000 - 714982)]),
        (LFS_OVER, [Quota("user alice", 0, 880000), Quota("group climate", 4194304 * KIB, 400)]),
        (LFS_NONE, []),
        ("", []),
        ("lfs quota: '/home/alice' not on a mounted Lustre filesystem\n", []),
    ],
)
def test_what_lfs_prints_is_understood(text: str, found: list[Quota]):
    assert parse_lfs(text) == found


def test_the_project_of_a_directory_is_understood():
    assert parse_lfs_project("200020 P /hpc/projects/group.royer\n") == "200020"
    assert parse_lfs_project("    0 - /home/alice\n") is None
    assert parse_lfs_project("") is None


def test_what_mmlsquota_prints_is_understood():
    user = Quota("user alice", (10485760 - 2097152 - 1024) * KIB, 500000 - 4007)
    assert parse_scale(SCALE_USER, "climate") == [user]
    assert parse_scale(SCALE_USER, "other") == [user, Quota("user alice", KIB, None)]
    assert parse_scale(SCALE_FILESET, "climate") == [Quota("fileset climate", None, 10)]
    assert parse_scale("mmlsquota: 6027-595 alice is not a valid user.\n", None) == []
    assert parse_scale(SCALE_NAMES + "mmlsquota::0:1:::scratch:USR:4711:alice:no:limits\n", None) == []
    assert parse_fileset(ATTRIBUTES) == "climate"
    assert parse_fileset("") is None


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs start on a busy machine."""
    monkeypatch.setattr("resilient.health.quota.ASK_S", 120.0)


def program(directory: Path, name: str, answers: dict[str, str]) -> None:
    """A program that gives the answer of the first key that all stands in its arguments, and fails without one."""
    path = directory / name
    lines = [f"import sys\ngiven = ' '.join(sys.argv[1:])\nanswers = {answers!r}"]
    lines.append("found = [text for words, text in answers.items() if all(word in given for word in words.split())]")
    lines.append("sys.stdout.write(found[0]) if found else sys.exit(1)")
    path.write_text(f"#!{sys.executable} -S\n" + "\n".join(lines))
    path.chmod(0o755)


def test_the_tools_that_are_there_are_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    assert quotas(tmp_path) == []
    program(programs, "lfs", {"quota -p 200020": LFS_WRAPPED, "quota": LFS_BLOCKS, "project -d": f"200020 P {tmp_path}\n"})
    assert [quota.owner for quota in quotas(tmp_path)] == ["user alice", "project 200020"]
    program(programs, "mmlsattr", {"-L": ATTRIBUTES})
    program(programs, "mmlsquota", {"-Y -j climate": SCALE_FILESET, "-Y": SCALE_USER})
    assert [quota.owner for quota in quotas(tmp_path)] == ["user alice", "project 200020", "user alice", "fileset climate"]
    program(programs, "lfs", {})
    assert [quota.owner for quota in quotas(tmp_path)] == ["user alice", "fileset climate"]


def test_a_tool_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("resilient.health.quota.ASK_S", 0.2)
    (tmp_path / "lfs").write_text(f"#!{sys.executable} -S\nimport signal\nsignal.pause()\n")
    (tmp_path / "lfs").chmod(0o755)
    assert quotas(tmp_path) == []


def test_a_tool_that_a_wrapper_has_started_is_given_up_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its wrapper's end is not its own: it holds what it writes to."""
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setattr("resilient.health.quota.ASK_S", 1.0)
    started = tmp_path / "started"
    (programs / "lfs").write_text(f"#!/bin/sh\nsleep 600 &\necho $! >> {started}\nwait\n")
    (programs / "lfs").chmod(0o755)
    assert quotas(tmp_path) == []
    for pid in map(int, started.read_text().split()):
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)


NEEDS = TierSpec("t", Path("/t"), needed_bytes=10 * GIB, needed_files=100)


@pytest.mark.parametrize(
    ("tier", "quota", "verdict", "words"),
    [
        (
            NEEDS,
            Quota("user a", 9 * GIB, None),
            "fail",
            "the quota of user a leaves 9.0 GiB, and it must hold 10.0 GiB and 100 files",
        ),
        (NEEDS, Quota("project 7", 20 * GIB, 99), "fail", "20.0 GiB and 99 files"),
        (NEEDS, Quota("user a", 10 * GIB, 100), "ok", "can be written; the quota of user a leaves 10.0 GiB and 100 files"),
        (TierSpec("t", Path("/t")), Quota("user a", None, 10), "warn", "leaves 10 files"),
    ],
)
def test_a_tier_is_judged_by_what_quotas_leave(tier: TierSpec, quota: Quota, verdict: str, words: str):
    found = judge(tier, DiskState(Path("/t"), free_bytes=TIB, quotas=(quota,)))
    assert found.verdict == verdict
    assert words in found.text


def test_what_is_held_already_counts_as_room_under_a_quota():
    seen = DiskState(Path("/t"), free_bytes=TIB, held_bytes=9 * GIB, held_files=90, quotas=(Quota("user a", GIB, 10),))
    assert judge(NEEDS, seen).verdict == "ok"


def test_a_look_asks_for_quotas_only_where_they_are_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program(tmp_path, "lfs", {"quota": LFS_BLOCKS})
    monkeypatch.setenv("PATH", str(tmp_path))
    assert inspect(TierSpec("t", tmp_path, measured=False)).quotas == ()
    assert [quota.owner for quota in inspect(TierSpec("t", tmp_path, measured=False, quotas=True)).quotas] == ["user alice"]


def test_the_places_of_the_site_are_those_that_are_there(tmp_path: Path):
    environ = {"SCRATCH": str(tmp_path), "PROJECT": str(tmp_path / "none"), "HOME": "/"}
    assert site_places(environ) == {"$SCRATCH": tmp_path}
