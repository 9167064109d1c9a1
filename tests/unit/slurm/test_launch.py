"""Agents as tasks of steps: how srun is called, and what is told of an agent's end. Real processes are in srun's place."""

import asyncio
import itertools
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpoint import descriptors
from resilient.agent.inspection import state_of
from resilient.driver.launch import AgentCommand
from resilient.exits import EnvironmentUnusable
from resilient.slurm import launch, roster, step
from resilient.slurm.allocation import Allocation
from resilient.slurm.launch import SlurmLauncher, own_addresses
from resilient.slurm.roster import Seat

JOB = Allocation("77", ("n2", "n1", "n3", "n7"), (48, 48, 48, 48), 0)
UNEVEN = Allocation("77", ("n1", "g1", "g2"), (8, 48, 48), 0, (0, 1, 1))

# Says how it was called, then does what the file `does` says.
SRUN = f"""#!{sys.executable}
import json, os, sys, time
with open("CALLS", "a") as calls:
    os.getcwd()
    calls.write(json.dumps([sys.argv[1:], dict(os.environ), os.getpid()]) + "\\n")
exec(open("DOES").read())
"""
STAYS = "time.sleep(600)"
ENDS = "pass"


class Steps:
    """A launcher whose srun is a process of this machine."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        (directory / "srun").write_text(SRUN.replace("CALLS", f"{directory}/calls").replace("DOES", f"{directory}/does"))
        (directory / "srun").chmod(0o755)
        (directory / "logs").mkdir()
        monkeypatch.setenv("PATH", str(directory))
        self.ended: list[tuple[int, int, str]] = []
        self.does(STAYS)

    def does(self, code: str) -> None:
        (self.directory / "does").write_text(code)

    def launcher(self, allocation: Allocation = JOB, **options: Any) -> SlurmLauncher:
        environ = {"OMP_NUM_THREADS": "12"}
        command = AgentCommand(
            "n2:80", 4, self.directory, "x", "trainer.main:train", 30.0, 30.0, 16, "cpu", "t0ken", environ, "INFO"
        )
        return SlurmLauncher(command, lambda *news: self.ended.append(news), allocation=allocation, **options)

    def calls(self) -> list[tuple[list[str], dict[str, str], int]]:
        path = self.directory / "calls"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [tuple(json.loads(line)) for line in lines if line.endswith("\n")]

    async def called(self, times: int) -> list[tuple[list[str], dict[str, str], int]]:
        await until(lambda: len(self.calls()) >= times)
        return self.calls()


async def until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(120.0):
        while not what():
            await asyncio.sleep(0.01)


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(tmp_path, monkeypatch)


def options_of(words: list[str]) -> dict[str, str]:
    return dict(itertools.pairwise(words[: words.index("-m")]))


def seats_of(environ: dict[str, str]) -> dict[str, Seat]:
    return roster.read(environ["RESILIENT_ROSTER"])


def test_all_agents_that_are_started_at_one_moment_are_one_step_that_outlives_a_lost_node(steps: Steps):
    async def play() -> None:
        launcher = steps.launcher()
        await asyncio.gather(*(launcher.launch(node, 1, prepare=node == 0) for node in range(4)))
        await steps.called(1)
        await launcher.close(0.0)

    asyncio.run(play())
    ((words, environ, _),) = steps.calls()
    options = options_of(words)
    assert (options["--nodelist"], options["--nodes"], options["--ntasks"]) == ("n[2,1,3,7]", "4", "4")
    assert (options["--ntasks-per-node"], options["--cpus-per-task"]) == ("1", "48")
    assert {"--overlap", "--no-kill", "--kill-on-bad-exit=0", "--wait=0"} <= set(words)
    assert options["--output"] == f"{steps.directory}/logs/agents.log"
    assert seats_of(environ) == {"n2": Seat(0, 1), "n1": Seat(1, 1), "n3": Seat(2, 1), "n7": Seat(3, 1)}
    agent = words[words.index("-m") + 1 :]
    assert agent[0] == "resilient.agent"
    assert dict(itertools.pairwise(agent))["--prepare-node"] == "0"
    assert not {"--node", "--parent"} & set(agent)


def test_no_secret_is_on_the_command_line(steps: Steps):
    async def play() -> None:
        launcher = steps.launcher()
        await launcher.launch(0, 1, prepare=True)
        await steps.called(1)
        await launcher.close(0.0)

    asyncio.run(play())
    ((words, environ, _),) = steps.calls()
    assert environ["RESILIENT_TOKEN"] == "t0ken"
    assert not [word for word in words if "t0ken" in word]


def test_a_replacement_is_a_step_of_its_own_node_and_the_step_of_all_stays(steps: Steps):
    async def play() -> None:
        launcher = steps.launcher()
        await asyncio.gather(*(launcher.launch(node, 1, prepare=False) for node in range(4)))
        ((_, _, first),) = await steps.called(1)
        await launcher.launch(3, 2, prepare=False)
        _, (words, environ, second) = await steps.called(2)
        assert (options_of(words)["--nodelist"], options_of(words)["--nodes"]) == ("n7", "1")
        assert options_of(words)["--job-name"] == "agent3"
        assert seats_of(environ) == {"n7": Seat(3, 2)}
        assert "--prepare-node" not in words
        os.kill(first, 0)
        await launcher.launch(3, 3, prepare=False)  # its own step is ended for the next one
        await steps.called(3)
        with pytest.raises(ProcessLookupError):
            os.kill(second, 0)
        await launcher.close(0.0)

    asyncio.run(play())
    assert steps.ended == []


def test_an_agent_is_started_anew_after_the_working_directory_was_deleted(steps: Steps, monkeypatch: pytest.MonkeyPatch):
    here = steps.directory / "here"
    here.mkdir()
    monkeypatch.chdir(here)

    async def play() -> None:
        launcher = steps.launcher()
        await launcher.launch(1, 1, prepare=False)
        await steps.called(1)
        here.rmdir()
        await launcher.launch(1, 2, prepare=False)
        await steps.called(2)
        await launcher.close(0.0)

    asyncio.run(play())
    assert [options_of(words)["--chdir"] for words, _, _ in steps.calls()] == [str(here)] * 2


def test_the_end_of_a_task_is_told_while_the_others_go_on(steps: Steps):
    steps.does(
        "for line in ['n[1,3]: tasks 1-2: Exited with exit code 1', 'Node failure on n7', 'n1: task 1: Killed']:\n"
        "    print('srun: error:', line, file=sys.stderr, flush=True)\n" + STAYS
    )

    async def play() -> None:
        launcher = steps.launcher()
        await asyncio.gather(*(launcher.launch(node, 1, prepare=False) for node in range(4)))
        await until(lambda: len(steps.ended) == 3)
        await launcher.close(0.0)

    asyncio.run(play())
    assert [news[:2] for news in steps.ended[:3]] == [(1, 1), (2, 1), (3, 1)]
    assert steps.ended[0][2] == "its task on n1 ended: Exited with exit code 1; see logs/agents.log"
    assert steps.ended[2][2] == "its task on n7 ended: Node failure on n7; see logs/agents.log"


def test_all_agents_of_a_step_whose_srun_was_killed_have_ended(steps: Steps):
    async def play() -> None:
        launcher = steps.launcher()
        await asyncio.gather(*(launcher.launch(node, 1, prepare=False) for node in range(4)))
        ((_, _, pid),) = await steps.called(1)
        await launcher.launch(2, 2, prepare=False)
        await steps.called(2)
        os.kill(pid, signal.SIGKILL)
        await until(lambda: len(steps.ended) == 3)
        await launcher.close(0.0)

    asyncio.run(play())
    assert steps.ended == [(node, 1, f"its step on {JOB.hosts[node]} ended by SIGKILL; see logs/agents.log") for node in (0, 1, 3)]


def test_the_srun_of_a_step_of_many_is_held_once_all_agents_have_connected_and_goes_on_at_the_end(steps: Steps):
    """As it is, it would end the step when a node is up again before Slurm has called it down."""

    async def play() -> None:
        launcher = steps.launcher()
        await asyncio.gather(*(launcher.launch(node, 1, prepare=False) for node in range(4)))
        ((_, _, first),) = await steps.called(1)
        for node in range(2):
            launcher.connected(node)
        await launcher.launch(3, 2, prepare=False)
        _, (_, _, second) = await steps.called(2)
        assert state_of(first) != "T"
        launcher.connected(3)
        assert state_of(first) != "T"
        launcher.connected(2)
        await until(lambda: state_of(first) == "T")
        assert state_of(second) != "T"  # of one node: it can end no other
        await launcher.close(0.0)
        for pid in (first, second):
            assert not Path(f"/proc/{pid}").exists()

    asyncio.run(play())
    assert steps.ended == []


def test_an_srun_that_is_held_is_held_again_after_slurm_has_resumed_the_job(steps: Steps, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(step, "HOLD_AGAIN_S", 0.01)

    async def play() -> None:
        launcher = steps.launcher()
        await asyncio.gather(*(launcher.launch(node, 1, prepare=False) for node in range(4)))
        ((_, _, pid),) = await steps.called(1)
        for node in range(4):
            launcher.connected(node)
        await until(lambda: state_of(pid) == "T")
        os.kill(pid, signal.SIGCONT)
        await until(lambda: state_of(pid) == "T")
        await launcher.close(0.0)
        assert not Path(f"/proc/{pid}").exists()

    asyncio.run(play())
    assert steps.ended == []


HOLDS = """
import asyncio, sys, time
from resilient.slurm.roster import Seat
from resilient.slurm.step import Step
async def main():
    step = await Step.start([sys.argv[1]], {}, {"n1": Seat(0, 1), "n2": Seat(1, 1)}, print, print, "logs/agents.log")
    for node in range(2):
        step.connected(node)
    time.sleep(600)
