"""The processes that `resilient status --pid` names: real ones, and heartbeat regions as ranks leave them."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from mounts import needs_root

from resilient import processes
from resilient.agent import memory
from resilient.heartbeat import layout
from resilient.heartbeat.agent_side import AgentRegion
from resilient.heartbeat.worker_side import WorkerRegion
from resilient.processes import local_pids

ROOT = Path(__file__).parents[3]
# A rank in small: it says which number it has; then it is another program, or goes on as it is.
RANK = """
import os, sys
from pathlib import Path
from resilient.heartbeat.worker_side import WorkerRegion
if len(sys.argv) > 3:
    Path("/proc/sys/kernel/ns_last_pid").write_text(str(int(sys.argv[3]) - 1))
    child = os.fork()
    if child:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
region = WorkerRegion(Path(sys.argv[1]))
print(os.getpid(), flush=True)
if sys.argv[2] == "replaced":
    os.execvp("cat", ["cat"])
sys.stdin.read()
"""
AGENT = """
import subprocess, sys
from pathlib import Path
from resilient.agent import NAME, memory
from resilient.lifeline import name_process
name_process(NAME)
memory.leave_record(Path(sys.argv[1]).parent, "n1:1")
subprocess.run([sys.executable, "-c", sys.argv[3], *sys.argv[1:3]])
"""


@pytest.fixture
def region(tmp_path: Path) -> Iterator[Path]:
    """That of rank 0 in generation 3; nobody uses it yet."""
    regions = memory.region_directory(tmp_path, 0)
    regions.mkdir(mode=0o700)
    with closing(AgentRegion(regions / memory.region_name(3, 0))) as made:
        yield made.path
    shutil.rmtree(regions)


@contextmanager
def rank(region: Path, how: str, *words: str, program: str = RANK, within: tuple[str, ...] = ()) -> Iterator[int]:
    """The number that it has where it runs."""
    command = [*within, sys.executable, "-c", program, str(region), how, *words]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.stdin.close()


def test_a_rank_is_named_while_it_lives(region: Path, tmp_path: Path):
    with rank(region, "stays") as pid:
        assert local_pids(tmp_path, None) == {"rank 0": pid}
    assert local_pids(tmp_path, None) == {}


def test_a_process_that_has_the_number_of_a_rank_that_is_gone_is_not_named(region: Path, tmp_path: Path):
    with subprocess.Popen(["sleep", "600"]) as stranger:
        try:
            with closing(WorkerRegion(region)) as left:
                left._words[layout.PID] = stranger.pid
            assert local_pids(tmp_path, None) == {}
        finally:
            stranger.kill()


def test_a_program_in_the_place_of_a_rank_is_named_as_long_as_its_agent_lives(region: Path, tmp_path: Path):
    with rank(region, "replaced", RANK, program=AGENT) as pid:
        while Path(f"/proc/{pid}/comm").read_text() != "cat\n":
            pass
        assert local_pids(tmp_path, None) == {"rank 0": pid}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(processes, "NAME", "of no agent")  # its number is another's by now
            assert local_pids(tmp_path, None) == {}


@needs_root
def test_a_rank_in_a_container_is_named_by_its_number_here_and_no_process_of_the_same_number(region: Path, tmp_path: Path):
    apart = ("unshare", "--pid", "--fork", "--kill-child=KILL", "--mount-proc")
    with subprocess.Popen(["sleep", "600"]) as bystander:
        try:
            with rank(region, "stays", str(bystander.pid), within=apart) as pid:
                assert pid == bystander.pid, "the test is about a number that both namespaces have"
                (seen,) = local_pids(tmp_path, None).values()
                assert seen != pid
                assert Path(f"/proc/{seen}/status").read_text().split("NSpid:")[1].split("\n")[0].split() == [str(seen), str(pid)]
        finally:
            bystander.kill()
