"""What nodes hold of snapshots, as it goes through the coordinator."""

from typing import Any

from control_play import Play, about, beat, candidates, flush, inventory, shard

from checkpoint.protocol import DriverRequest, Flushed, Held, NoRoom, Replicate, Retain, StartJob, TierTrouble
from resilient.control.coordinator import State
from resilient.control.liveness import NO_STEP
from resilient.exits import Exit
from resilient.outbox import Finish, Outbox, RequestDaemon
from resilient.protocol.messages import Propose, Shutdown, Start
from resilient.snapshots import Snapshots, StoragePlan, TierPlan


def test_a_snapshot_is_told_once_every_node_holds_its_part(play):
    play.beat(0, 5)
    play.held(0, 5)
    assert not play.events("snapshot")
    play.held(1, 5)
    (told,) = play.events("snapshot")
    assert (told["step"], told["tier"], told["bytes"]) == (5, "ram", 200)
    assert {node: order.steps for node, order in play.requests(Retain)} == {0: (5,), 1: (5,)}


def test_nothing_is_forgotten_from_a_fault_until_the_ranks_go_on(play):
    play.beat(0, 5)
    for step in (5, 6):
        play.held(0, step), play.held(1, step)
    assert play.requests(Retain)
    effects = [*play.exit(1), *play.held(0, 7), *play.held(1, 7), *play.join(0), *play.join(1)]
    assert play.sent(Start, effects) and not play.requests(Retain, effects)
    effects = play.resumed(6, "ram")
    assert play.requests(Retain, effects)


def test_beats_of_other_ranks_take_no_snapshots_from_a_script_that_is_attached_later():
    play = Play(1, procs_per_node=2, script=True)
    play.start()
    play.held(0, 6)
    effects = play.report(0, heartbeats={0: beat(NO_STEP), 1: beat(1, play.now)})
    assert not play.requests(Retain, effects) and not play.events("generation_started")
    effects = play.resumed(6, "ram")
    assert play.requests(Retain, effects)
    (started,) = play.events("generation_started")
    assert (started["resumed_step"], started["tier"]) == (6, "ram")


def test_beats_of_a_script_take_no_snapshots_from_its_attach():
    """As of a warm-up, whose steps the script counts by itself."""
    play = Play(script=True)
    play.start()
    effects = play.beat(0, 1)
    assert not play.requests(Retain, effects) and play.events("generation_started")
    effects = play.resumed(6, "ram")
    assert play.requests(Retain, effects)


def test_a_step_is_durable_when_all_have_flushed_and_one_has_committed(play):
    effects = [*play.held(0, 5, wants=["scratch"]), *play.held(1, 5, wants=["scratch"])]
    orders = play.jobs("flush", effects)
    assert [node for node, _ in orders] == [0, 1]
    assert not play.jobs("commit", play.flushed(orders[0][1], (0,)))
    ((node, order),) = play.jobs("commit", play.flushed(orders[0][1], (1,)))
    assert node == 0
    assert not play.events("committed")
    play.committed(order)
    assert play.events("committed") == [{"step": 5, "tier": "scratch", "bytes": 200, "files": 81}]


def test_while_a_step_is_flushed_only_the_newest_one_after_it_waits(play):
    for step in (5, 6, 7):
        for node in (0, 1):
            play.held(node, step, wants=["scratch"])
    (first, *_) = [order for _, order in play.jobs("flush")]
    assert {order.key.step for _, order in play.jobs("flush")} == {5}
    play.flushed(first)
    effects = play.committed(play.jobs("commit")[0][1])
    assert {order.key.step for _, order in play.jobs("flush", effects)} == {7}


