"""What health checks make of what they see: tables, and sysfs text as machines have it."""

import multiprocessing
import os
from pathlib import Path

import pytest

from resilient.agent import node_check
from resilient.agent.settings import AgentSettings
from resilient.health import disk, gpus, interfaces, machine
from resilient.health.clock import Skew, judge_skew
from resilient.health.disk import DiskState, TierSpec
from resilient.health.doctor import merged
from resilient.health.gpus import Gpu
from resilient.health.node import NodeCheck, settle, tiers_of
from resilient.health.report import Finding, Report

GIB = 1 << 30

# -- tiers ---------------------------------------------------------------------------------------------------------------

PLAIN = TierSpec("scratch", Path("/scratch/x"))
SIZED = TierSpec("scratch", Path("/scratch/x"), needed_bytes=10 * GIB, needed_files=400)
HERE = Path("/scratch")


@pytest.mark.parametrize(
    ("tier", "seen", "verdict", "words"),
    [
        pytest.param(
            PLAIN, DiskState(HERE, trouble="Read-only file system"), "fail", "/scratch cannot be written: Read-only", id="ro"
        ),
        pytest.param(PLAIN, DiskState(HERE, free_bytes=GIB, free_files=9999), "ok", "", id="nothing known of sizes"),
        pytest.param(PLAIN, DiskState(HERE, free_bytes=9 << 20, free_files=9999), "warn", "9.0 MiB are free", id="little room"),
        pytest.param(PLAIN, DiskState(HERE, free_bytes=GIB, free_files=10), "warn", "10 inodes", id="few inodes"),
        pytest.param(PLAIN, DiskState(HERE, free_bytes=GIB, free_files=None), "ok", "", id="inodes are not counted"),
        pytest.param(SIZED, DiskState(HERE, free_bytes=10 * GIB, free_files=400), "ok", "", id="just enough"),
        pytest.param(
            SIZED, DiskState(HERE, free_bytes=9 * GIB, free_files=400), "fail", "must hold 10.0 GiB", id="too little room"
        ),
        pytest.param(
            SIZED, DiskState(HERE, free_bytes=10 * GIB, free_files=399), "fail", "must hold 400 files", id="too few inodes"
        ),
        pytest.param(SIZED, DiskState(HERE, free_bytes=10 * GIB, free_files=None), "ok", "", id="enough, inodes are not counted"),
        pytest.param(
            SIZED,
            DiskState(HERE, free_bytes=GIB, free_files=0, held_bytes=9 * GIB, held_files=400),
            "ok",
            "",
            id="it is there already",
        ),
        pytest.param(PLAIN, DiskState(HERE, free_bytes=GIB, write_bytes_per_s=9e6), "warn", "8.6 MiB a second", id="slow"),
    ],
)
def test_a_tier_is_judged_by_what_it_must_hold(tier: TierSpec, seen: DiskState, verdict: str, words: str):
    finding = disk.judge(tier, seen)
    assert (finding.check, finding.verdict) == ("tier scratch", verdict)
    assert words in finding.text


def test_looking_at_a_tier_leaves_nothing_behind_and_makes_no_directory(tmp_path: Path):
    tier = TierSpec("later", tmp_path / "not/there/yet")
    seen = disk.inspect(tier)
    assert seen.place == tmp_path and not seen.trouble
    assert seen.write_bytes_per_s and seen.read_bytes_per_s and seen.free_bytes
    assert seen.skew is not None and abs(seen.skew.seconds) < 1
    assert list(tmp_path.iterdir()) == []


def test_what_a_campaign_holds_already_counts_as_room(tmp_path: Path):
    for step in (1, 2, 3):
        (tmp_path / f"step-{step}").mkdir()
        (tmp_path / f"step-{step}" / "shard").write_bytes(os.urandom(1 << 20))
    seen = disk.inspect(TierSpec("durable", tmp_path, held="step-*", held_newest=2, measured=False))
    assert seen.held_files == 2
    assert seen.held_bytes == pytest.approx(2 << 20, rel=0.1)
    assert seen.write_bytes_per_s is None


# -- clocks --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("skew_s", "verdict", "words"),
    [(0.2, "ok", ""), (-2.0, "warn", "2.0 s behind"), (2.0, "warn", "2.0 s ahead"), (-4000.0, "fail", "4,000.0 s behind")],
)
def test_clocks_may_be_a_second_apart(skew_s: float, verdict: str, words: str):
    finding = judge_skew(Skew(skew_s, 0.0), "the server")
    assert finding.verdict == verdict
    assert words in finding.text


