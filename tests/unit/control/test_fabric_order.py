"""A job's first generation is in the order of the fabric, and replicas go to nodes below other switches."""

from dataclasses import replace

import pytest
from control_play import Play

from checkpoint.protocol import Replicate
from resilient.control import Coordinator
from resilient.protocol.messages import Hello, Start

PLACES = ["s0.n0", "s1.n1", "s0.n2", "s1.n3"]


@pytest.mark.parametrize("told_by", ["agents", "a file"])
def test_nodes_of_a_switch_follow_each_other_and_keep_no_replica_of_each_other(told_by: str):
    play = Play(4, replicas=True)
    places = {f"n{node}": place for node, place in enumerate(PLACES)} if told_by == "a file" else {}
    play.job = replace(play.job, stage_nodes=2, places=places)
    play.coordinator = Coordinator(play.job, last_generation=4)
    play.do("begin")
    play.do("prepared")
    for node, place in enumerate(PLACES):
        name, said = (f"n{node}.site", "wrong.n") if told_by == "a file" else (f"n{node}", place)
        play.deliver(node, Hello(generation=0, node=node, incarnation=1, host=name, addr=f"10.0.0.{node}", t=play.now, place=said))
        play.ready(node, 5000 + node)
    started = {each.node: each.message.node_rank for each in play.sent(Start)}
    assert started == {0: 0, 2: 1, 1: 2, 3: 3}
    for node in range(4):
        play.held(node, 1)
    order = {rank: node for node, rank in started.items()}
    pairs = {order[request.shard]: buddy for buddy, request in play.requests(Replicate)}
    assert len(pairs) == 4
    assert all(PLACES[node][:2] != PLACES[buddy][:2] for node, buddy in pairs.items())
