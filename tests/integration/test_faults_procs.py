"""Faults of processes and of ranks: each really happens, and the ledger names kind, culprit and action."""

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from campaigns import EVERY, Campaign, Training, same, wait_for, weights
from injectors import injector, strike

from chaos import faults
from chaos.fault import Inside
from chaos.primitives.processes import continues
from resilient.agent.oom import controller

Counting = Callable[..., Campaign]

ALLOWED = {"chaos": {"allow": True}}
SOON = {"hang_floor_s": 1.5}


@dataclass(frozen=True)
class Case:
    """A fault, and what must come of it beside what it expects itself."""

    fault: str
    says: str = ""  # in detail or evidence of the `fault` event
    state: str = ""  # of the process while the fault lasts
    stacks: str = ""  # in what incidents/ keeps of the rank
    params: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return " ".join([self.fault, *map(str, self.params.values())])


THAT_END = [
    Case("worker_kill", "SIGKILL"),
    Case("worker_segv", "Fatal Python error: Segmentation fault"),
    Case("worker_raise", "InjectedError: a fault was injected here (rank 1"),
    Case("worker_exit", "exit code 3"),
    Case("worker_memory_error", "MemoryError"),
]
THAT_HANG = [
    Case("worker_stop", "stopped (state T)", "", "toys.py", {"seconds": 60}),  # killed long before it is over
    Case("hang_data", "wait_for_a_sample", "S", "wait_for_a_sample"),
    Case("hang_python", "spinning", "R", "in spin"),
    Case("hang_python", "spinning", "R", "in spin", {"keep_interpreter": True}),
    Case("hang_collective", "waiting in a collective", "", "broadcast"),
    Case("hang_io", "stuck in the kernel (state D)", "D"),
    Case("hang_io", "blocked", "S", "in hang", {"uninterruptible": False}),
]


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def comes_to(pid: int, wanted: str, by: str) -> None:
    """The process comes to this state: a rank marks its order as taken first, and then does what it says."""
    wait_for(lambda: state(pid) == wanted, f"state {wanted} of process {pid} by {by}")


def calm(run: Campaign, recovered: int, steps: int = 15) -> None:
    """The run has recovered so often, and goes on."""
    wait_for(lambda: len(run.events("recovered")) >= recovered, f"recovery number {recovered}\n{run.logs()}")
    run.reach(run.step() + steps)


def without_buddies(run: Campaign) -> list[dict[str, Any]]:
    """The faults in the ledger. A buddy that was fetching from a node or a snapshot daemon that is gone says so as well."""
    return [event for event in run.events("fault") if event["kind"] != "storage"]


def told(run: Campaign, number: int, fault: str, params: dict[str, Any]) -> dict[str, Any]:
    """The fault that has this number in the ledger; it and the action are what the kind of fault expects."""
    expected = faults.kind(fault)(**params).expects()
    events, actions = without_buddies(run), run.events("action")
    assert len(events) == len(actions) == number, events
    event, action = events[-1], actions[-1]
    assert event["kind"] in expected.kinds, event
    assert action["fault_id"] == event["fault_id"]
    assert action["name"] in expected.actions, action
    return event


def whole(run: Campaign) -> None:
    """Every step up to the last one has one loss, however often it was computed."""
    losses = run.losses()
    assert sorted(losses) == list(range(1, run.step() + 1))
    assert all(len(values) == 1 for values in losses.values())


def stop(run: Campaign) -> None:
    run.signal(signal.SIGTERM)
    assert run.wait() == 75, run.output + run.logs()


def stopped_and_continued(run: Campaign) -> None:
    """An injector that is killed leaves nobody stopped, and nobody notices."""
    pid, before = run.workers()[1], len(run.events("fault"))
    with injector(run, "worker_stop", rank=1, seconds=60) as sent:
        wait_for(lambda: state(pid) == "T", "the stop")
        sent.kill()
        wait_for(lambda: state(pid) != "T", "the guard of the injector that was killed")
    run.reach(run.step() + 15)
    assert run.workers()[1] == pid
    assert len(run.events("fault")) == before


def without_a_store(run: Campaign) -> None:
    """Ranks that have met need their store no more."""
    evidence = strike(run, "store_kill")
    assert evidence["clients"] >= 2
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", evidence["port"]))
    run.reach(run.step() + 15)
    assert not run.events("fault")


