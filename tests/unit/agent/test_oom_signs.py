"""Whether the OOM killer ended a worker: what cgroups and the kernel log say."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from resilient.agent import oom
from resilient.agent.oom import Controller, KernelLog, OomWatch, cgroup_of, controller, killed, kills, limited, tightest
from resilient.recovery.faults import OutOfMemory, Raised, WorkerEnd, from_ends

V1 = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "36 31 0:33 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
)
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
BESIDE = "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
INSIDE = "36 31 0:33 /docker/abc /sys/fs/cgroup/memory ro,relatime - cgroup cgroup rw,memory\n"


@pytest.mark.parametrize(
    ("mountinfo", "found"),
    [
        (V1, Controller(Path("/sys/fs/cgroup/memory"), "/", False)),
        (V2, Controller(Path("/sys/fs/cgroup"), "/", True)),
        (BESIDE + V1, Controller(Path("/sys/fs/cgroup/memory"), "/", False)),
        (INSIDE, Controller(Path("/sys/fs/cgroup/memory"), "/docker/abc", False)),
        ("22 1 8:1 / / rw - ext4 /dev/sda1 rw\n", None),
    ],
    ids=["v1", "v2", "both", "in a container", "neither"],
)
def test_who_accounts_for_memory(mountinfo: str, found: Controller | None):
    assert controller(mountinfo) == found


@pytest.mark.parametrize(
    ("text", "unified", "path"),
    [
        ("8:pids:/x\n4:memory:/slurm/job_7/step_0\n0::/y\n", False, "/slurm/job_7/step_0"),
        ("5:cpu,memory:/z\n", False, "/z"),
        ("0::/system.slice/slurmstepd.scope/job_7\n", True, "/system.slice/slurmstepd.scope/job_7"),
        ("8:pids:/x\n", False, None),
    ],
)
def test_which_cgroup_a_process_is_in(text: str, unified: bool, path: str | None):
    assert cgroup_of(text, unified=unified) == path


def test_a_cgroup_of_a_container_is_looked_for_where_it_is_mounted():
    assert Controller(Path("/m"), "/docker/abc", False).directory("/docker/abc/job") == Path("/m/job")
    assert Controller(Path("/m"), "/", True).directory("/job") == Path("/m/job")


RECORDS = [
    "6,1258,50550179570,-;oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,"
    "oom_memcg=/slurm/job_7,task_memcg=/slurm/job_7/step_0,task=python3,pid=17088,uid=0\n",
    "6,1260,50550179580,-;oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,"
    "task_memcg=/slurm/job_7/step_0,task=a ; b,pid=99,uid=0\n",
    "6,1259,50550179579,-;[  17088]     0 17088    20589    19639 python3\n",
    "3,1261,50550179633,-;Memory cgroup out of memory: Killed process 17088 (python3) total-vm:82356kB, UID:0\n SUBSYSTEM=x\n",
    "3,1262,50550179634,-;Out of memory: Killed process 99 (a ; b) total-vm:1kB\n",
    "6,1263,50550179635,-;Killed process 5 by a module of somebody\n",
]


def test_the_kernel_log_names_the_processes():
    found = dict(killed(RECORDS))
    assert found.keys() == {17088, 99}
    assert found[17088] == "Memory cgroup out of memory: Killed process 17088 (python3) total-vm:82356kB, UID:0"


def test_the_kernel_log_says_whose_limit_it_was():
    assert dict(limited(RECORDS)) == {17088: "/slurm/job_7"}


@pytest.mark.parametrize("unified", [False, True], ids=["v1", "v2"])
class TestCgroups:
    """Directories of real text stand for the kernel's."""

    @pytest.fixture(autouse=True)
    def _mount(self, tmp_path: Path, unified: bool) -> None:
        self.mount, self.unified = tmp_path, unified
        self.job = tmp_path / "job"
        self.step = self.job / "step"
        self.step.mkdir(parents=True)
        self.write(self.job, limit=100 << 20, used=100 << 20)
        self.write(self.step, limit=None, used=90 << 20)

    def write(self, where: Path, *, limit: int | None = None, used: int | None = None, count: int | None = None) -> None:
        names = ("memory.max", "memory.peak", "memory.events")
        if not self.unified:
            names = ("memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.oom_control")
        no_limit = "max" if self.unified else "9223372036854771712"
        if used is not None:
            (where / names[0]).write_text(f"{no_limit if limit is None else limit}\n")
            (where / names[1]).write_text(f"{used}\n")
        if count is not None:
            (where / names[2]).write_text(f"oom 7\noom_kill {count}\nunder_oom 0\n")

    def watch(self, monkeypatch: pytest.MonkeyPatch, *pids: int) -> OomWatch:
        watch = OomWatch(_log=KernelLog(self.mount / "none"))
        watch._controller = Controller(self.mount, "/", self.unified)
        monkeypatch.setattr(oom, "POLL_S", 0.0)
        monkeypatch.setattr(oom, "cgroup_of", lambda text, unified: "/job/step")
        watch.poll(pids)
        return watch

    def test_the_lowest_limit_around_a_process_counts(self):
        assert tightest(self.step, self.mount, unified=self.unified) == (self.job, 100 << 20, 100 << 20)
        self.write(self.step, limit=50 << 20, used=50 << 20)
        assert tightest(self.step, self.mount, unified=self.unified) == (self.step, 50 << 20, 50 << 20)
        self.write(self.step, used=1), self.write(self.job, used=1)
        assert tightest(self.step, self.mount, unified=self.unified) is None

    def test_a_count_that_is_not_there(self):
        assert kills(self.step, unified=self.unified) is None
        self.write(self.step, count=3)
        assert kills(self.step, unified=self.unified) == 3

    def test_a_rise_of_the_count_belongs_to_one_worker(self, monkeypatch: pytest.MonkeyPatch):
        me = os.getpid()
        self.write(self.step, count=3)
        watch = self.watch(monkeypatch, me)
        assert watch.ended(me) is None
        watch.poll([me])
        self.write(self.step, count=4)
        assert watch.ended(me) == OutOfMemory(
            "/job", 100 << 20, 100 << 20, "cgroup /job/step counts one oom_kill more than a moment before"
        )
        watch.poll([me])
        assert watch.ended(me) is None

    def test_news_that_come_after_the_next_look_are_still_news_but_not_later(self, monkeypatch: pytest.MonkeyPatch):
        me = os.getpid()
        self.write(self.step, count=3)
        watch = self.watch(monkeypatch, me)
        self.write(self.step, count=4)
        watch.poll([me])
        assert watch.ended(me) is not None
        self.write(self.step, count=5)
        for _ in range(2):  # a child of a worker, say
            watch.poll([me])
        assert watch.ended(me) is None

    def test_where_the_limit_was_not_reached_the_machine_had_nothing_left(self, monkeypatch: pytest.MonkeyPatch):
        self.write(self.job, limit=100 << 20, used=60 << 20)
        self.write(self.step, count=3)
        watch = self.watch(monkeypatch, os.getpid())
        self.write(self.step, count=4)
        found = watch.ended(os.getpid())
        assert found is not None and found.limit_bytes is None and str(found) == "the OOM killer" and found.verdict == "node"