def test_the_run_ends_only_when_its_last_step_is_durable(play):
    play.resumed(2)
    for node in (0, 1):
        play.held(node, 300, wants=["scratch"])
    for rank in (0, 1):
        play.exit(rank, 0, step=300)
    assert play.coordinator.state is State.SAVING
    play.flushed(play.jobs("flush")[0][1])
    assert play.coordinator.state is State.SAVING
    play.committed(play.jobs("commit")[0][1])
    assert play.finish() == Finish(Exit.OK, "")
    assert {tuple(send.message.clear) for send in play.sent(Shutdown)} == {("ram",)}


def test_a_fault_during_a_drain_saves_what_the_agents_hold(play):
    for node in (0, 1):
        play.held(node, 9)
    play.do("stop", "SIGTERM")
    play.exit(1)
    for node in (0, 1):
        play.ready(node, 1, [shard(9, node)])
    assert {order.key.step for _, order in play.jobs("flush")} == {9}
    play.flushed(play.jobs("flush")[0][1])
    play.committed(play.jobs("commit")[0][1])
    assert play.coordinator.state is State.FINISHED
    assert play.finish().code is Exit.STOPPED


def test_a_stop_whose_step_would_come_too_late_saves_what_is_held_at_once(play):
    for node in (0, 1):
        play.held(node, 9)
    flush(play, 10, seconds=20.0)  # 200 bytes, and they may take twice as long
    for node in (0, 1):
        play.held(node, 11)
    effects = play.do("stop", "SIGTERM")
    assert {order.key.step for _, order in play.jobs("flush", effects)} == {11}
    assert play.sent(Propose, effects)


def test_a_state_that_cannot_be_made_durable_ends_with_unusable_and_says_where_it_is(play):
    for node in (0, 1):
        play.held(node, 300, wants=["scratch"])
    play.news(0, TierTrouble(generation=5, tier="scratch", detail="no space left on device", errno=28))
    assert play.events("fault")[0]["kind"] == "storage"
    for rank in (0, 1):
        play.exit(rank, 0, step=300)
    play.do("tick")
    play.wait(19)
    assert play.coordinator.state is State.SAVING
    play.wait(2)
    assert play.coordinator.state is State.FINISHED
    assert play.finish().code is Exit.UNUSABLE
    assert "step 300" in play.finish().message
    assert {tuple(send.message.clear) for send in play.sent(Shutdown)} == {()}


def test_a_flush_goes_on_in_the_next_generation_on_its_behalf(play):
    for node in (0, 1):
        play.held(node, 9, wants=["scratch"])
    before = play.jobs("flush")[0][1]
    play.exit(1)
    for node in (0, 1):
        play.ready(node, 1, [shard(9, node)])
    assert candidates(play.sent(Start)[-1].message) == [(9, "ram")]
    effects = play.resumed(9, "ram")
    after = play.jobs("flush", effects)[0][1]
    assert (before.key.step, before.generation, after.key.step, after.generation) == (9, 5, 9, 6)
    play.flushed(before)  # news of the attempt before mean nothing
    assert not play.jobs("commit")


def test_a_daemon_that_is_new_is_told_again_what_it_has_to_do(play):
    for node in (0, 1):
        play.held(node, 9, wants=["scratch"])
    effects = play.news(1, inventory(1, [shard(9, 1)], port=10))
    assert [(node, order.key.step) for node, order in play.jobs("flush", effects)] == [(1, 9)]


def test_no_room_anywhere_makes_the_environment_unusable(play):
    play.news(1, NoRoom(generation=5, size_bytes=1 << 30, places=("/dev/shm/x", "/scratch/x")))
    assert play.finish().code is Exit.UNUSABLE
    assert "/scratch/x" in play.finish().message


def alone(plan: StoragePlan, resumed_step: int, *news: Held) -> tuple[Snapshots, list[DriverRequest]]:
    """The snapshots core of a job of one node: what it asks of the daemon."""
    snapshots, out = Snapshots(plan), Outbox()
    snapshots.inventory(0, inventory(0))
    snapshots.begin(1, [0], out)
    snapshots.resumed(resumed_step, 0.0, out)
    for each in news:
        snapshots.on_news(0, each, 0.0, out)
    return snapshots, [effect.request for effect in out.take() if isinstance(effect, RequestDaemon)]