def sent_in_vain(run: Campaign) -> None:
    """Injectors that find nothing to do it to say so, and take their orders back."""
    for fault, where, why in [
        ("worker_kill", {"rank": 7}, "rank 7 does not run here"),
        ("agent_kill", {"node": 3}, "the agent of node 3 does not run here"),
        ("worker_raise", {"rank": 1, "id": "never", "step": 1 << 40, "limit_s": 0.5}, "rank 1 did not come to step"),
    ]:
        with injector(run, fault, **where) as sent:
            assert why in sent.answer("failed")["reason"]
            assert sent.process.wait(100) == 1
    assert not list((run.run_dir / "chaos").glob("never*.order"))


@pytest.mark.soak
@pytest.mark.parametrize("cases", [THAT_END, THAT_HANG], ids=["ends", "hangs"])
def test_whatever_happens_to_a_rank_is_told_as_what_it_is_and_the_run_goes_on(counting: Counting, cases: list[Case]):
    run = counting(steps=100_000, args={"load_s": 0.002, "bad_rank": -1}, resilience=SOON, **ALLOWED).start()
    calm(run, 0, 20)
    if cases is THAT_HANG:
        stopped_and_continued(run)
        without_a_store(run)
    for number, case in enumerate(cases, 1):
        print(case)
        pid = run.workers()[1]
        with injector(run, case.fault, id=f"{number}", rank=1, **case.params) as sent:
            evidence = sent.answer("injected")["evidence"]
            if case.state:
                comes_to(pid, case.state, f"{case}")
            sent.answer("undone")
        assert evidence["pid"] == pid
        calm(run, number)
        event = told(run, number, case.fault, case.params)
        assert 1 in event["ranks"], (case, event)
        if faults.kind(case.fault)(**case.params).expects().culprit:
            assert event["ranks"] == [1], (case, event)
        assert case.says in event["detail"] + event["evidence"], (case, event)
        if case.stacks:
            assert case.stacks in (run.run_dir / "incidents" / event["fault_id"] / "rank1.txt").read_text(), case
        if "step" in evidence:
            assert event["step"] == evidence["step"], case
        assert not psutil.pid_exists(pid), case
    if cases is THAT_END:
        sent_in_vain(run)
    stop(run)
    whole(run)
    # Each order was carried out once, though its step was computed again.
    taken = [path for path in (run.run_dir / "chaos").glob("*.taken") if path.stat().st_size > len("{}")]
    assert len(taken) == sum(issubclass(faults.kind(case.fault), Inside) for case in cases)
    assert len(run.events("generation_started")) == 1 + len(cases)


def test_only_the_process_that_was_stopped_is_continued():
    with subprocess.Popen(["sleep", "600"]) as sleeping:
        process = psutil.Process(sleeping.pid)
        command = continues(process)
        process.suspend()
        wait_for(lambda: state(sleeping.pid) == "T", "the stop")
        subprocess.run([*command[:-1], str(int(command[-1]) + 1)], check=True)  # as if the number were another one's by now
        assert state(sleeping.pid) == "T"
        subprocess.run(command, check=True)
        wait_for(lambda: state(sleeping.pid) == "S", "its going on")
        sleeping.kill()
    subprocess.run(command, check=True)


@pytest.fixture
def ram() -> Iterator[Path]:
    """A directory in RAM."""
    path = Path(f"/dev/shm/resilient-test-procs-{os.getpid()}-{random.randrange(1 << 30)}")
    yield path
    shutil.rmtree(path, ignore_errors=True)


def tiers(run_dir: Path, ram: Path, **first: Any) -> dict[str, Any]:
    durable = {"name": "durable", "path": str(run_dir / "checkpoints")}
    return {"every_steps": EVERY, "tiers": [{"name": "ram", "path": str(ram), "keep_last": 2, **first}, durable]}