def test_a_fault_says_what_the_oom_killer_did():
    killer = OutOfMemory("/job_7", 64 << 20, 64 << 20, "kernel log: Memory cgroup out of memory: Killed process 1001 (python)")
    ends = [
        WorkerEnd(1, 0, 1001, -9, 10.0, 4, "step", oom=killer),
        WorkerEnd(0, 0, 1000, 1, 9.0, 4, "step", Raised("RuntimeError", "Connection closed by peer", "", 9.0)),
    ]
    fault = from_ends("g1-1", ends, resumed_step=0, now=11.0)
    assert (fault.kind, fault.cause, fault.verdict) == ("exit", "OOM killer", "deterministic")
    assert fault.detail == "killed by the OOM killer (cgroup /job_7, limit 64 MiB, used 64 MiB)"
    assert fault.evidence.endswith("Killed process 1001 (python)") and "process 1001 of rank 1 ended by" in fault.evidence


HUNGRY = """
import sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text("0")
print("in", flush=True)
sys.stdin.readline()
held = []
while True:
    held.append(b"x" * (1 << 20))
"""


@pytest.mark.parametrize("readable", [True, False], ids=["by the kernel log", "by the count alone"])
def test_a_process_that_a_real_limit_kills(readable: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(oom, "POLL_S", 0.0)
    watch = OomWatch() if readable else OomWatch(_log=KernelLog(tmp_path / "none"))
    where = watch._controller
    if where is None or os.geteuid() != 0:
        pytest.skip("NOT TESTED HERE: a limit of a memory cgroup needs root and a cgroup")
    cgroup = where.mount / f"resilient-oom-{os.getpid()}"
    try:
        cgroup.mkdir()
        (cgroup / ("memory.max" if where.unified else "memory.limit_in_bytes")).write_text(str(64 << 20))
    except OSError as error:
        if cgroup.exists():
            cgroup.rmdir()
        pytest.skip(f"NOT TESTED HERE: a memory cgroup cannot be made: {error}")
    try:
        for hungry in (False, True):
            process = subprocess.Popen(
                [sys.executable, "-c", HUNGRY, str(cgroup)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            assert process.stdin is not None and process.stdout is not None and process.stdout.readline() == "in\n"
            if not readable:  # the kernel log names the cgroup itself
                watch.poll([process.pid])
            if hungry:
                process.stdin.write("\n")
                process.stdin.flush()
            else:
                process.kill()
            assert process.wait() == -9
            found = watch.ended(process.pid)
            process.stdin.close(), process.stdout.close()
            if not hungry:
                assert found is None
                continue
            assert found is not None and found.limit_bytes == 64 << 20 and found.cgroup == f"/{cgroup.name}"
            named = readable and watch._log._fd is not None
            assert (f"Killed process {process.pid} " if named else "counts one oom_kill more") in found.evidence
    finally:
        watch.close()
        cgroup.rmdir()
