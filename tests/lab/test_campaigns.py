"""Campaigns as jobs of a real Slurm, on hosts that break: what is lost, who takes over, and that no bit is different."""

import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from campaigns import HELD, MODEL, ROOT, STEPS, Campaign, holding, same, wait_for
from lab_jobs import HOSTS, TIMES, LabJob
from listening import listeners
from scripts import PACED, torchrun
from soak import soaked

from chaos.lab.lab import Lab
from chaos.lab.shape import address

Jobs = Callable[..., LabJob]

NEVER = 1000  # a step that no run reaches
STANDING = {"step_s": 0.1, "holds": STEPS - 8}  # arguments of a campaign that stands still before its end
KEPT_BY_BUDDIES = ("ram", "nvme")  # where buddies have copies; which of them has the newer one depends on the moment


FIT = "health check: "  # in the log of an agent that may take part


def tiers(every_steps: int) -> dict[str, Any]:
    """A snapshot in RAM at every step, with a copy on another host; fewer on the NVMe, and on the file system of all."""
    return {
        "every_steps": every_steps,
        "tiers": [
            {"name": "ram", "path": "/dev/shm", "every_steps": 1, "keep_last": 2, "replicas": 1},
            {"name": "nvme", "path": "/mnt/nvme", "every_steps": 5, "keep_last": 2, "replicas": 1},
            {"name": "durable", "path": "${run_dir}/checkpoints", "keep_last": 4},
        ],
    }


def inside(lab: Lab, host: str, path: str) -> Path:
    """A path of a host, as this machine can look at it."""
    return Path(f"/proc/{lab.host(host).init()}/root{path}")


def replicated(lab: Lab, since: int, hosts: Iterable[str] = HOSTS.values()) -> bool:
    """Whether each of these hosts has a replica of another one's shard of a step after this one."""

    def newest(host: str) -> int:
        found = inside(lab, host, "/dev/shm").glob("*/node*/replica-*/step-????????/part.json")
        return max((int(path.parent.name[5:]) for path in found), default=0)

    return all(newest(host) > since for host in hosts)


def running(lab: Lab, host: str) -> list[int]:
    """Ids of the processes on a host that are neither its own nor Slurm's."""
    found = []
    for pid in lab.host(host).processes():
        with suppress(OSError):
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            found += [pid] if name not in ("unshare", "slurmd") and pid != lab.host(host).init() else []
    return found


def steps_of_srun(lab: Lab, host: str) -> list[int]:
    """Ids of the processes of srun on a host, without those that an srun has forked for itself."""
    found = {}
    for pid in running(lab, host):
        with suppress(OSError):
            name, _, fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
            found |= {pid: int(fields.split()[1])} if name.endswith("(srun") else {}
    return [pid for pid, parent in found.items() if parent not in found]


def workers(lab: Lab, host: str) -> list[int]:
    """Ids of the ranks' processes on a host."""
    found = []
    for pid in lab.host(host).processes():
        with suppress(OSError):
            found += [pid] if Path(f"/proc/{pid}/fd/1").readlink().name.startswith("rank") else []
    return found


def members(run: LabJob) -> list[list[str]]:
    """The hosts of each generation, by node rank."""
    return [event["nodes"] for event in run.events("generation_started")]


def actions(run: LabJob) -> list[str]:
    """What was done about nodes. (A buddy that was fetching from a node tells of it as of a tier that fails.)"""
    return [event["name"] for event in run.events("action") if event["name"] in ("replace_node", "shrink", "grow")]


def told(run: LabJob) -> str:
    return run.output + run.logs()


@pytest.mark.soak
def test_one_job_computes_on_three_hosts_what_one_machine_does(lab: Lab, job: Jobs, reference: Campaign):
    run = job(cluster={"spares": 1}, **holding(STEPS - 5, lost_s=60))
    run.start().reach(5)
    assert run.hosts() == {**HOSTS, 3: "n4"}
    assert run.steps() == [("agents", ["n1", "n2", "n3", "n4"])]
    assert len(steps_of_srun(lab, "n1")) == 1
    run.go_on()
    assert run.wait() == 0, told(run)
    same(run, reference)
    assert members(run) == [["n1", "n2", "n3"]]
    assert not run.events("fault")
    wait_for(lambda: not any(running(lab, host) for host in (*HOSTS.values(), "n4")), "the end of what ran on the hosts")


