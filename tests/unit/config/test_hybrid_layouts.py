"""Hybrid sharding in the layout: what `dp_shard` and `dp_replicate` come to, at the start and while nodes are lost."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from resilient.cli import app
from resilient.config import Config, Layout, layout, layouts, layouts_by_ranks, settle, with_fewer_replicas, with_shards


def made(nodes: int, *, procs: int = 1, **parallel: object) -> tuple[Config, Layout]:
    config = Config.model_validate(
        {
            "cluster": {"nodes": nodes, "procs_per_node": procs, "device": "cpu"},
            "parallel": parallel,
            "train": {"global_batch_size": 32},
        }
    )
    return config, layout(config, cpu_count=8, gpu_count=0)


@pytest.mark.parametrize(
    ("parallel", "replicate", "shard"),
    [
        ({}, 1, 8),
        ({"dp_replicate": 2}, 2, 4),
        ({"dp_replicate": 8}, 8, 1),
        ({"dp_replicate": 2, "tp": 2}, 2, 2),
        ({"dp_shard": 2, "dp_replicate": "auto"}, 4, 2),
        ({"dp_shard": 3, "dp_replicate": "auto"}, 1, 8),
        ({"dp_shard": 8}, 1, 8),
    ],
    ids=str,
)
def test_what_one_key_leaves_open_the_other_and_dp_settle(parallel: dict[str, object], replicate: int, shard: int):
    _, found = made(8, **parallel)
    assert (found.dp_replicate, found.dp_shard) == (replicate, shard)


@pytest.mark.parametrize(
    ("nodes", "procs", "parallel", "together", "copies"),
    [
        (4, 1, {}, 1, 1),
        (4, 1, {"dp_replicate": 2}, 1, 2),
        (2, 2, {"dp_replicate": 2}, 1, 2),
        (1, 4, {"dp_replicate": 2}, 2, 1),
        (2, 4, {"dp_replicate": 4}, 2, 2),
        (4, 2, {"pp": 2, "dp_replicate": 2}, 1, 2),
        (2, 4, {"pp": 2, "dp_replicate": 2}, 2, 1),  # a node has a whole stage, and no other one has it
        (2, 3, {"dp_replicate": 3}, 3, 1),  # nodes do not hold the same as a whole
        (4, 2, {"tp": 2, "dp_replicate": 4}, 1, 4),
    ],
    ids=str,
)
def test_how_many_nodes_hold_the_same(nodes: int, procs: int, parallel: dict[str, object], together: int, copies: int):
    _, found = made(nodes, procs=procs, **parallel)
    assert (found.together(procs), found.copies) == (together, copies)


def shares(config: Config, found: Layout) -> dict[int, tuple[int, int]]:
    """By nodes that are left, groups and ranks that shard the state in each."""
    return {nodes: (each.dp_replicate, each.dp_shard) for nodes, each in sorted(layouts(config, found).items())}


@pytest.mark.parametrize(
    "parallel", [{"dp_replicate": 3}, {"dp": 6, "dp_replicate": 3}, {"dp_shard": 2, "dp_replicate": 3}], ids=str
)
def test_with_fewer_nodes_groups_are_dropped_and_none_is_sharded_anew_where_that_comes_out_even(parallel: dict[str, object]):
    config, found = made(6, **parallel)
    assert shares(config, found) == {1: (1, 1), 2: (1, 2), 3: (1, 3), 4: (2, 2), 5: (1, 5), 6: (3, 2)}


def test_the_layout_of_all_nodes_says_how_many_shard_the_state_where_the_config_leaves_ranks_to_the_machine():
    config = Config.model_validate(
        {
            "cluster": {"nodes": 6, "min_procs_per_node": 1},
            "parallel": {"dp_replicate": 3},
            "train": {"global_batch_size": 32},
        }
    )
    found = layout(config, cpu_count=6, gpu_count=12)
    assert (found.procs_per_node, found.dp_replicate, found.dp_shard) == (2, 3, 4)
    assert shares(config, found) == {1: (1, 2), 2: (1, 4), 3: (1, 6), 4: (2, 4), 5: (1, 10), 6: (3, 4)}
    assert layouts_by_ranks(config, found)[8].dp_replicate == 2


def test_a_group_of_several_nodes_with_tensor_parallelism_is_dropped_as_a_whole():
    config, found = made(4, procs=2, tp=2, dp_replicate=2)
    assert shares(config, found)[2] == (1, 2)


def test_ranks_find_the_layout_of_the_nodes_that_are_left_by_themselves():
    config, found = made(4, dp_replicate=2)
    named = with_shards(config, found)
    assert named.parallel.dp_shard == 2
    for ranks, expected in [(4, (2, 2)), (3, (1, 3)), (2, (1, 2))]:
        settled = settle(named, ranks, fewer=True)
        assert (settled.dp_replicate, settled.dp_shard) == expected


def test_a_config_whose_ranks_are_not_known_shards_over_all_that_are_left():
    config = Config.model_validate({"cluster": {"nodes": "auto"}, "parallel": {"dp_replicate": 2}})
    fewer = settle(with_fewer_replicas(config), 3)
    assert (fewer.dp_replicate, fewer.dp_shard) == (1, 3)


def test_without_hybrid_sharding_nothing_is_named():
    config, found = made(4)
    assert with_shards(config, found) is config


def test_the_plan_says_who_holds_the_same(tmp_path: Path):
    text = "data: {path: none}\nmodel: {vocab_size: 64}\ncluster: {nodes: 4, procs_per_node: 1}\nparallel: {dp_replicate: 2}\n"
    tiers = "checkpoint: {tiers: [{name: ram, path: /dev/shm/x, replicas: auto}, {name: scratch, path: /tmp/x}]}\n"
    (tmp_path / "config.yaml").write_text(f"run_dir: {tmp_path}/run\n{text}{tiers}")
    found = CliRunner().invoke(app, ["plan", str(tmp_path / "config.yaml")], env={"COLUMNS": "400"})
    assert found.exit_code == 0, found.output
    assert "dp 4 = 2 that shard the state × 2 that hold the same, on 2 nodes" in found.output
    assert "the same on 2 nodes, so that no other copies are made" in found.output


def test_the_plan_says_which_groups_are_left_where_the_config_leaves_ranks_to_the_machine(tmp_path: Path):
    text = "cluster: {nodes: 6, device: cpu}\nparallel: {dp_replicate: 3}\ntrain: {global_batch_size: 32}\n"
    (tmp_path / "config.yaml").write_text(f"run_dir: {tmp_path}/run\ndata: {{path: none}}\nmodel: {{vocab_size: 64}}\n{text}")
    found = CliRunner().invoke(app, ["plan", str(tmp_path / "config.yaml")], env={"COLUMNS": "400"})
    assert found.exit_code == 0, found.output
    assert "dp 4 = 2 × 2" in found.output
