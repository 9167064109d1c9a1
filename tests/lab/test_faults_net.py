"""Links and names of the lab's hosts that fail under a campaign: counters that move, the right action, and nothing that stays."""

import contextlib
import random
import re
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import injectors
import psutil
import pytest
from campaigns import ROOT, wait_for
from lab_jobs import HOSTS, TIMES, TOYS, LabJob, on
from soak import soaked, soaked_after

from chaos.lab.lab import Lab
from chaos.lab.shape import Shape

RANKS = 3
BEGINS, FIT = "watching the links", "health check: "  # in the log of an agent
START_S = 300.0  # of four agents at once, on a machine that has other things to do


class Toy(LabJob):
    """A job that counts: three hosts and a spare one, with the runtime's own timeouts."""

    def __init__(self, lab: Lab, directory: Path) -> None:
        cluster = {"nodes": RANKS, "procs_per_node": 1, "threads_per_proc": 1, "spares": 1, "device": "cpu"}
        config = {
            "entrypoint": "toys:count",
            "cluster": cluster,
            "train": {"steps": 1_000_000, "global_batch_size": 12},
            "chaos": {"allow": True},
        }
        super().__init__(lab, directory, checkpoint={"every_steps": 20}, **config)
        self.script = f"export PYTHONPATH={TOYS}:{ROOT}\nexec $RUN"

    def strike(self, fault: str, host: str, **fields: Any) -> dict[str, Any]:
        """Do a fault to a host and undo it; what showed that it had happened."""
        return injectors.strike(self, fault, lab=self.lab.paths.name, host=host, node=self.node(host), **fields)

    def node(self, host: str) -> int:
        return {name: number for number, name in {**HOSTS, RANKS: "n4"}.items()}[host]

    def goes_on(self) -> None:
        self.reach(self.step() + 10)

    def injector(self, fault: str, host: str, **fields: Any) -> Any:
        """Send an injector to a host."""
        return injectors.injector(self, fault, lab=self.lab.paths.name, host=host, node=self.node(host), **fields)

    def members(self) -> list[str]:
        """The hosts of the generation that runs, by node rank."""
        found: list[str] = self.events("generation_started")[-1]["nodes"]
        return found

    def started(self, host: str) -> int:
        """How often an agent has come up there, fit to take part."""
        return self._log(self.node(host)).count(FIT)

    def complete(self) -> bool:
        """Whether all agents are there, the spare one too, and fit to take part; those that were lost have come back since."""
        lost_t = {node: line["t"] for line in self.events("fault") if line["kind"] == "node_lost" for node in line["nodes"]}
        logs = [self._log(node) for node in range(RANKS + 1)]
        fit = all(log.rfind(FIT) > log.rfind(BEGINS) for log in logs)
        return fit and len(self.hosts()) == RANKS + 1 and all(_fit_t(logs[node]) > t for node, t in lost_t.items())

    def _log(self, node: int) -> str:
        return (self.run_dir / "logs" / f"agent{node}.log").read_text()

    def exact(self) -> bool:
        """Whether every step had the loss that it must have on as many ranks, to the last bit, however often it was computed."""
        ranks = {each["generation"]: each["world_size"] for each in self.events("generation_started")}
        return all(each["loss"] == _loss(each["step"], ranks[each["generation"]]) for each in self.metrics())


def _loss(step: int, ranks: int) -> float:
    """Of `toys.count`: the hosts that seven faults have cut off may be lost, and fewer go on."""
    return 1.0 / step + float(sum(rank + step - 1 for rank in range(ranks)))


def _fit_t(log: str) -> float:
    """When an agent was last said to be fit, unix seconds."""
    line = next(each for each in reversed(log.splitlines()) if FIT in each)
    return datetime.strptime(line[: len("2026-01-01 00:00:00")], "%Y-%m-%d %H:%M:%S").timestamp()


