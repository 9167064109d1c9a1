"""Plans: the same seed gives the same faults, inside of the limits."""

from typing import Any

import pytest

from chaos.experiment import Experiment, ExperimentError
from chaos.fault import Aim, Need
from chaos.injectors.context import Target
from chaos.planning import Spread, World, blamed, plan

WORLD = World(nodes=4, procs_per_node=2, has=frozenset())


def experiment(**fields: Any) -> Experiment:
    return Experiment.model_validate({"name": "test", "campaign": {}, **fields})


def mixed(count: int = 40, limits: dict[str, Any] | None = None, **fields: Any) -> Experiment:
    kinds = {"worker_kill": 3, "worker_raise": 1, "agent_kill": {"weight": 1, "phase": "step"}}
    scheduled = fields.pop("faults", [])
    return experiment(faults=scheduled, random={"count": count, "kinds": kinds, **fields}, limits=limits or {})


def test_the_same_seed_gives_the_same_plan_and_another_one_another():
    wanted = mixed(nested=0.5)
    assert plan(wanted, 7, WORLD) == plan(wanted, 7, WORLD)
    assert plan(wanted, 7, WORLD) != plan(wanted, 8, WORLD)


def test_a_mix_has_as_many_faults_as_it_says_and_each_kind_at_least_once():
    found = plan(mixed(40), 0, WORLD).strikes
    assert len(found) == 40
    assert {strike.fault for strike in found} == {"worker_kill", "worker_raise", "agent_kill"}
    assert len({strike.id for strike in found}) == 40


def test_of_a_mix_that_has_more_than_the_limits_allow_no_more_are_drawn():
    many, few = (plan(mixed(count, limits={"faults": 7}, nested=0.5), 3, WORLD) for count in (1_000_000_000_000, 100))
    assert many == few
    assert len(many.strikes) in (6, 7)


def test_weights_decide_how_often_a_kind_is_drawn():
    names = [strike.fault for strike in plan(mixed(1000), 0, WORLD).strikes]
    assert names.count("worker_kill") > 2 * names.count("worker_raise") > 0


def test_a_second_fault_follows_during_recovery_as_often_as_asked_for_and_never_one_that_comes_with_a_step():
    groups = plan(mixed(400, nested=0.5), 0, WORLD).groups
    nested = [group.strikes[1] for group in groups if len(group.strikes) > 1]
    assert 0.35 < len(nested) / len(groups) < 0.65
    assert {strike.at.phase for strike in nested} == {"recovery"}
    assert {strike.fault for strike in nested} == {"worker_kill"}  # the others have a phase, or are done by the rank itself
    assert not any(len(group.strikes) > 1 for group in plan(mixed(400), 0, WORLD).groups)


def test_the_calm_before_each_is_in_its_range():
    calms = [group.strikes[0].calm_s for group in plan(mixed(100, calm_s=(2.0, 3.0)), 0, WORLD).groups]
    assert 2.0 <= min(calms) < 2.2
    assert 2.8 < max(calms) <= 3.0


def test_no_more_nodes_are_hit_than_allowed():
    for seed in range(20):
        hit = {
            strike.target.node if strike.target.node is not None else (strike.target.rank or 0) // 2
            for strike in plan(mixed(100, limits={"nodes": 2}), seed, WORLD).strikes
            if not isinstance(strike.target, str)
        }
        assert len(hit) == 2