def test_a_time_taken_between_two_others_agrees_with_them():
    assert Skew.between(10.0, 9.99, 10.5).seconds == 0
    assert Skew.between(10.0, 10.4, 10.5).seconds == 0
    assert Skew.between(10.0, 7.0, 10.5).seconds == pytest.approx(-3, abs=0.05)
    assert Skew.between(10.0, 14.5, 10.5).seconds == pytest.approx(4)


# -- links ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """Two network interfaces and two InfiniBand ports as /sys tells of them, all well."""
    for name, speed in (("eth0", "25000"), ("eth1", "-1")):
        directory = tmp_path / "class/net" / name
        directory.mkdir(parents=True)
        for file, text in (("carrier", "1"), ("carrier_up_count", "1"), ("carrier_down_count", "0"), ("speed", speed)):
            (directory / file).write_text(text + "\n")
    for device in ("mlx5_0", "mlx5_1"):
        directory = tmp_path / "class/infiniband" / device / "ports/1"
        (directory / "counters").mkdir(parents=True)
        for file, text in (("state", "4: ACTIVE"), ("phys_state", "5: LinkUp"), ("rate", "400 Gb/sec (4X NDR)")):
            (directory / file).write_text(text + "\n")
    return tmp_path


def told(sysfs: Path, *names: str, **environ: str) -> dict[str, tuple[str, str]]:
    """Verdict and text by link."""
    found = interfaces.judge(interfaces.inspect("", environ, sys=sysfs, interfaces=names), environ)
    return {each.check.removeprefix("link "): (each.verdict, each.text) for each in found}


def test_links_that_are_up_are_told_with_their_speed(sysfs: Path):
    wires = interfaces.inspect("", {}, sys=sysfs, interfaces=["eth0", "eth1"])
    assert [(wire.name, wire.gbit_s) for wire in wires] == [("eth0", 25), ("eth1", None), ("mlx5_0:1", 400), ("mlx5_1:1", 400)]
    assert {finding.verdict for finding in interfaces.judge(wires, {})} == {"ok"}


def test_an_interface_in_use_that_is_down_fails(sysfs: Path):
    (sysfs / "class/net/eth1/carrier").write_text("0\n")
    verdict, text = told(sysfs, "eth0", "eth1")["eth1"]
    assert verdict == "fail" and "no carrier" in text


def test_a_run_over_the_loopback_can_do_without_the_other_interfaces(sysfs: Path):
    (sysfs / "class/net/eth0").rename(sysfs / "class/net/lo")
    (sysfs / "class/net/eth1/carrier").write_text("0\n")
    assert told(sysfs, "lo", "eth1")["eth1"][0] == "warn"


def test_a_port_that_is_down_fails_if_it_must_be_used_or_no_other_is_up(sysfs: Path):
    (sysfs / "class/infiniband/mlx5_1/ports/1/state").write_text("1: DOWN\n")
    assert told(sysfs, "eth0")["mlx5_1:1"][0] == "warn"
    assert told(sysfs, "eth0", NCCL_IB_HCA="mlx5_1")["mlx5_1:1"][0] == "fail"
    (sysfs / "class/infiniband/mlx5_0/ports/1/state").write_text("2: INIT\n")
    assert [told(sysfs, "eth0")[f"mlx5_{each}:1"][0] for each in (0, 1)] == ["fail", "fail"]


def test_a_port_that_is_slower_than_the_others_is_told(sysfs: Path):
    (sysfs / "class/infiniband/mlx5_1/ports/1/rate").write_text("200 Gb/sec (4X HDR)\n")
    verdict, text = told(sysfs, "eth0")["mlx5_1:1"]
    assert verdict == "warn" and "200 Gbit/s" in text and "400" in text


# -- what the machine grants ---------------------------------------------------------------------------------------------


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A /proc of a process in the cgroup /user/job, of both versions."""
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text("4:cpu,cpuacct:/\n3:memory:/user/job\n2:pids:/user/job\n0::/user/job\n")
    (proc / "sys/net/ipv4").mkdir(parents=True)
    (proc / "sys/net/ipv4/ip_local_port_range").write_text("32768\t33000\n")
    return proc


@pytest.fixture
def unified(proc: Path) -> Path:
    """The same, of version 2 alone."""
    (proc / "self/cgroup").write_text("0::/user/job\n")
    return proc


def cgroup(directory: Path, **files: int | str) -> None:
    """Files of a cgroup, by their names with a _ in place of the first dot."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name.replace("_", ".", 1)).write_text(f"{text}\n")


MIB = 1 << 20
MEMORY_LEVELS = [
    pytest.param(("max", 1, 0), (64, 40, 0), 24, id="others of the job use it, too"),
    pytest.param(("max", 60, 50), (64, 60, 50), 54, id="the page cache counts as free"),
    pytest.param((96, 8, 0), (64, 40, 0), 24, id="the leaf's limit is the looser one"),
    pytest.param((16, 8, 0), (64, 40, 0), 8, id="the leaf's limit is the tighter one"),
    pytest.param(("max", 1, 0), (64, 70, 0), 0, id="more is used than the limit"),
]


