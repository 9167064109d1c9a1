"""Connections that are reset or stall, and ports that site commands take down, without root; nothing of it stays."""

import socket
from collections.abc import Callable
from pathlib import Path

import psutil
from campaigns import Campaign, wait_for
from injectors import injector, strike

from chaos.primitives import sockets

SO_GET_FILTER = 26  # with no room for it: of how many instructions it is


def filters(pid: int) -> int:
    """How many TCP sockets of a process have a filter."""
    with sockets.borrowed(psutil.Process(pid)) as connections:
        return sum(bool(each.getsockopt(socket.SOL_SOCKET, SO_GET_FILTER)) for each in connections.values())


def told(run: Campaign) -> list[tuple[str, str]]:
    """Kinds of faults and what was done about them."""
    actions = {line["fault_id"]: line["name"] for line in run.events("action")}
    return [(line["kind"], actions[line["fault_id"]]) for line in run.events("fault")]


def test_a_stall_is_sat_out_and_a_reset_costs_one_restart(counting: Callable[..., Campaign], tmp_path: Path):
    run = counting(steps=100_000, chaos={"allow": True}).start()
    run.reach(10)
    pid = run.workers()[1]

    assert strike(run, "socket_stall", rank=1, seconds=2.0)["dropped_packets"] > 0
    assert filters(pid) == 0
    run.reach(run.step() + 10)

    with injector(run, "socket_stall", rank=1, seconds=1000) as sent:
        wait_for(lambda: filters(pid) == len(sockets.established(psutil.Process(pid))), "filters on all sockets")
        sent.kill()
    wait_for(lambda: filters(pid) == 0, "the end of the filters of an injector that was killed")
    run.reach(run.step() + 10)
    assert told(run) == []

    shown = strike(run, "connection_reset", rank=1)
    assert (shown["pid"], len(shown["peers"]) > 1) == (pid, True)
    wait_for(lambda: run.events("recovered"), f"the recovery\n{run.logs()}")
    assert told(run) == [("exception", "restart_workers")]
    assert all(len(losses) == 1 for losses in run.losses().values())

    port = tmp_path / "port"
    port.write_text("up")
    down, up = [f"rm {port}"], [f"cp {run.path} {port}"]
    for missing in ({"down": down}, {"up": up}, {}):
        with injector(run, "ib_port", node=0, **missing) as sent:
            assert "unasked" in sent.answer("failed")["reason"]
    with injector(run, "ib_port", node=0, down=down, up=up, seconds=1000) as sent:
        wait_for(lambda: not port.exists(), "the command that takes it down")
        sent.kill()
    wait_for(port.exists, "the command that brings it up")
    run.reach(run.step() + 10)