def test_a_shard_on_its_way_to_a_disk_is_not_forgotten_meanwhile():
    plan = StoragePlan(TierPlan("ram", 1), (TierPlan("nvme", 2),), TierPlan("scratch", 3), 3)
    held = Held(generation=1, shard=shard(6, 0, of=1, generation=1), wants=("nvme",))
    _, requests = alone(plan, 0, held)
    assert [each.key.step for each in requests if isinstance(each, StartJob) and each.kind == "copy"] == [6]
    retained = [each for each in requests if isinstance(each, Retain)]
    assert all(each.upto < 6 for each in retained if each.tier == "nvme")
    assert any(each.upto == 6 for each in retained if each.tier == "ram")


def test_a_stop_makes_durable_what_is_newer_than_the_checkpoint_that_was_gone_on_from_and_not_than_a_damaged_one():
    plan = StoragePlan(TierPlan("ram", 1), (), TierPlan("scratch", 3), 3, durable_step=30, durable_steps=(20, 30))
    held = Held(generation=1, shard=shard(25, 0, of=1, generation=1))
    snapshots, _ = alone(plan, 20, held)  # for the newest one was found damaged
    assert snapshots.behind
    out = Outbox()
    snapshots.save_newest(0.0, out)
    (request,) = [effect.request for effect in out.take() if isinstance(effect, RequestDaemon)]
    assert isinstance(request, StartJob) and (request.kind, request.key.step) == ("flush", 25)
    assert snapshots.superseded(ended=False) == []
    assert snapshots.checkpoints == [20, 25]


def replica(order: Replicate) -> Held:
    """A daemon has fetched what it was asked to."""
    held = shard(order.key.step, order.shard, replica=True)
    return Held(generation=order.generation, shard=held, job_id=order.job_id, write_s=0.1)


def failed_replica(play: Play, step: int, *, unreachable: bool) -> list[dict[str, Any]]:
    """A snapshot's copies are asked for, and that of part 1 does not come about; the faults that are told of it."""
    play.effects.clear()
    play.held(0, step)
    play.held(1, step)
    for node, order in play.requests(Replicate):
        if order.shard == 1:
            play.failed(node, order, "no good", unreachable=unreachable)
        else:
            play.news(node, replica(order))
    return play.events("fault")


def test_a_buddy_does_not_wait_for_a_node_that_is_gone():
    play = Play(replicas=True)
    play.start()
    play.held(0, 1)
    play.held(1, 1)
    ((buddy, order),) = [each for each in play.requests(Replicate) if each[1].shard == 1]
    effects = play.do("lost", 1, "silent for 8 s")
    assert play.cancelled(effects) == [(buddy, order.job_id)]
    play.failed(buddy, order, "cancelled", unreachable=True, cancelled=True)
    assert [fault["kind"] for fault in play.events("fault")] == ["node_lost"]


def test_the_ledger_says_when_all_of_a_snapshot_has_copies():
    play = Play(replicas=True)
    play.start()
    play.held(0, 1)
    play.held(1, 1)
    for count, (node, order) in enumerate(play.requests(Replicate)):
        assert len(play.events("replicated")) == 0, f"{count} of 2 parts"
        play.news(node, replica(order))
    assert play.events("replicated") == [{"step": 1, "tier": "ram"}]
    failed_replica(play, 2, unreachable=True)
    assert [each["step"] for each in play.events("replicated")] == []  # of step 2 there is one copy


def test_a_part_that_cannot_be_fetched_is_a_fault_of_storage_only_if_its_node_answers_or_stays_silent():
    play = Play(replicas=True)
    play.start()
    assert not failed_replica(play, 1, unreachable=True)
    assert [fault["kind"] for fault in failed_replica(play, 2, unreachable=True)] == ["storage"]
    play = Play(replicas=True)
    play.start()
    assert [fault["kind"] for fault in failed_replica(play, 1, unreachable=False)] == ["storage"]


