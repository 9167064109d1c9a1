"""Agents as tasks of steps: how srun is called, and what is told of an agent's end. Real processes are in srun's place."""

import asyncio
import itertools
import os
import resource
import signal
import socket
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from srun_steps import ENDS, JOB, STAYS, Steps, options_of, seats_of, until

from checkpoint import descriptors
from resilient.exits import EnvironmentUnusable
from resilient.slurm import roster, step
from resilient.slurm.allocation import Allocation
from resilient.slurm.launch import own_addresses
from resilient.slurm.roster import Seat

UNEVEN = Allocation("77", ("n1", "g1", "g2"), (8, 48, 48), 0, (0, 1, 1))

# Says how it was called, then does what the file `does` says.


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


def test_an_srun_that_a_script_of_the_site_has_started_holds_up_no_end(steps: Steps, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(step, "GRACE_S", 0.1)
    steps.does("import subprocess; subprocess.run(['/bin/sh', '-c', 'echo $$ > real.new; mv real.new real; exec sleep 300'])")
    monkeypatch.chdir(steps.directory)
    monkeypatch.setenv("PATH", f"{steps.directory}:/usr/bin:/bin")

    async def play() -> None:
        async with asyncio.timeout(60.0):  # far below what it sleeps
            launcher = steps.launcher()
            await launcher.launch(0, 1, prepare=True)
            await until((steps.directory / "real").exists)
            await launcher.close(0.0)

    asyncio.run(play())
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int((steps.directory / "real").read_text())).wait(60)


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