@pytest.mark.parametrize(("leaf", "parent", "left"), MEMORY_LEVELS)
def test_memory_is_what_the_tightest_cgroup_leaves_by_its_own_use(
    unified: Path, tmp_path: Path, leaf: tuple[int | str, int, int], parent: tuple[int | str, int, int], left: int
):
    cgroups = tmp_path / "cgroup"
    for place, (limit, used, cached) in ((cgroups / "user/job", leaf), (cgroups / "user", parent)):
        most = limit if isinstance(limit, str) else limit * MIB
        stat = f"anon 1\ninactive_file {cached * MIB}\nactive_file 5"
        cgroup(place, memory_max=most, memory_current=used * MIB, memory_stat=stat)
    cgroup(cgroups, memory_stat="inactive_file 0")  # the root cgroup has no limit
    assert machine.memory_of(proc=unified, cgroups=cgroups, shm=tmp_path).available_bytes == left * MIB


@pytest.mark.parametrize(("leaf", "parent", "left"), MEMORY_LEVELS)
def test_memory_is_what_cgroups_of_version_1_leave(
    proc: Path, tmp_path: Path, leaf: tuple[int | str, int, int], parent: tuple[int | str, int, int], left: int
):
    mount = tmp_path / "cgroup/memory"
    for place, (limit, used, cached) in ((mount / "user/job", leaf), (mount / "user", parent)):
        most = (1 << 63) - 4096 if isinstance(limit, str) else limit * MIB
        stat = f"inactive_file 7\ntotal_inactive_file {cached * MIB}"
        cgroup(place, memory_limit_in_bytes=most, memory_usage_in_bytes=used * MIB, memory_stat=stat)
    assert machine.memory_of(proc=proc, cgroups=tmp_path / "cgroup", shm=tmp_path).available_bytes == left * MIB


@pytest.mark.parametrize("version", [1, 2])
def test_processes_are_what_the_tightest_cgroup_leaves_by_its_own_count(
    proc: Path, tmp_path: Path, version: int, request: pytest.FixtureRequest
):
    mount = tmp_path / "cgroup/pids" if version == 1 else tmp_path / "cgroup"
    if version == 2:
        request.getfixturevalue("unified")
    cgroup(mount / "user/job", pids_max="max", pids_current=5)
    cgroup(mount / "user", pids_max=100, pids_current=90)
    limits = machine.limits_of(proc=proc, cgroups=tmp_path / "cgroup")
    assert (limits.processes, limits.ports) == (10, 233)
    elsewhere = machine.limits_of(proc=tmp_path / "none", cgroups=tmp_path / "none")
    assert (elsewhere.processes, elsewhere.ports) == (None, None)


@pytest.mark.parametrize(
    ("room", "needed", "verdicts"),
    [
        pytest.param(machine.Room(8 * GIB, 4 * GIB, 3 * GIB), None, ["ok", "ok"], id="well"),
        pytest.param(machine.Room(8 * GIB, 4 * GIB, 3 * GIB), 9 * GIB, ["fail", "ok"], id="too little for snapshots"),
        pytest.param(machine.Room(8 * GIB, 64 << 20, 60 << 20), GIB, ["ok", "warn"], id="a container's"),
        pytest.param(machine.Room(8 * GIB, 4 * GIB, 1 << 20), None, ["ok", "fail"], id="filled up"),
        pytest.param(machine.Room(8 * GIB, None, None), None, ["ok", "warn"], id="no shared memory"),
    ],
)
def test_memory_is_judged_by_what_snapshots_take(room: machine.Room, needed: int | None, verdicts: list[str]):
    assert [each.verdict for each in machine.judge_memory(room, needed)] == verdicts


def test_snapshots_that_are_in_ram_already_count_as_memory_for_them():
    full = machine.Room(2 * GIB, 4 * GIB, 3 * GIB)
    assert machine.judge_memory(full, 9 * GIB, 7 * GIB)[0].verdict == "ok"
    found = machine.judge_memory(full, 9 * GIB, 6 * GIB)[0]
    assert found.verdict == "fail" and "take 9.0 GiB, 6.0 GiB of it already" in found.text