def test_what_is_held_by_a_replica_is_flushed_from_there():
    play = Play(spares=1)
    play.start()
    for node in (0, 1):
        play.held(node, 9, wants=["scratch"])
    play.do("lost", 1, "gone")
    play.again(0, shards={0: [shard(9, 0), shard(9, 1, replica=True)]})
    effects = play.resumed(9, "ram")
    flushes = play.jobs("flush", effects)
    assert [(node, order.shard) for node, order in flushes] == [(0, 0), (0, 1)]
    for _, order in flushes:
        play.news(0, Flushed(**about(order), size_bytes=100, write_s=0.1))
    assert play.jobs("commit")


def test_what_a_skipped_step_leaves_is_let_go_but_not_the_steps_before_it(play):
    play.resumed(0)
    effects = play.skipped(1, 8)
    keep = [order for _, order in play.requests(Retain, effects)]
    assert keep
    assert all(order.upto < 7 and order.left_out == (8,) for order in keep)
    for node in (0, 1):
        effects = play.held(node, 7)
    assert [event["step"] for event in play.events("snapshot")] == [7]


def test_news_of_a_part_that_the_inventory_has_told_already_mean_nothing(play):
    for node in (0, 1):
        play.held(node, 9)
    play.exit(1)
    play.again(0, 1, shards={0: [shard(9, 0)], 1: [shard(9, 1)]})
    play.news(0, Held(generation=5, shard=shard(9, 0)))
    play.resumed(9, "ram")
    for step in (10, 11):
        for node in (0, 1):
            play.held(node, step)
    assert [event["step"] for event in play.events("snapshot")] == [9, 10, 11]


def test_a_step_of_which_a_node_never_tells_is_let_go_once_it_has_told_of_several_later_ones(play):
    play.resumed(0)
    for step in (7, 8, 9, 10):
        play.held(0, step)
    play.effects.clear()
    for step in (8, 9):
        play.skipped(1, step)
    assert all(7 not in order.left_out for _, order in play.requests(Retain))
    effects = play.skipped(1, 10)
    assert play.requests(Retain, effects)[-1][1].left_out == (7, 8, 9, 10)


def test_what_a_new_daemon_does_not_have_is_let_go_by_the_others(play):
    play.resumed(0)
    for step in (7, 8):
        play.held(0, step)
    effects = play.news(1, inventory(1, [shard(8, 1)], port=10))
    first, *_, last = [order for node, order in play.requests(Retain, effects) if node == 0]
    assert first.left_out == (7,)
    # The new daemon has the shard that was missing of step 8, so that 8 is complete and 7 is behind what is open.
    assert (last.steps, last.upto, last.left_out) == ((8,), 8, ())
    assert [event["step"] for event in play.events("snapshot", effects)] == [8]


def test_a_step_that_was_left_out_and_taken_again_counts(play):
    play.resumed(0)
    play.held(0, 7)
    play.skipped(1, 7)
    for node in (0, 1):
        effects = play.held(node, 7, again=1)
    assert [event["step"] for event in play.events("snapshot")] == [7]
    assert play.requests(Retain, effects)[-1][1].left_out == ()


def test_a_part_that_comes_after_all_were_told_to_do_without_its_step_does_not_count(play):
    play.resumed(0)
    play.held(0, 7)
    for step in (8, 9, 10):
        effects = play.skipped(1, step)
    assert 7 in play.requests(Retain, effects)[-1][1].left_out  # so that node 0 may overwrite it
    play.held(1, 7)
    assert not play.events("snapshot")
    for node in (0, 1):
        play.held(node, 11)
    assert [event["step"] for event in play.events("snapshot")] == [11]