@pytest.mark.parametrize("script", [soaked("srun $RUN"), "exec srun --nodes=1 --ntasks=1 $RUN"])
def test_srun_put_before_the_command_makes_no_difference(keeping: Jobs, kept: Campaign, script: str):
    run = keeping(resilience={"lost_s": 60})
    run.script = script
    run.start()
    assert run.wait() == 0, told(run)
    assert run.output.count(" ranks on ") == 1
    same(run, kept)


def test_a_spare_goes_on_from_the_buddies_copies_when_a_host_is_gone_with_all_that_it_held(lab: Lab, keeping: Jobs, kept: Campaign):
    run = keeping(cluster={"spares": 1}, checkpoint=tiers(NEVER), resilience={**HELD, "link_grace_s": 4}, args=STANDING)
    _loses_a_host(lab, run)
    same(run, kept)


@pytest.mark.soak
def test_the_trainer_goes_on_from_the_buddies_copies_too(lab: Lab, job: Jobs, reference: Campaign):
    run = job(cluster={"spares": 1}, checkpoint=tiers(NEVER), **holding(STEPS - 8, link_grace_s=4))
    _loses_a_host(lab, run)
    same(run, reference)


def _loses_a_host(lab: Lab, run: LabJob) -> None:
    """A campaign that stands still before its end, on three hosts and a spare, loses the second of them for good."""
    run.start().reach(15)
    wait_for(lambda: replicated(lab, 10), "replicas of what was computed")
    lab.crash("n2")
    run.go_on()
    assert run.wait() == 0, told(run)
    assert members(run) == [["n1", "n2", "n3"], ["n1", "n4", "n3"]]
    assert actions(run) == ["replace_node"]
    (fault,) = [event for event in run.events("fault") if event["kind"] != "storage"]
    assert (fault["kind"], fault["nodes"]) == ("node_lost", [1])
    assert "n2" in fault["detail"]
    again = run.events("generation_started")[1]
    assert again["tier"] in KEPT_BY_BUDDIES
    assert again["resumed_step"] > 10


@pytest.mark.soak
def test_with_hybrid_sharding_a_spare_goes_on_from_the_host_that_holds_the_same_without_any_copy(
    lab: Lab, job: Jobs, tmp_path: Path
):
    ram = {"name": "ram", "path": "/dev/shm", "keep_last": 2, "replicas": "auto"}
    run = job(
        cluster={"nodes": 2, "procs_per_node": 2, "spares": 1},
        parallel={"dp_replicate": 2},
        model={**MODEL, "dropout": 0.1},
        checkpoint={"every_steps": NEVER, "tiers": [ram, {"name": "durable", "path": "${run_dir}/checkpoints"}]},
        **holding(STEPS - 8, link_grace_s=4),
    )
    run.start().reach(15)
    wait_for(lambda: run.events("replicated"), "a snapshot that two hosts hold")
    lab.crash("n2")
    run.go_on()
    assert run.wait() == 0, told(run)
    assert members(run) == [["n1", "n2"], ["n1", "n3"]]
    assert not [path for host in ("n1", "n3") for path in inside(lab, host, "/dev/shm").glob("*/node*/replica-*")]
    again = run.events("generation_started")[1]
    assert again["tier"] == "ram" and again["resumed_step"] > 10
    (tmp_path / "calm").mkdir()
    cluster = {**run.config["cluster"], "spares": 0}
    calm = Campaign(tmp_path / "calm", **{**run.config, "run_dir": str(tmp_path / "calm/run"), "cluster": cluster})
    calm.go_on()
    assert calm.run() == 0, calm.output + calm.logs()
    same(run, calm)


