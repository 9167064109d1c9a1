"""Connections of ranks that are reset, or stall, without root: it happens, the right rung is taken, and no filter stays."""

import socket
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from conftest import Campaign, wait_for
from hands import hand, strike

from chaos import sockets

SO_GET_FILTER = 26  # with no room for it: of how many instructions it is

Counting = Callable[..., Campaign]


@pytest.fixture
def run(counting: Counting) -> Campaign:
    """A campaign that goes on until it is told to stop."""
    started = counting(steps=100_000, chaos={"allow": True}).start()
    started.reach(10)
    return started


def filters(pid: int) -> int:
    """How many TCP sockets of a process have a filter."""
    with sockets.borrowed(psutil.Process(pid)) as connections:
        return sum(bool(each.getsockopt(socket.SOL_SOCKET, SO_GET_FILTER)) for each in connections.values())


def told(run: Campaign) -> list[tuple[Any, ...]]:
    """Kinds of faults and what was done about them."""
    actions = {line["fault_id"]: line["name"] for line in run.events("action")}
    return [(line["kind"], actions[line["fault_id"]]) for line in run.events("fault")]


def test_a_reset_costs_one_restart_of_the_workers(run: Campaign):
    shown = strike(run, "connection_reset", rank=1)
    assert len(shown["peers"]) > 1
    wait_for(lambda: run.events("recovered"), f"the recovery\n{run.logs()}")
    print(told(run), run.events("fault"))
    assert [action for _, action in told(run)] == ["restart_workers"]


def test_a_stall_is_sat_out_if_it_is_short_and_its_filters_are_gone_even_if_the_hand_is_killed(run: Campaign):
    with hand(run, "socket_stall", rank=1, seconds=1000) as sent:
        pid = wait_for(lambda: next((pid for pid in run.workers().values() if filters(pid)), None), "filters")
        assert filters(pid) == len(sockets.established(psutil.Process(pid)))
        sent.kill()
    wait_for(lambda: not filters(pid), "the end of the filters")
    run.reach(run.step() + 10)
    assert not told(run)
