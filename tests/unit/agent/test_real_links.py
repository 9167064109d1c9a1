"""Links of network namespaces, which go down, flap, vanish and lose packets."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

NAMESPACES = pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED HERE: network namespaces with real links need root")

# Looks when it is told to, or by itself every quarter second.
LOOKER = """
import json, select, sys
from dataclasses import asdict
from resilient.agent.links import LinkWatch, interfaces_of
names = interfaces_of("10.77.0.1", {})
links = LinkWatch(names)
print(json.dumps(links.names), flush=True)
interval_s = float(sys.argv[1]) or None
while True:
    if select.select([sys.stdin], [], [], interval_s)[0] and not sys.stdin.readline():
        break
    changes = [asdict(change) for change in links.poll()]
    if changes or interval_s is None:
        print(json.dumps([change for change in changes if change["interface"]]), flush=True)
"""

# Answers every byte, in the far namespace.
ANSWERER = """
import socket
server = socket.create_server(("10.77.0.2", 0))
print(server.getsockname()[1], flush=True)
peer, _ = server.accept()
while data := peer.recv(4096):
    peer.sendall(data)
"""

# Asks it without end, and tells of TCP.
ASKER = """
import json, socket, sys, threading
from dataclasses import asdict
from resilient.agent.links import LinkWatch
peer = socket.create_connection(("10.77.0.2", int(sys.argv[1])))
def ask():
    while True:
        peer.sendall(b"?")
        peer.recv(1)
links = LinkWatch(["near"])
threading.Thread(target=ask, daemon=True).start()
print("[]", flush=True)
while True:
    threading.Event().wait(0.25)
    if changes := links.poll():
        print(json.dumps([asdict(change) for change in changes]), flush=True)
"""


class Namespace:
    """A network namespace with one end of a veth pair, `near` at 10.77.0.1, the other end, `far`, in a second namespace."""

    def __init__(self) -> None:
        self.name = f"resilient-{os.getpid()}"
        self.far = f"{self.name}-far"
        for name in (self.name, self.far):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", self.name, "link", "add", "near", "type", "veth", "peer", "name", "far", "netns", self.far)
        ip("-n", self.name, "addr", "add", "10.77.0.1/24", "dev", "near")
        ip("-n", self.far, "addr", "add", "10.77.0.2/24", "dev", "far")
        self.set("near", "up")
        self.set("far", "up")

    def set(self, end: str, state: str) -> None:
        ip("-n", self.name if end == "near" else self.far, "link", "set", end, state)

    def poller(self, interval_s: float = 0.0) -> subprocess.Popen[str]:
        return self.python(self.name, LOOKER, str(interval_s))

    def python(self, where: str, code: str, *arguments: str) -> subprocess.Popen[str]:
        """A Python process in one of the namespaces."""
        command = ["ip", "netns", "exec", where, sys.executable, "-c", code, *arguments]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def close(self) -> None:
        for name in (self.name, self.far):
            ip("netns", "del", name)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@pytest.fixture
def namespace() -> Iterator[Namespace]:
    made = Namespace()
    yield made
    made.close()


class Looker:
    """The sampler in the namespace; `look` has it take a sample and returns what it says."""

    def __init__(self, namespace: Namespace, interval_s: float = 0.0) -> None:
        self.process = namespace.poller(interval_s)
        assert self.process.stdout is not None
        assert self.process.stdin is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        assert self.next() == ["near"]

    def next(self) -> Any:
        return json.loads(self.stdout.readline())

    def poll(self) -> list[tuple[str, float | None, str]]:
        self.stdin.write("look\n")
        self.stdin.flush()
        return [(change["state"], change["down_s"], change["detail"]) for change in self.next()]

    def __enter__(self) -> "Looker":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def down_for(namespace: Namespace, end: str, seconds: float) -> float:
    """Take a link down and up again; how long that took."""
    began = time.monotonic()
    namespace.set(end, "down")
    time.sleep(seconds)
    namespace.set(end, "up")
    return time.monotonic() - began


@NAMESPACES
@pytest.mark.parametrize(("end", "why"), [("near", "taken down on the node"), ("far", "no carrier")])
def test_a_real_link_that_goes_down_is_told_with_the_reason_and_the_time(namespace: Namespace, end: str, why: str):
    with Looker(namespace) as poller:
        assert poller.poll() == []
        began = time.monotonic()
        namespace.set(end, "down")
        assert poller.poll() == [("down", None, why)]
        inner = time.monotonic()
        time.sleep(1.0)
        namespace.set(end, "up")
        shortest = time.monotonic() - inner
        ((state, down_s, _),) = poller.poll()
        assert state == "up"
        assert down_s is not None
        assert shortest <= down_s <= time.monotonic() - began
        assert poller.poll() == []


@NAMESPACES
@pytest.mark.parametrize("end", ["near", "far"])
def test_a_real_flap_between_two_looks_is_seen_by_the_counters(namespace: Namespace, end: str):
    with Looker(namespace) as poller:
        poller.poll()
        took_s = down_for(namespace, end, 0.1)
        ((state, down_s, _),) = poller.poll()
        assert state == "flapped"
        assert down_s is not None
        assert down_s >= took_s
        assert poller.poll() == []


@NAMESPACES
def test_a_real_interface_that_vanishes_is_down_until_there_is_one_of_its_name(namespace: Namespace):
    with Looker(namespace) as poller:
        poller.poll()
        ip("-n", namespace.name, "link", "del", "near")
        assert poller.poll() == [("down", None, "the interface is gone")]
        ip("-n", namespace.name, "link", "add", "near", "type", "veth", "peer", "name", "far", "netns", namespace.far)
        assert poller.poll() == []
        namespace.set("near", "up")
        namespace.set("far", "up")
        assert [state for state, _, _ in poller.poll()] == ["up"]


@NAMESPACES
@pytest.mark.alone
def test_at_four_looks_a_second_an_outage_of_a_second_is_measured(namespace: Namespace):
    with Looker(namespace, 0.25) as poller:
        took_s = down_for(namespace, "far", 1.0)
        (down,) = poller.next()
        (up,) = poller.next()
        assert (down["state"], up["state"]) == ("down", "up")
        assert up["down_s"] == pytest.approx(took_s, abs=0.5)


@NAMESPACES
def test_real_retransmissions_on_a_link_that_looks_well_are_told(namespace: Namespace):
    processes = [namespace.python(namespace.far, ANSWERER)]
    try:
        assert processes[0].stdout is not None
        processes.append(namespace.python(namespace.name, ASKER, processes[0].stdout.readline().strip()))
        assert processes[1].stdout is not None
        assert json.loads(processes[1].stdout.readline()) == []
        # From now on, what is sent goes to a station that is not there.
        nowhere = ["lladdr", "02:00:00:00:00:99", "nud", "permanent"]
        ip("-n", namespace.name, "neigh", "replace", "10.77.0.2", "dev", "near", *nowhere)
        (change,) = json.loads(processes[1].stdout.readline())
        assert (change["interface"], change["state"], change["down_s"]) == (None, "retransmissions", None)
        assert 1 <= change["counters"]["TCPTimeouts"] <= change["counters"]["RetransSegs"]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