@pytest.mark.soak
def test_a_script_with_attach_goes_on_from_the_buddies_copies_when_a_host_is_gone(lab: Lab, tmp_path: Path):
    script = ROOT / "examples/ddp.py"
    (tmp_path / "job").mkdir()
    run = LabJob(
        lab,
        tmp_path / "job",
        entrypoint=f"{PACED} 0.2:{STEPS - 8} {script} {STEPS}",
        cluster={"nodes": 2, "spares": 1, "procs_per_node": 1, "threads_per_proc": 1, "device": "cpu"},
        checkpoint=tiers(NEVER),
        resilience={**HELD, "link_grace_s": 4},
    )
    run.start().reach(15)
    wait_for(lambda: replicated(lab, 10, ["n1", "n2"]), "replicas of what was computed")
    lab.crash("n2")
    run.go_on()
    assert run.wait() == 0, told(run)
    assert members(run) == [["n1", "n2"], ["n1", "n3"]]
    again = run.events("generation_started")[1]
    assert again["tier"] in KEPT_BY_BUDDIES and again["resumed_step"] > 10
    assert run.losses() == {step: {loss} for step, loss in torchrun(2, str(script), str(STEPS)).items()}


@pytest.mark.soak
def test_each_host_but_that_of_the_driver_may_be_lost_and_is_replaced_and_taken_in_again_when_it_is_back(lab: Lab, job: Jobs):
    run = job(steps=100_000, cluster={"spares": 1}, checkpoint=tiers(NEVER), resilience={"link_grace_s": 4})
    run.start().reach(15)
    assert run.steps() == [("agents", ["n1", "n2", "n3", "n4"])]
    expected = ["n1", "n2", "n3"]
    for lost, spare in (("n2", "n4"), ("n3", "n2"), ("n4", "n3"), ("n2", "n4")):
        step = run.step()
        wait_for(lambda step=step: replicated(lab, step, expected), "replicas of what was computed")
        log = run.run_dir / "logs" / f"agent{int(lost[1:]) - 1}.log"
        times = log.read_text().count(FIT)
        lab.crash(lost)
        expected[expected.index(lost)] = spare
        wait_for(lambda: members(run)[-1] == expected, f"{spare} in the place of {lost}\n{run.logs()}")
        assert run.events("generation_started")[-1]["tier"] in KEPT_BY_BUDDIES
        lab.boot(lost)
        wait_for(lambda log=log, times=times: log.read_text().count(FIT) > times, f"an agent on {lost}\n{run.logs()}")
        run.reach(run.step() + 5)
    run.signal(signal.SIGTERM)
    assert run.wait() == 75, told(run)
    assert actions(run) == ["replace_node"] * 4
    assert all(len(losses) == 1 for losses in run.losses().values())


@pytest.mark.soak
@pytest.mark.parametrize("host", ["n2", "n1"], ids=["of a member", "of the driver's host"])
def test_a_link_that_is_down_for_five_seconds_costs_no_restart(lab: Lab, keeping: Jobs, kept: Campaign, host: str):
    run = keeping(cluster={"spares": 1}, args={"step_s": 0.1, "holds": STEPS - 5})
    run.start().reach(10)
    began = time.monotonic()
    lab.flap(host, 5)
    took_s = time.monotonic() - began
    run.go_on()
    assert run.wait() == 0, told(run)
    node = {name: number for number, name in HOSTS.items()}[host]
    changes = [event for event in run.events("link") if event["interface"] is not None]
    assert {(each["node"], each["host"], each["interface"]) for each in changes} == {(node, host, "eth0")}
    assert [each["state"] for each in changes] in (["down", "up"], ["flapped"])
    # A node that is busy sees a change late; of a link that flapped between two looks it tells the most that it can have been.
    assert changes[-1]["down_s"] > 3.0 and (changes[-1]["state"] == "flapped" or changes[-1]["down_s"] < took_s + 2.0)
    assert len(members(run)) == 1
    assert not run.events("fault")
    same(run, kept)