@pytest.mark.soak
def test_snapshot_daemon_agent_node_and_driver_go_one_after_the_other_and_no_bit_is_different(
    training: Training, reference_runs, ram: Path, tmp_path: Path
):
    never_durable = {**tiers(tmp_path / "disturbed/run", ram, replicas=1), "every_steps": 1000}
    cluster = {"nodes": 2, "procs_per_node": 1, "device": "cpu"}
    run = training(cluster=cluster, checkpoint=never_durable, resilience={"rejoin_s": 100}, **ALLOWED).start()
    wait_for((run.run_dir / "storage.json").exists, "the run directory")
    with (
        injector(run, "daemon_kill", node=0, step=3) as daemon,
        injector(run, "agent_kill", node=1, step=8) as agent,
        injector(run, "node_crash", node=0, step=20) as node,
        injector(run, "driver_kill", step=30) as driver,
    ):
        evidence = daemon.done()
        assert not psutil.pid_exists(evidence["pid"])
        run.reach(7)
        assert not without_buddies(run)

        evidence = agent.done()
        wait_for(lambda: run.events("recovered"), f"recovery\n{run.logs()}")
        assert not psutil.pid_exists(evidence["pid"])
        event = told(run, 1, "agent_kill", {})
        assert event["nodes"] == [1]

        evidence = node.done()
        hit = [evidence["pid"], *evidence["below"]]
        wait_for(lambda: not any(map(psutil.pid_exists, hit)), f"the end of {hit}")
        assert evidence["bytes"] > 0
        wait_for(lambda: len(run.events("recovered")) > 1, f"recovery\n{run.logs()}")
        assert [each["nodes"] for each in without_buddies(run)] == [[1], [0]]
        again = run.events("generation_started")[2]
        assert again["tier"] == "ram"  # of the buddy
        assert again["resumed_step"] >= 8

        evidence = driver.done()
        assert run.wait() == -signal.SIGKILL
        wait_for(lambda: not run.processes(), "the end of what ran under the driver")
    assert run.run() == 0, run.output + run.logs()
    same(run, reference_runs("bf16"))


def computed(run: Campaign) -> dict[int, set[str]]:
    """Every loss of a step that changed the weights, as text."""
    found: dict[int, set[str]] = {}
    for line in run.metrics():
        if "skipped" not in line:
            found.setdefault(line["step"], set()).add(repr(line["loss"]))
    return found


@pytest.mark.soak
def test_numbers_that_go_bad_are_computed_again_or_rolled_back_and_no_bit_is_different(
    training: Training, reference_runs, ram: Path, tmp_path: Path
):
    run = training(
        train={"guard": {"spike": 8.0, "window": 6}}, checkpoint=tiers(tmp_path / "disturbed/run", ram), **ALLOWED
    ).start()
    wait_for((run.run_dir / "storage.json").exists, "the run directory")
    spoilt = {
        "nan_gradient": {"rank": 1, "step": 6},
        "loss_spike": {"rank": 0, "step": 10},
        "weight_flip": {"rank": 1, "step": 16},
        "nan_gradient again": {"rank": 0, "step": 28, "steps": 4, "id": "again"},
    }
    with contextlib.ExitStack() as injectors:
        sent = {name: injectors.enter_context(injector(run, name.split()[0], **fields)) for name, fields in spoilt.items()}
        evidence = {name: each.done() for name, each in sent.items()}
    assert run.wait() == 0, run.output + run.logs()
    assert [evidence[name]["step"] for name in spoilt] == [6, 10, 16, 28]
    did = {name: [] for name in spoilt}
    for event in run.events("action"):
        step = int(event["fault_id"].split("-")[1]) if event["fault_id"].startswith("batch-") else None
        did.setdefault(str(step), []).append(event["name"])
    print(did)
    flipped = json.loads((run.run_dir / "chaos/flipped-16-rank1.json").read_text())
    print(flipped)
    assert computed(run) == reference_runs("bf16").losses()
    for name, array in weights(reference_runs("bf16")).items():
        assert array.tobytes() == weights(run)[name].tobytes(), name


@pytest.mark.soak
@pytest.mark.alone
def test_a_rank_that_is_made_slow_is_reported_until_it_is_not_slow_any_more(counting: Counting):
    run = counting(steps=100_000, every_steps=1000, resilience={"straggler_steps": 15}, **ALLOWED).start()
    calm(run, 0, 10)
    params = {"seconds": 8.0}
    with injector(run, "slow_rank", rank=1, **params) as sent:
        sent.done()
        wait_for(lambda: run.events("fault"), f"the straggler\n{run.logs()}")
        calm(run, 1)
    event = told(run, 1, "slow_rank", params)
    assert event["ranks"] == [1], event
    assert run.events("recovered")[0]["fault_id"] == event["fault_id"]
    stop(run)
    assert len(run.events("generation_started")) == 1


