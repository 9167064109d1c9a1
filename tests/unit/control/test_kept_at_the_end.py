"""What a job that ends leaves on its nodes: nothing that a later one may need is cleared."""

from dataclasses import replace

from control_play import Play, shard

from resilient.control.coordinator import Coordinator
from resilient.exits import Exit
from resilient.outbox import Finish
from resilient.protocol.messages import Shutdown
from resilient.snapshots import StoragePlan, TierPlan


def begun(nodes: int, *, durable_step: int = 400) -> Play:
    """Nobody has connected yet; an earlier job has left checkpoints up to a step."""
    play = Play(nodes)
    durable = TierPlan("scratch", 3)
    storage = StoragePlan(
        TierPlan("ram", 1), (TierPlan("nvme", 1),), durable, 3, durable_step=durable_step, durable_steps=(durable_step,)
    )
    play.job = replace(play.job, storage=storage)
    play.coordinator = Coordinator(play.job, last_generation=4)
    play.do("begin")
    play.do("prepared")
    return play


def cleared(play: Play) -> dict[int, tuple[str, ...]]:
    return {send.node: tuple(send.message.clear) for send in play.sent(Shutdown)}


def test_a_stop_before_nodes_have_said_what_they_hold_clears_nothing():
    play = begun(2)
    play.hello(0)
    play.hello(1)
    play.ready(0, shards=[shard(450, 0)])
    play.do("stop", "SIGINT")
    assert play.finish().code is Exit.STOPPED
    assert cleared(play) == {0: (), 1: ()}


def test_nor_does_a_job_whose_other_node_never_comes():
    play = begun(2)
    play.hello(0)
    play.ready(0, shards=[shard(450, 0), shard(450, 0, tier="nvme")])
    for _ in range(200):
        if any(isinstance(effect, Finish) for effect in play.wait(10.0)):
            break
    assert play.finish().code is Exit.UNUSABLE
    assert cleared(play) == {0: ()}


def test_before_ranks_go_on_nobody_knows_whether_the_newest_durable_checkpoint_is_sound():
    play = begun(1, durable_step=500)
    play.hello(0)
    play.ready(0, shards=[shard(450, 0, of=1)])
    play.do("stop", "SIGINT")
    play.do("stop", "SIGINT")
    assert cleared(play) == {0: ()}


def test_a_part_of_a_newer_snapshot_is_kept_for_the_node_that_is_gone():
    play = begun(2)
    for node in (0, 1):
        play.join(node)
    play.resumed(400)
    play.held(0, 450)
    play.do("lost", 1, "its connection was closed")
    play.ready(0, shards=[shard(450, 0)])
    play.do("stop", "SIGINT")
    play.do("stop", "SIGINT")
    assert cleared(play) == {0: ()}


def test_an_agent_that_has_come_back_and_not_said_what_it_holds_clears_nothing():
    play = begun(2)
    for node in (0, 1):
        play.join(node)
    play.resumed(400)
    play.do("lost", 1, "its connection was closed")
    play.hello(1)
    play.do("stop", "SIGINT")
    play.do("stop", "SIGINT")
    assert cleared(play) == {0: ("ram",), 1: ()}


def test_nodes_of_a_script_that_keeps_nothing_there_are_left_as_they_were_found():
    play = begun(2, durable_step=0)
    for node in (0, 1):
        play.join(node)
    play.do("stop", "SIGINT")
    play.do("stop", "SIGINT")
    assert cleared(play) == {0: ("ram",), 1: ("ram",)}
