"""An agent that joins a store: what the driver says meanwhile."""

import socket
from collections.abc import Iterator
from typing import Any

import pytest
from parts import PATIENCE_S, Talk
from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError

from resilient.agent.agent import NodeAgent
from resilient.agent.rendezvous import CalledOff, join_store
from resilient.protocol.messages import Alive, Arm, DriverMessage, Ping, Propose, Shutdown, Start, Stop

PROPOSE, ARM, STOP = Propose(generation=1, reason="SIGTERM"), Arm(generation=1, target=3), Stop(generation=1)
START = Start(
    generation=2, node_rank=0, nodes=1, master_addr="a", master_port=1, collective_timeout_s=9.0, report_s=0.2, mtbf_s=9.0
)


class NoPreparations:
    """Stands for `resilient.agent.preparation.Preparations` where there are none."""

    def readable(self) -> list[int]:
        return []

    def step(self, ready: Any) -> None:
        pass


@pytest.fixture
def talk() -> Iterator[Talk]:
    made = Talk()
    yield made
    made.close()


def agent_with(talk: Talk, *messages: DriverMessage) -> NodeAgent:
    """An agent, without its processes, to which the driver has said this."""
    agent = NodeAgent.__new__(NodeAgent)
    agent._loop, agent._driver = talk.loop, talk.driver
    agent._preparations = NoPreparations()  # type: ignore[assignment]
    talk.peer.send(*messages)
    assert talk.loop.wait_until(lambda: len(talk.driver.inbox) == len(messages), PATIENCE_S)
    return agent


def test_an_agent_gives_a_generation_up_that_the_driver_stops_and_heeds_what_comes_after(talk: Talk):
    agent = agent_with(talk, PROPOSE, STOP, START)
    with pytest.raises(CalledOff):
        agent._pause(1e9)
    assert list(talk.driver.inbox) == [START]


def test_an_agent_that_joins_a_store_still_ends_when_the_driver_says_so(talk: Talk):
    agent = agent_with(talk, PROPOSE, Shutdown(generation=1, clear=("ram",)))
    with pytest.raises(RendezvousGracefulExitError):
        agent._pause(1e9)
    assert agent._clear == ("ram",)


def test_an_agent_that_joins_a_store_keeps_what_is_for_its_workers(talk: Talk):
    agent_with(talk, PROPOSE, ARM)._pause(0.0)
    assert list(talk.driver.inbox) == [PROPOSE, ARM]


def test_a_wait_for_an_answer_ends_when_the_driver_ends_the_run(talk: Talk):
    agent = agent_with(talk, PROPOSE, Shutdown(generation=1))
    with pytest.raises(RendezvousGracefulExitError):
        agent._await(lambda: False, 1e9)


def test_a_store_that_takes_the_connection_and_says_nothing_keeps_no_ping_waiting_and_the_driver_can_call_it_off(talk: Talk):
    agent = agent_with(talk)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        talk.peer.send(Ping(generation=0))
        answered: list[object] = []

        def call_off() -> None:
            if not answered:
                answered.extend(talk.peer.arrived())
                if answered:
                    talk.peer.send(STOP)

        talk.loop.each_turn(call_off)
        with pytest.raises(CalledOff):
            join_store("127.0.0.1", mute.getsockname()[1], timeout_s=600.0, pause=agent._pause, call=agent._call)
    assert answered == [Alive(generation=0)]
