"""A run of which nodes are to be left."""

from collections.abc import Collection

from control_play import Play, shard

from resilient.protocol.messages import Arm, Proposed


def running(**settings: object) -> Play:
    play = Play(**settings)
    play.start()
    play.resumed(0)
    play.effects.clear()
    return play


def names(play: Play) -> list[str]:
    return [action["name"] for action in play.events("action")]


def evacuate(play: Play, *nodes: int, resumed: Collection[int] = ()) -> None:
    play.do("evacuate", dict.fromkeys(nodes, "it was asked for"), resumed)


def boundary(play: Play, step: int = 12) -> None:
    """The ranks of the members stop at one boundary, and end."""
    members = play.coordinator.membership.members
    for node in members:
        play.deliver(node, Proposed(generation=play.generation, checked=step - 1))
    assert {send.message.target for send in play.sent(Arm)} == {step}
    for rank in range(len(members)):
        play.exit(rank, 0, stopped=True, step=step)


def left(play: Play) -> None:
    """Node 1 is left: a snapshot of the boundary is held by the members."""
    evacuate(play, 1)
    play.wait(1)
    boundary(play)
    play.again(0, 1, shards={node: [shard(12, node)] for node in (0, 1)})