@pytest.mark.parametrize(
    ("limits", "rdma", "verdicts"),
    [
        pytest.param(machine.Limits(1024, 9999, None, 28000), True, {}, id="well"),
        pytest.param(machine.Limits(None, None, None, None), True, {}, id="no limits"),
        pytest.param(machine.Limits(300, 9999, None, 28000), False, {"open files": "fail"}, id="files"),
        pytest.param(machine.Limits(1024, 100, None, 28000), False, {"processes": "warn"}, id="processes"),
        pytest.param(machine.Limits(1024, 9999, 8 << 20, 28000), True, {"locked memory": "warn"}, id="locked memory"),
        pytest.param(machine.Limits(1024, 9999, 8 << 20, 28000), False, {}, id="locked memory without InfiniBand"),
        pytest.param(machine.Limits(1024, 9999, None, 500), False, {"ephemeral ports": "warn"}, id="ports"),
        pytest.param(machine.Limits(1024, 9999, None, 28000, 1 << 30), False, {"file size": "warn"}, id="large files"),
        pytest.param(machine.Limits(1024, 9999, None, 28000, 1 << 20), False, {"file size": "fail"}, id="files of any kind"),
    ],
)
def test_limits_are_judged_by_the_ranks(limits: machine.Limits, rdma: bool, verdicts: dict[str, str]):
    found = machine.judge_limits(limits, ranks=8, world=64, rdma=rdma)
    assert {each.check: each.verdict for each in found if not each.good} == verdicts


@pytest.mark.parametrize(("hca", "ports"), [("", 2), ("mlx5_0", 1), ("^mlx5", 0)])
def test_a_node_with_infiniband_is_checked_for_memory_that_may_be_locked(tmp_path: Path, monkeypatch, hca: str, ports: int):
    for port in ("mlx5_0/ports/1", "mlx5_1/ports/1"):
        (tmp_path / "sys/class/infiniband" / port).mkdir(parents=True)
    monkeypatch.setenv("NCCL_IB_HCA", hca)
    monkeypatch.setattr(machine, "limits_of", lambda: machine.Limits(1024, 9999, 8 << 20, 28000))
    settings = AgentSettings(0, 0, tmp_path, "x", "a:b", 30.0, 30.0, 2, "cpu", "n:1", "t.1", "127.0.0.1")
    spec = node_check.spec_of(settings, {"tiers": []}, tmp_path, sys=tmp_path / "sys")
    assert len(spec.rdma_ports) == ports
    check = NodeCheck(spec, multiprocessing.get_context("spawn"))
    found = [each.check for each in check.report().findings if not each.good]
    check.close()
    assert found == (["locked memory"] if ports else [])


def test_an_address_that_is_not_this_machine_s_cannot_be_reached():
    assert machine.reach("127.0.0.1").verdict == "ok"
    finding = machine.reach("192.0.2.1")
    assert finding.verdict == "fail" and "192.0.2.1" in finding.text
    assert machine.reach("no-such-host.invalid").verdict == "fail"


# -- what it comes to ----------------------------------------------------------------------------------------------------


def finding(check: str, verdict: str, text: str = "") -> Finding:
    return Finding(check, verdict, text)  # type: ignore[arg-type]


def test_a_tier_keeps_a_node_out_only_if_there_is_no_other():
    bad, good, matmul = finding("tier nvme", "fail"), finding("tier ram", "ok"), finding("matmul 0", "ok")
    assert [each.verdict for each in settle([bad, good, matmul])] == ["warn", "ok", "ok"]
    assert [each.verdict for each in settle([bad, finding("tier ram", "fail"), matmul])] == ["fail", "fail", "ok"]
    assert [each.verdict for each in settle([bad, good, finding("matmul 0", "fail")])] == ["warn", "ok", "fail"]


def test_a_node_looks_at_its_own_tiers():
    stored = {
        "tiers": [
            {"name": "ram", "durable": False, "roots": ["/dev/shm/a/node0", "/dev/shm/a/node1"]},
            {"name": "scratch", "durable": True, "roots": ["/scratch/checkpoints"]},
        ]
    }
    assert [str(tier.path) for tier in tiers_of(stored, 1)] == ["/dev/shm/a/node1", "/scratch/checkpoints"]


def test_good_rows_of_ranks_are_shown_as_one_and_bad_ones_by_themselves():
    rows = [finding("matmul 0", "ok"), finding("all-reduce 0", "ok"), finding("matmul 1", "fail"), finding("matmul 2", "ok")]
    assert [each.check for each in merged(rows)] == ["matmul 0-2", "all-reduce 0", "matmul 1"]
    assert not Report(tuple(rows), 1.0).ok


def test_of_gpus_that_are_left_out_nothing_is_said_and_one_that_fails_is_named():
    sick = Gpu(1, "GPU-1", "A100", uncorrected=2)
    found = [Gpu(0, "GPU-0", "A100", uncorrected=0), sick, Gpu(2, "GPU-2", "A100", uncorrected=0)]
    assert [(each.verdict, each.device) for each in gpus.judge(found, 3)] == [("fail", 1), ("ok", None)]
    assert [each.verdict for each in gpus.judge(found, 3, (0, 2))] == ["ok"]