# Slurm, too, must have patience: a host that it has not heard of for longer than that is down, and its step with it.
@pytest.mark.soak
@pytest.mark.parametrize("lab", [replace(TIMES, slurmd_timeout_s=120)], indirect=True, ids=["of a patient Slurm"])
def test_without_a_spare_a_host_that_is_not_heard_of_for_twenty_seconds_is_waited_for(lab: Lab, keeping: Jobs, kept: Campaign):
    run = keeping(args={"step_s": 0.1, "holds": STEPS - 5})
    run.start().reach(10)
    lab.flap("n2", 20)
    run.go_on()
    assert run.wait() == 0, told(run)
    assert len(members(run)) == 1, told(run)
    assert {action["name"] for action in run.events("action")} <= {"wait"}
    for fault in run.events("fault"):
        assert fault["kind"] in ("link_down", "collective_timeout")
    same(run, kept)


@pytest.mark.soak
def test_a_host_that_stays_cut_off_ends_its_own_ranks_and_is_replaced(lab: Lab, keeping: Jobs, kept: Campaign):
    run = keeping(
        cluster={"spares": 1},
        args=STANDING,
        checkpoint=tiers(NEVER),
        resilience={**HELD, "fence_s": 4, "link_grace_s": 4, "lost_s": 20},
    )
    run.start().reach(15)
    wait_for(lambda: replicated(lab, 10), "replicas of what was computed")
    assert workers(lab, "n3")
    lab.host("n3").set_link(up=False)
    wait_for(lambda: not workers(lab, "n3"), "the end of the ranks that are cut off")
    assert len(members(run)) == 1, "the spare was let in while the ranks were still there"
    run.go_on()
    assert run.wait() == 0, told(run)
    assert members(run) == [["n1", "n2", "n3"], ["n1", "n2", "n4"]]
    assert actions(run) == ["replace_node"]
    same(run, kept)


@pytest.mark.soak
def test_without_a_spare_fewer_hosts_go_on_and_one_that_boots_is_taken_in_again(lab: Lab, job: Jobs):
    run = job(
        steps=100_000,
        cluster={"min_nodes": 2},
        checkpoint=tiers(NEVER),
        resilience={"fence_s": 4, "lost_s": 8, "link_grace_s": 4, "rejoin_s": 0},  # before Slurm takes the host from the job
    )
    run.start().reach(15)
    wait_for(lambda: replicated(lab, 10), "replicas of what was computed")
    lab.crash("n3")
    wait_for(lambda: members(run)[-1] == ["n1", "n2"], f"a smaller generation\n{run.logs()}")
    lab.boot("n3")
    wait_for(lambda: members(run)[-1] == ["n1", "n2", "n3"], f"the return of the host\n{run.logs()}")
    run.reach(run.step() + 5)
    run.signal(signal.SIGTERM)
    assert run.wait() == 75, told(run)
    assert actions(run) == ["replace_node", "shrink", "grow"]
    smaller, grown = run.events("generation_started")[1:]
    assert smaller["tier"] in KEPT_BY_BUDDIES
    assert grown["tier"] == "ram"


@pytest.mark.soak
@pytest.mark.parametrize("lab", [replace(TIMES, slurmd_timeout_s=5)], indirect=True)
def test_a_host_that_slurm_calls_down_is_not_waited_for_any_longer(lab: Lab, job: Jobs):
    run = job(steps=100_000, cluster={"min_nodes": 2}, checkpoint=tiers(NEVER))
    run.start().reach(15)
    wait_for(lambda: replicated(lab, 10), "replicas of what was computed")
    lab.crash("n3")
    wait_for(lambda: members(run)[-1] == ["n1", "n2"], f"a smaller generation\n{run.logs()}")
    run.reach(run.step() + 5)
    run.signal(signal.SIGTERM)
    assert run.wait() == 75, told(run)
    (lost,) = [event for event in run.events("fault") if event["kind"] == "node_lost"]
    # A job that goes on without a node that is down does not have it any more: Slurm may be asked before that, or after it.
    assert "Slurm calls it DOWN" in lost["evidence"] or "Slurm has taken it out of the job" in lost["evidence"]
    assert actions(run) == ["replace_node", "shrink"]