asyncio.run(main())
"""


@pytest.mark.parametrize("before", [[], ["nohup"]], ids=["", "nohup"])
def test_an_srun_that_is_held_does_not_outlive_a_driver_that_is_killed(steps: Steps, before: list[str]):
    driver = subprocess.Popen(
        [*before, sys.executable, "-c", HOLDS, str(steps.directory / "srun")], env={"PYTHONPATH": ":".join(sys.path)}
    )

    async def play() -> None:
        # Held before it could run a line; its parent tells of it.
        children = Path(f"/proc/{driver.pid}/task/{driver.pid}/children")
        await until(lambda: bool(children.read_text().split()))
        pid = int(children.read_text())
        await until(lambda: state_of(pid) == "T")
        driver.kill()
        driver.wait()
        await until(lambda: state_of(pid) in ("", "Z"))

    asyncio.run(play())


def test_a_step_that_cannot_be_started_is_told_of_every_node(steps: Steps):
    (steps.directory / "srun").unlink()  # nothing else is on the PATH

    async def play() -> None:
        launcher = steps.launcher()
        await asyncio.gather(*(launcher.launch(node, 1, prepare=False) for node in range(2)))
        await launcher.close(0.0)

    asyncio.run(play())
    assert [news[:2] for news in steps.ended] == [(0, 1), (1, 1)]
    assert "srun cannot be started" in steps.ended[0][2]


SILENT = "Unable to confirm allocation for job 77: Socket timed out on send/recv operation"


def test_agents_are_asked_for_again_as_long_as_slurm_does_not_answer(steps: Steps, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch, "AGAIN_S", 0.01)
    calls = steps.directory / "calls"
    steps.does(f"if len(open({str(calls)!r}).readlines()) < 3:\n    sys.exit('srun: error: {SILENT}')\n{STAYS}")

    async def play() -> None:
        launcher = steps.launcher()
        await asyncio.gather(*(launcher.launch(node, 1, prepare=node == 2) for node in range(4)))
        await until(lambda: len(steps.calls()) == 3 or bool(steps.ended))
        await launcher.close(0.0)

    asyncio.run(play())
    assert [seats_of(environ) for _, environ, _ in steps.calls()] == [seats_of(steps.calls()[0][1])] * 3
    assert all("--prepare-node" in words for words, _, _ in steps.calls())
    assert steps.ended == []


def test_an_agent_that_is_launched_anew_is_not_asked_for_twice(steps: Steps, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch, "AGAIN_S", 0.2)
    steps.does(f"sys.exit('srun: error: {SILENT}')")

    async def play() -> None:
        launcher = steps.launcher()
        await asyncio.gather(*(launcher.launch(node, 1, prepare=False) for node in range(2)))
        await until(lambda: bool(launcher._unanswered))
        steps.does(STAYS)
        await launcher.launch(1, 2, prepare=False)
        await steps.called(3)
        await launcher.close(0.0)

    asyncio.run(play())
    seats = [seats_of(environ) for _, environ, _ in steps.calls()]
    assert seats == [{"n2": Seat(0, 1), "n1": Seat(1, 1)}, {"n1": Seat(1, 2)}, {"n2": Seat(0, 1)}]


@pytest.mark.parametrize(
    ("line", "silent"),
    [
        (f"srun: error: {SILENT}", True),
        ("srun: error: Unable to create step for job 77: Unable to contact slurm controller (connect failure)", True),
        ("srun: error: Unable to confirm allocation for job 77: Invalid job id specified", False),
        ("srun: error: Unable to create step for job 77: More processors requested than permitted", False),
        ("srun: error: Task launch for StepId=77.0 failed on node n3: Socket timed out on send/recv operation", False),
        (f"2: srun: error: {SILENT}", False),  # what a task prints has its label before it
    ],
)
def test_an_srun_without_a_step_is_told_from_a_slurm_that_refuses(line, silent):
    assert step.unanswered(line) is silent


def test_nodes_of_other_components_or_with_other_cpus_are_steps_of_their_own(steps: Steps):
    async def play() -> None:
        launcher = steps.launcher(UNEVEN, cpu_bind="cores", gpus_per_task=4)
        await asyncio.gather(*(launcher.launch(node, 1, prepare=node == 2) for node in range(3)))
        await steps.called(2)
        await launcher.close(0.0)

    asyncio.run(play())
    small, large = sorted((options_of(words) for words, _, _ in steps.calls()), key=lambda options: options["--het-group"])
    assert (small["--het-group"], small["--nodelist"], small["--cpus-per-task"]) == ("0", "n1", "8")
    assert (large["--het-group"], large["--nodelist"], large["--cpus-per-task"]) == ("1", "g[1-2]", "48")
    assert (large["--cpu-bind"], large["--gpus-per-task"]) == ("cores", "4")
    assert sum("--prepare-node" in words for words, _, _ in steps.calls()) == 1


def test_a_step_inherits_no_option_of_the_job_and_has_what_the_config_adds(steps: Steps, monkeypatch: pytest.MonkeyPatch):
    inherited = {
        "SLURM_NTASKS",
        "SLURM_CPU_BIND_TYPE",
        "SRUN_CPUS_PER_TASK",
        "SLURM_GPUS",
        "SLURM_THREADS_PER_CORE",
        "SLURM_TRES_PER_TASK",
    }
    for name in inherited:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    steps.does(ENDS)

    async def play() -> None:
        launcher = steps.launcher(extra=["--gres=gpu:4"])
        await launcher.launch(3, 1, prepare=False)
        await until(lambda: bool(steps.ended))
        await launcher.close(1.0)

    asyncio.run(play())
    ((words, environ, _),) = steps.calls()
    assert "--gres=gpu:4" in words
    assert not inherited & environ.keys()
    assert (environ["SLURM_JOB_ID"], environ["OMP_NUM_THREADS"]) == ("77", "12")
    assert not {"--het-group", "--gpus-per-task"} & set(words)
    assert steps.ended == [(3, 1, "its step on n7 ended by exit code 0; see logs/agent3.log")]


@pytest.mark.parametrize(
    ("line", "hosts"),
    [
        ("srun: error: n3: task 2: Exited with exit code 1", ["n3"]),
        ("srun: error: n[1-2]: tasks 0-1: Killed", ["n1", "n2"]),
        ("srun: error: Node failure on n[3,5]", ["n3", "n5"]),
        ("srun: error: Task launch for StepId=5.0 failed on node n3: Communication connection failure", ["n3"]),
        ("2: srun: error: n3: task 2: Killed", None),  # what a task prints has its label before it
        ("srun: error: Unable to confirm allocation for job 9: Invalid job id specified", None),
        ("srun: error: n[3: task 2: Killed", None),
    ],
)
def test_what_srun_says_of_tasks_is_understood(line, hosts):
    found = step.ends_in(line)
    assert (found[0] if found is not None else None) == hosts


def test_an_agent_finds_its_seat_by_slurms_name_for_its_host():
    seats = {"n2": Seat(0, 1), "n1": Seat(1, 1), "n4": Seat(3, 1), "n7": Seat(4, 2)}
    text = roster.write(seats)
    assert text == "1:0:n[2,1];1:3:n4;2:4:n7"
    assert roster.read(text) == seats
    environ = {"RESILIENT_ROSTER": text}
    assert roster.seat_of({**environ, "SLURMD_NODENAME": "n4"}, "n1") == Seat(3, 1)
    assert roster.seat_of(environ, "n7.site.eu") == Seat(4, 2)
    with pytest.raises(EnvironmentUnusable, match="n5 is none of the nodes"):
        roster.seat_of({**environ, "SLURMD_NODENAME": "n5"}, "n1")
    with pytest.raises(EnvironmentUnusable, match="RESILIENT_ROSTER"):
        roster.seat_of({}, "n1")


def test_a_roster_of_thousands_of_nodes_fits_into_a_variable():
    hosts = [f"jwb{number:04}" for number in range(1, 5001)]
    hosts.insert(0, hosts.pop(2500))
    seats = {host: Seat(node, 1) for node, host in enumerate(hosts)}
    assert roster.read(roster.write(seats)) == seats
    assert len(roster.write(seats)) < 1000


def test_addresses_of_bridges_among_guests_and_of_the_loopback_are_offered_to_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    there = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.7", "fe80::7%eth0"], "docker0": ["172.17.0.1"], "br0": ["10.1.0.7"]}
    found = {
        name: [SimpleNamespace(family=socket.AF_INET6 if ":" in each else socket.AF_INET, address=each) for each in addresses]
        for name, addresses in there.items()
    }
    monkeypatch.setattr("psutil.net_if_addrs", lambda: found)
    for bridge, port in (("docker0", "veth3"), ("br0", "eth1")):
        (tmp_path / bridge / "bridge").mkdir(parents=True)
        (tmp_path / bridge / "brif" / port).mkdir(parents=True)
        (tmp_path / port).mkdir()
    (tmp_path / "eth1" / "device").mkdir()  # hardware: this bridge leads to other machines
    assert own_addresses(sysfs=tmp_path) == ["10.1.0.7", "10.0.0.7"]
    assert own_addresses("docker0", sysfs=tmp_path) == ["172.17.0.1"]  # as it was asked for


def test_an_srun_has_the_limit_of_descriptors_that_the_driver_was_started_with(steps: Steps):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    steps.does(
        f"import resource; open({str(steps.directory / 'limit')!r}, 'w').write(str(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))"
    )

    async def play() -> None:
        launcher = steps.launcher()
        await launcher.launch(0, 1, prepare=False)
        async with asyncio.timeout(120):
            while not steps.ended:
                await asyncio.sleep(0.01)
        await launcher.close(0.0)

    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard - 1, hard))
        asyncio.run(play())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert int((steps.directory / "limit").read_text()) == descriptors.at_start()
