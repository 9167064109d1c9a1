"""A run inside a network namespace, where its link is a real one that can be taken down."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest
from campaigns import Campaign, wait_for

NAMESPACES = pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED HERE: network namespaces with real links need root")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@pytest.fixture
def namespace() -> Iterator[str]:
    """A network namespace whose link `near` has its other end, `far`, in the same namespace."""
    name = f"resilient-run-{os.getpid()}"
    ip("netns", "add", name)
    ip("-n", name, "link", "add", "near", "type", "veth", "peer", "name", "far")
    ip("-n", name, "addr", "add", "10.77.0.1/24", "dev", "near")
    for link in ("lo", "near", "far"):
        ip("-n", name, "link", "set", link, "up")
    yield name
    ip("netns", "del", name)


@NAMESPACES
@pytest.mark.alone
def test_a_link_that_is_down_for_a_second_is_told_and_training_goes_on(counting: Callable[..., Campaign], namespace: str):
    run = counting(steps=100_000)
    run.within = ["ip", "netns", "exec", namespace]
    run.start()
    run.reach(10)
    began = time.monotonic()
    ip("-n", namespace, "link", "set", "far", "down")
    wait_for(lambda: run.events("link"), "the word that the link is down")
    time.sleep(max(0.0, began + 1.0 - time.monotonic()))
    ip("-n", namespace, "link", "set", "far", "up")
    took_s = time.monotonic() - began
    wait_for(lambda: len(run.events("link")) > 1, "the word that it is up")
    run.reach(run.step() + 10)
    run.signal(signal.SIGTERM)
    assert run.wait() == 75, run.output + run.logs()
    down, up = run.events("link")
    assert (down["node"], down["interface"], down["state"], down["detail"]) == (0, "near", "down", "no carrier")
    assert (up["state"], up["down_s"]) == ("up", pytest.approx(took_s, abs=0.5))
    assert not run.events("fault")
    assert len(run.events("generation_started")) == 1
    assert "link near of node 0" in run.output