def test_nodes_that_are_named_count_among_those_that_may_be_hit():
    faults = [{"fault": "worker_kill", "target": {"rank": 7}}, *[{"fault": "worker_kill"}] * 50]
    found = plan(experiment(faults=faults, limits={"nodes": 2}), 0, WORLD).strikes
    nodes = {strike.target.rank // 2 for strike in found}  # type: ignore[union-attr, operator]
    assert 3 in nodes
    assert len(nodes) == 2
    faults = [{"fault": "worker_kill", "target": {"rank": rank}} for rank in (0, 2, 4)]
    with pytest.raises(ExperimentError, match=r"limits\.nodes = 2: nodes 0, 1, 2"):
        plan(experiment(faults=faults, limits={"nodes": 2}), 0, WORLD)


def test_no_more_faults_are_planned_than_allowed():
    found = plan(mixed(40, limits={"faults": 5}), 0, WORLD)
    assert len(found.strikes) == 5
    assert found.left_out == {"the rest": "limits.faults: 5"}


def test_faults_of_the_schedule_and_of_the_mix_have_ids_of_their_own():
    found = plan(mixed(3, faults=[{"fault": "worker_kill"}, {"fault": "worker_raise"}]), 0, WORLD).strikes
    assert [strike.id.partition("-")[0] for strike in found] == ["1", "2", "3", "4", "5"]
    with pytest.raises(ExperimentError, match="the id 2-worker_kill stands twice"):
        plan(experiment(faults=[{"fault": "worker_kill", "id": "2-worker_kill"}, {"fault": "worker_kill"}]), 0, WORLD)


def test_no_more_faults_meet_than_allowed():
    faults = [{"id": "a", "fault": "worker_kill"}, {"fault": "worker_kill", "at": {"together": "a"}}]
    assert len(plan(experiment(faults=faults), 0, WORLD).groups) == 1
    with pytest.raises(ExperimentError, match=r"limits\.at_once = 1: a, 2-worker_kill are to meet"):
        plan(experiment(faults=faults, limits={"at_once": 1}), 0, WORLD)


@pytest.mark.parametrize(
    ("target", "where"), [({"rank": 8}, "rank = 8: there are 8, from 0 on"), ({"node": 4}, "node = 4: there are 4, from 0 on")]
)
def test_a_target_that_is_not_there_is_an_error(target: dict[str, int], where: str):
    with pytest.raises(ExperimentError, match=rf"faults\.0\.target\.{where}"):
        plan(experiment(faults=[{"fault": "worker_kill", "target": target}]), 0, WORLD)


def test_what_cannot_be_done_here_is_left_out_with_the_reason_and_what_comes_with_it_too():
    faults = [
        {"id": "a", "fault": "link_down", "target": {"node": 0}},
        {"id": "b", "fault": "worker_kill", "at": {"after": "a"}},
        {"id": "c", "fault": "worker_kill"},
    ]
    found = plan(experiment(faults=faults), 0, WORLD)
    assert [strike.id for strike in found.strikes] == ["c"]
    assert found.left_out == {"a": "needs lab, root", "b": "comes with a, which is left out"}
    all_there = World(4, 2, frozenset({Need.ROOT, Need.LAB}))
    assert len(plan(experiment(faults=faults), 0, all_there).strikes) == 3
    mix = plan(experiment(random={"count": 10, "kinds": {"link_down": 1, "worker_kill": 1}}), 0, WORLD)
    assert {strike.fault for strike in mix.strikes} == {"worker_kill"}
    assert mix.left_out == {"link_down": "needs lab, root"}


def test_a_port_that_is_to_go_down_by_no_command_is_left_out():
    faults = [{"fault": "ib_port", "with": {"down": ["true"]}}, {"fault": "worker_kill"}]
    found = plan(experiment(faults=faults), 0, WORLD)
    assert [strike.fault for strike in found.strikes] == ["worker_kill"]
    assert "`down` and `up` must say" in found.left_out["1-ib_port"]
    mix = plan(experiment(random={"count": 5, "kinds": {"ib_port": 1, "worker_kill": 1}}), 0, WORLD)
    assert "`down` and `up` must say" in mix.left_out["ib_port"]
    given = {"down": ["true"], "up": ["true"]}
    assert not plan(experiment(faults=[{"fault": "ib_port", "with": given}]), 0, WORLD).left_out


def test_faults_come_in_the_order_in_which_they_are_written_and_those_that_meet_are_one_group():
    faults = [
        {"id": "a", "fault": "worker_kill"},
        {"id": "b", "fault": "worker_kill", "at": {"after": "a", "phase": "recovery"}},
        {"id": "c", "fault": "worker_kill", "at": {"after": "a", "recovered": True}},
        {"id": "d", "fault": "worker_kill", "at": {"together": "c"}},
    ]
    groups = plan(experiment(faults=faults), 0, WORLD).groups
    assert [[strike.id for strike in group.strikes] for group in groups] == [["a", "b"], ["c", "d"]]


@pytest.mark.parametrize(
    ("aim", "wanted", "members", "found"),
    [
        (Aim.RANK, Target(rank=3), [0, 1, 2], Target(3, 1, "h1")),
        (Aim.RANK, Target(rank=3), [0, 3, 2], Target(3, 3, "h3")),  # a spare has taken the place of node 1
        (Aim.RANK, Target(rank=5), [0, 1], Target(1, 0, "h0")),  # it has shrunk
        (Aim.NODE, Target(node=2), [0, 1, 2], Target(None, 2, "h2")),
        (Aim.NODE, Target(node=2), [0, 1, 3], Target(None, 3, "h3")),
        (Aim.NODE, Target(rank=3), [0, 1, 2], Target(None, 1, "h1")),
    ],
)
def test_a_target_is_looked_for_in_the_generation_that_runs(aim: Aim, wanted: Target, members: list[int], found: Target):
    started = {"members": members, "nodes": [f"h{node}" for node in members], "world_size": 2 * len(members)}
    assert Spread.of_event(started).placed(aim, wanted) == found


# Nodes 0, 3, 2 with 4, 3 and 2 ranks: a spare has taken the place of node 1, and devices of two nodes are left out.
UNEVEN = {"members": [0, 3, 2], "nodes": ["h0", "h3", "h2"], "world_size": 9, "ranks": [4, 3, 2]}


@pytest.mark.parametrize(
    ("aim", "wanted", "found"),
    [
        (Aim.RANK, Target(rank=3), Target(3, 0, "h0")),
        (Aim.RANK, Target(rank=4), Target(4, 3, "h3")),
        (Aim.RANK, Target(rank=7), Target(7, 2, "h2")),
        (Aim.RANK, Target(rank=10), Target(1, 0, "h0")),  # not in this generation
        (Aim.RANK, Target(node=2), Target(7, 2, "h2")),
        (Aim.NODE, Target(rank=6), Target(None, 3, "h3")),
        (Aim.NODE, Target(rank=8), Target(None, 2, "h2")),
        (Aim.NODE, Target(rank=0, node=2), Target(None, 2, "h2")),
    ],
)
def test_where_a_rank_is_comes_from_the_ledger_where_nodes_have_fewer_ranks(aim: Aim, wanted: Target, found: Target):
    assert Spread.of_event(UNEVEN).placed(aim, wanted) == found


def test_the_culprit_is_who_was_blamed():
    assert blamed(Aim.RANK, [3], [1]) == Target(rank=3)
    assert blamed(Aim.RANK, [], [1]) == Target(node=1)
    assert blamed(Aim.NODE, [3], [1]) == Target(node=1)
    assert blamed(Aim.NODE, [3], []) == Target(rank=3)
    assert blamed(Aim.NODE, [], []) == Target(rank=0)


@pytest.mark.parametrize(
    ("target", "hit", "most", "found"),
    [
        (Target(8, 2, "h2"), [0, 1], None, Target(8, 2, "h2")),
        (Target(8, 2, "h2"), [0], 2, Target(8, 2, "h2")),
        (Target(8, 2, "h2"), [0, 2], 2, Target(8, 2, "h2")),
        (Target(8, 2, "h2"), [1, 3], 2, Target(4, 3, "h3")),  # node 1 was replaced
        (Target(None, 2, "h2"), [1, 3], 2, Target(None, 3, "h3")),
        (Target(8, 2, "h2"), [1], 1, None),
        (Target(host="h0"), [1], 1, Target(host="h0")),
    ],
)
def test_where_no_further_node_may_be_hit_one_is_that_was(target: Target, hit: list[int], most: int | None, found: Target | None):
    assert Spread.of_event(UNEVEN).confined(target, hit, most) == found
