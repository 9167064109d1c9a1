"""Links and names of the lab's hosts that fail under a campaign: counters that move, the right rung, and nothing that stays."""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import HOSTS, ROOT, Job, on, wait_for

from chaos.lab.lab import Lab
from chaos.lab.shape import LOGIN

_path = ROOT / "tests" / "integration" / "hands.py"
_spec = importlib.util.spec_from_file_location("hands", _path)
assert _spec is not None
assert _spec.loader is not None
hands = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(hands)

RANKS = 3
TOYS = ROOT / "tests" / "integration"


class Toy(Job):
    """A job that counts: three hosts and a spare one, with the runtime's own timeouts."""

    def __init__(self, lab: Lab, directory: Path) -> None:
        cluster = {"nodes": RANKS, "procs_per_node": 1, "threads_per_proc": 1, "spares": 1, "device": "cpu"}
        config = {"entrypoint": "toys:count", "cluster": cluster, "train": {"steps": 1_000_000, "global_batch_size": 12}, "chaos": {"allow": True}}
        super().__init__(lab, directory, checkpoint={"every_steps": 20}, **config)
        self.script = f"export PYTHONPATH={TOYS}:{ROOT}\nexec $RUN"

    def strike(self, fault: str, host: str, **fields: Any) -> dict[str, Any]:
        """Do a fault to a host and undo it; what showed that it had happened."""
        return hands.strike(self, fault, lab=self.lab.place.name, host=host, node=self.node(host), **fields)

    def node(self, host: str) -> int:
        return {name: number for number, name in {**HOSTS, RANKS: "n4"}.items()}[host]

    def told(self) -> list[tuple[str, list[int], str]]:
        """Kind and nodes of each fault, and what was done about it."""
        actions = {line["fault_id"]: line["name"] for line in self.events("action")}
        return [(line["kind"], line["nodes"], actions[line["fault_id"]]) for line in self.events("fault")]

    def goes_on(self) -> None:
        self.reach(self.step() + 10)

    def exact(self) -> bool:
        """Whether every step had the loss that it must have, to the last bit, however often it was computed."""
        return all(losses == {repr(1.0 / step + RANKS * float(step))} for step, losses in self.losses().items())


def network(lab: Lab) -> dict[str, str]:
    """Links, queues, rules and mounts of all hosts, without what counts or runs."""
    looks = ["ip -o link", "tc qdisc", "iptables -S", "cat /proc/mounts", "cat /etc/hosts /etc/resolv.conf"]
    found = {host: on(lab, host, "sh", "-c", ";".join(looks)) for host in lab.shape().all_names}
    return {host: re.sub(r"state \w+|refcnt \d+", "", text) for host, text in found.items()}


def test_x(lab: Lab, tmp_path: Path):
    (tmp_path / "job").mkdir()
    run = Toy(lab, tmp_path / "job")
    run.start().reach(20)
    before = network(lab)
    import time
    for fault, host, params in [
        ("link_down", "n2", dict(seconds=3)),
        ("link_down", "n1", dict(seconds=3)),
        ("link_flap", "n3", dict(times=2, down_s=0.5, up_s=1)),
        ("packet_loss", "n2", dict(share=0.1, seconds=3)),
        ("bandwidth_cap", "n2", dict(mbit_per_s=0.1, seconds=3)),
        ("one_way_drop", "n2", dict(seconds=3)),
        ("one_way_drop", "n3", dict(seconds=3, lost="out")),
        ("coordinator_unreachable", "n3", dict(seconds=4)),
        ("dns_failure", "n2", dict(seconds=1)),
        ("partition", "n3", dict(seconds=3)),
        ("link_down", "n2", dict(seconds=15)),
    ]:
        t = time.time()
        shown = run.strike(fault, host, **params)
        t2 = time.time()
        run.goes_on()
        print(fault, host, params, shown, f"{t2-t:.1f} {time.time()-t2:.1f}", run.told(), [(e["node"], e["interface"], e["state"]) for e in run.events("link")], network(lab) == before, run.exact(), flush=True)
    if network(lab) != before:
        print(before, network(lab))