def ours(lab: Lab, host: str) -> list[int]:
    """Ids of the processes on a host that are not Slurm's: srun listens everywhere, and asks munge who it is spoken to by."""
    found = []
    for pid in running(lab, host):
        with suppress(OSError):
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            found += [] if name.startswith(("srun", "slurm")) else [pid]
    return found


def free(lab: Lab, host: str) -> bool:
    """Nothing of a campaign is left on a host: no process, nothing in its memory."""
    return not ours(lab, host) and not list(inside(lab, host, "/dev/shm").iterdir())


def drain(lab: Lab, host: str) -> None:
    lab.controller.ask("scontrol", "update", f"NodeName={host}", "State=DRAIN", "Reason=test")


@pytest.mark.soak
@pytest.mark.parametrize(("spares", "after"), [(1, ["n1", "n4", "n3"]), pytest.param(0, ["n1", "n3"], marks=pytest.mark.soak)])
def test_a_host_that_slurm_drains_is_left_at_a_step_boundary_and_nothing_is_computed_again(
    lab: Lab, job: Jobs, reference: Campaign, spares: int, after: list[str]
):
    run = job(
        entrypoint="paced:train",
        args={"step_s": 1.0},  # Slurm is asked every half a minute
        cluster={"spares": spares, "min_nodes": 2},
        checkpoint=tiers(NEVER),
    )
    run.start().reach(3)
    drain(lab, "n2")
    wait_for(lambda: members(run)[-1] == after, f"a generation without the host\n{run.logs()}")
    wait_for(lambda: free(lab, "n2"), "the end of all that the host held")
    assert run.wait() == 0, told(run)
    assert members(run) == [["n1", "n2", "n3"], after]
    assert [event["name"] for event in run.events("action")] == ["evacuate"] and not run.events("fault")
    assert [line["step"] for line in run.metrics()] == list(range(1, STEPS + 1))  # none of them twice
    if spares:
        same(run, reference)


def reserve(lab: Lab, hosts: str, start_s: int) -> None:
    words = ["ReservationName=maint", f"StartTime=now+{start_s}", "Duration=60", "Users=root", f"Nodes={hosts}"]
    lab.controller.ask("scontrol", "create", "reservation", *words, "Flags=MAINT,IGNORE_JOBS")


@pytest.mark.soak
def test_a_host_that_a_maintenance_takes_is_left_before_it_begins(lab: Lab, job: Jobs, reference: Campaign):
    run = job(
        entrypoint="paced:train",
        args={"step_s": 1.0},  # Slurm is asked every half a minute
        cluster={"spares": 1},
        checkpoint=tiers(NEVER),
    )
    run.start().reach(3)
    reserve(lab, "n2", 300)
    wait_for(lambda: members(run)[-1] == ["n1", "n4", "n3"], f"a generation without the host\n{run.logs()}")
    assert run.wait() == 0, told(run)
    (action,) = run.events("action")
    assert action["name"] == "evacuate" and "the maintenance maint takes it" in action["reason"] and not run.events("fault")
    assert "the maintenance maint takes n2 from" in told(run)
    same(run, reference)


@pytest.mark.soak
def test_a_job_stops_before_a_maintenance_of_all_its_hosts(lab: Lab, job: Jobs):
    run = job(steps=100_000, entrypoint="paced:train", args={"step_s": 1.0}, checkpoint=tiers(NEVER))
    run.start().reach(3)
    reserve(lab, "ALL", 90)
    assert run.wait() == 75, told(run)
    (fault,) = run.events("fault")
    assert fault["kind"] == "time_limit" and "until the maintenance maint" in fault["detail"]
    assert run.events("committed")[-1]["step"] == run.metrics()[-1]["step"]


def test_a_job_listens_only_at_the_addresses_of_its_hosts_and_only_where_it_is_spoken_to(lab: Lab, keeping: Jobs):
    run = keeping(train={"steps": 100_000})
    run.start().reach(5)
    found = {host: {at for pid in ours(lab, host) for at, _ in listeners(pid)} for host in HOSTS.values()}
    assert found == {host: {address(host)} for host in HOSTS.values()}
    run.signal(signal.SIGTERM)
    run.wait()