class Since:
    """What the ledger says since this was made."""

    def __init__(self, run: Toy) -> None:
        self._run, self._first = run, len(run.events())

    def _events(self, name: str) -> list[dict[str, Any]]:
        return [line for line in self._run.events()[self._first :] if line["event"] == name]

    def told(self) -> list[tuple[str, list[int], str]]:
        """Kind and nodes of each fault, and what was done about it."""
        actions = {line["fault_id"]: line["name"] for line in self._events("action")}
        return [(line["kind"], line["nodes"], actions[line["fault_id"]]) for line in self._events("fault")]

    def recovered(self) -> list[dict[str, Any]]:
        """Recoveries."""
        return self._events("recovered")

    def links(self) -> list[tuple[int, str, float | None]]:
        """Node, state and length of each change of a link."""
        changes = [line for line in self._events("link") if line["interface"] is not None]
        return [(line["node"], line["state"], line["down_s"]) for line in changes]


def network(lab: Lab) -> dict[str, str]:
    """Links, queues, rules and names of all hosts, without what counts or runs by itself."""
    looks = ["ip -o link", "tc qdisc", "iptables -S", "grep /etc/ /proc/mounts", "cat /etc/hosts /etc/resolv.conf"]
    found = {host: on(lab, host, "sh", "-c", ";".join(looks)) for host in lab.shape().all_names}
    return {host: re.sub(r"refcnt \d+", "", text) for host, text in found.items()}


@pytest.fixture(scope="module")
def run(own_lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toy]:
    """One campaign for all that follows: each test tells what happened since it began."""
    own_lab.up(Shape(hosts=4, slurm=True, times=TIMES))
    started = Toy(own_lab, tmp_path_factory.mktemp("toy"))
    started.start()
    wait_for(lambda: started.step() >= 20, f"the first steps\n{started.logs()}", START_S)
    yield started
    own_lab.down()


@pytest.fixture
def going(run: Toy) -> Iterator[Toy]:
    """Afterwards the run goes on, every loss is right, and the network of all hosts is as it was."""
    before = network(run.lab)
    yield run
    run.goes_on()
    assert run.exact()
    assert network(run.lab) == before


@pytest.fixture
def since(going: Toy) -> Since:
    """What has happened since, from a moment on at which all hosts take part."""
    wait_for(going.complete, f"all agents\n{going.logs()}")
    return Since(going)


def named(value: object) -> str:
    """The name of a fault; what else a parameter is has none."""
    return value if isinstance(value, str) else ""


# What is done for a moment, and which of its evidence must have moved.
SHORT = [
    ("link_down", "n2", {"seconds": 2}, "carrier_downs"),
    ("link_down", "n1", {"seconds": 2}, "carrier_downs"),  # of the driver's host
    ("link_flap", "n3", {"times": 2, "down_s": 0.5, "up_s": 1.0}, "carrier_downs"),
    ("packet_loss", "n2", {"share": 0.1, "seconds": 2}, "dropped_packets"),
    ("bandwidth_cap", "n2", {"mbit_per_s": 0.1, "seconds": 4}, "held_back_packets"),
    ("one_way_drop", "n2", {"seconds": 2}, "dropped_packets"),
    ("one_way_drop", "n3", {"seconds": 2, "lost": "out"}, "dropped_packets"),
    ("coordinator_unreachable", "n3", {"seconds": 3}, "dropped_packets"),
    ("partition", "n3", {"seconds": 2}, "dropped_packets"),
    ("dns_failure", "n2", {"seconds": 1}, None),
]


@pytest.mark.parametrize(("fault", "host", "params", "moves"), soaked_after(3, SHORT), ids=named)
def test_what_is_short_is_sat_out(run: Toy, since: Since, fault: str, host: str, params: dict[str, Any], moves: str | None):
    began = time.monotonic()
    shown = run.strike(fault, host, **params)
    took_s = time.monotonic() - began
    assert moves is None or shown[moves] > 0
    run.goes_on()
    assert not since.told()
    changes = since.links()
    if fault == "link_down":
        told = [(node, state) for node, state, _ in changes]
        # One that looked late has seen both at once.
        assert told in ([(run.node(host), "down"), (run.node(host), "up")], [(run.node(host), "flapped")])
        assert params["seconds"] - 1.5 < (changes[-1][2] or 0.0) and (len(told) == 1 or changes[-1][2] < took_s + 1.5)
    elif fault == "link_flap":
        assert sum(state in ("up", "flapped") for _, state, _ in changes) == params["times"]
        assert {node for node, _, _ in changes} == {run.node(host)}
    else:
        assert not changes