@pytest.mark.soak
@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED HERE: a memory cgroup of its own needs root")
def test_a_rank_that_uses_more_than_its_cgroup_may_is_ended_by_the_kernel_and_the_cgroup_is_removed(counting: Counting):
    found = controller(Path("/proc/self/mountinfo").read_text())
    assert found is not None
    run = counting(steps=100_000, **ALLOWED).start()
    calm(run, 0, 10)
    with injector(run, "worker_oom", rank=1, mib=64) as sent:
        sent.answer("injected")
        wait_for(lambda: any(found.mount.glob("resilient-chaos-worker_oom-*")), "the cgroup")
        (cgroup,) = found.mount.glob("resilient-chaos-worker_oom-*")
        calm(run, 1)
        sent.answer("undone")
        assert not cgroup.exists()
    event = told(run, 1, "worker_oom", {})
    assert (event["kind"], event["ranks"]) == ("exit", [1]), event
    assert f"killed by the OOM killer (cgroup /{cgroup.name}, limit 64 MiB" in event["detail"], event
    stop(run)
    whole(run)


@pytest.fixture
def namespace() -> Iterator[str]:
    """A network namespace with a range of ports of its own."""
    name = f"resilient-procs-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
    yield name
    subprocess.run(["ip", "netns", "del", name], check=True)


@pytest.mark.soak
@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED HERE: a network namespace with ports of its own needs root")
def test_a_generation_for_which_no_port_is_free_waits_for_one(counting: Counting, namespace: str):
    within = ["ip", "netns", "exec", namespace]

    def ports() -> str:
        read = [*within, "cat", "/proc/sys/net/ipv4/ip_local_port_range"]
        return subprocess.run(read, check=True, capture_output=True, text=True).stdout

    before = ports()
    run = counting(steps=100_000, **ALLOWED)
    run.within = within
    run.start()
    calm(run, 0, 10)
    with injector(run, "port_taken", within=within, node=0, seconds=600, lab="here") as sent:
        wait_for(lambda: ports() != before, "the ports to be taken")
        os.kill(run.workers()[1], signal.SIGKILL)
        wait_for(lambda: run.events("fault"), "the word of the worker's end")
        wait_for(lambda: "open_own_store" in (run.run_dir / "logs/agent0.log").read_text(), "a try in vain")
        sent.kill()
        wait_for(lambda: ports() == before, "the guard of the injector that was killed")
    calm(run, 1, 10)
    stop(run)
    whole(run)
    (event,) = run.events("fault")
    assert (event["kind"], event["ranks"]) == ("exit", [1]), event


def ahead_s() -> float:
    """How far the clock of this machine is ahead of the monotonic one."""
    return time.time() - time.monotonic()


@pytest.mark.alone
@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED HERE: setting the clock needs root")
def test_a_clock_that_jumps_and_jumps_back_costs_nothing_and_is_put_right_also_if_the_injector_is_killed(counting: Counting):
    # By more than a node may be silent, and a rank too.
    patience = {"fence_s": 2.0, "lost_s": 3.0, "hang_floor_s": 2.0}
    run = counting(steps=100_000, cluster={"nodes": 2, "procs_per_node": 1}, resilience=patience, **ALLOWED).start()
    run.reach(30)
    before = ahead_s()
    evidence = strike(run, "clock_jump", node=0, by_s=5.0, seconds=0.5)
    assert 4.5 < evidence["jumped_s"] < 5.5
    wait_for(lambda: abs(ahead_s() - before) < 0.5, "the jump to be undone")
    with injector(run, "clock_jump", node=0, by_s=-5.0, seconds=60) as sent:
        wait_for(lambda: ahead_s() - before < -4.0, "the jump back")
        sent.kill()
        wait_for(lambda: abs(ahead_s() - before) < 0.5, "the guard of the injector that was killed")
    run.reach(run.step() + 30)
    run.signal(signal.SIGTERM)
    assert run.wait() == 75, run.output + run.logs()
    assert not run.events("fault")
    assert len(run.events("generation_started")) == 1
    times = [line["t"] for line in run.metrics()]
    assert times == sorted(times)
    assert max(later - earlier for earlier, later in itertools.pairwise(times)) < 4.0