@pytest.mark.parametrize(
    ("fault", "params"),
    [
        ("link_down", {"seconds": 15}),
        soaked("coordinator_unreachable", {"seconds": 15}),
        soaked("one_way_drop", {"seconds": 15, "lost": "out"}),
    ],
    ids=named,
)
def test_a_host_that_is_silent_for_longer_is_replaced(run: Toy, since: Since, fault: str, params: dict[str, Any]):
    host = run.members()[1]
    times = run.started(host)
    run.strike(fault, host, **params)
    wait_for(since.recovered, f"the recovery\n{run.logs()}")
    assert ("node_lost", [run.node(host)], "replace_node") in since.told()
    assert host not in run.members()
    wait_for(lambda: run.started(host) > times, f"the return of {host}")


def test_a_reset_on_a_host_without_names_costs_one_restart(run: Toy, since: Since):
    host = run.members()[1]
    with run.injector("dns_failure", host, seconds=1000):
        wait_for(lambda: "chaos" in on(run.lab, host, "cat", "/etc/hosts"), "the end of all names")
        shown = injectors.strike(run, "connection_reset", within=run.lab.command([], host=host), rank=1)
        assert len(shown["peers"]) > 1
        wait_for(since.recovered, f"the recovery\n{run.logs()}")
    assert [(kind, action) for kind, _, action in since.told()] == [("exception", "restart_workers")]
    assert host in run.members()


# At the end, for a host that is cut off by all of these at once for long may be lost to the job.
UNDOABLE = {
    "link_down": ("ctl", r"n3@.*NO-CARRIER|n3@[^\n]*state DOWN"),
    "packet_loss": ("n3", r"-m statistic"),
    "bandwidth_cap": ("n3", r"qdisc tbf"),
    "one_way_drop": ("n3", r"-A INPUT -i eth0 -m comment"),
    "partition": ("n4", r"-A INPUT -s 10.88.0.11"),
    "coordinator_unreachable": ("n3", r"-p tcp -m tcp --sport"),
    "dns_failure": ("n3", r"# chaos-"),
}


@pytest.mark.soak
def test_all_is_undone_although_the_injectors_are_killed(run: Toy, since: Since):
    before = network(run.lab)
    with contextlib.ExitStack() as stack:
        sent = [stack.enter_context(run.injector(fault, "n3", seconds=1000)) for fault in UNDOABLE]
        for fault, (host, trace) in UNDOABLE.items():
            wait_for(lambda host=host, trace=trace: re.search(trace, network(run.lab)[host]), f"{fault}: {network(run.lab)}")
        for each in sent:
            each.kill()
    wait_for(lambda: network(run.lab) == before, "the end of all of them")


@pytest.mark.soak
@pytest.mark.parametrize("seed", [1, 2])
def test_all_is_undone_at_whatever_moment_the_injectors_are_killed(going: Toy, seed: int):
    run = going
    before, chance = network(run.lab), random.Random(seed)
    with contextlib.ExitStack() as stack:
        sent = [stack.enter_context(run.injector(fault, "n3", seconds=1000)) for fault in UNDOABLE]
        guards: dict[int, list[psutil.Process]] = {}

        def all_have_guards() -> bool:  # which come first; one whose fault cannot be injected beside the others ends again
            for process in [each.process for each in sent if each.process.pid not in guards]:
                children = psutil.Process(process.pid).children()
                if children or process.poll() is not None:  # it has ended, and its guard, before anybody looked
                    guards[process.pid] = children
            return len(guards) == len(UNDOABLE)

        wait_for(all_have_guards, "their guards")
        for each in sent:
            each.answer("armed")
        for each in sent:
            threading.Event().wait(chance.uniform(0.0, 0.1))
            each.kill()
    psutil.wait_procs([guard for several in guards.values() for guard in several], 200.0)
    assert network(run.lab) == before
