"""What the trainer counts of a step's work."""

from pathlib import Path

import pytest

from resilient.worker import Config, Work, layout
from trainer.main import rank_work
from trainer.memory import memory
from trainer.shape import flops_per_token, shape_of
from trainer.work import rank_work as counted


def config_of(**sections: dict[str, object]) -> Config:
    base: dict[str, dict[str, object]] = {
        "cluster": {"device": "cpu", "procs_per_node": 4},
        "model": {"layers": 4, "hidden": 64, "heads": 4, "seq_len": 64, "vocab_size": 256},
        "train": {"global_batch_size": 16, "micro_batch_size": 2, "precision": "fp32"},
    }
    return Config.model_validate({**base, **{name: {**base.get(name, {}), **values} for name, values in sections.items()}})


def micro(config: Config) -> list[Work]:
    return [each.micro_batch for each in counted(config, shape_of(config, 256), layout(config, cpu_count=1, gpu_count=0))]


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 4), (2, 2)])
def test_the_products_of_a_micro_batch_are_those_that_mfu_counts_however_they_are_spread(tp: int, pp: int):
    config = config_of(parallel={"tp": tp, "pp": pp})
    per_token = flops_per_token(shape_of(config, 256))
    assert tp * sum(work.flops for work in micro(config)) == pytest.approx(2 * 64 * per_token)


def test_what_is_computed_again_is_counted():
    none, selective, full = (micro(config_of(train={"recompute": mode}))[0].flops for mode in ("none", "selective", "full"))
    scores = 4 * 4 * 64 * 64 * 2 * 64  # layers, 4 × hidden × seq_len of a token, tokens
    assert selective - none == scores
    assert full > none + scores


def test_what_crosses_nodes_is_counted_apart():
    near, far = (
        micro(config_of(cluster={"procs_per_node": procs, "nodes": 4 // procs}, parallel={"tp": 2, "pp": 2}))[0] for procs in (4, 2)
    )
    assert (near.far_bytes, near.messages) == (0, far.messages)
    stream = 2 * 64 * 64 * 4
    assert far.far_bytes == stream / 2  # to the next stage, a half of the sequence; tensor parallelism stays on the node
    assert near.near_bytes == far.near_bytes + far.far_bytes
    replicas = config_of(cluster={"procs_per_node": 1, "nodes": 4})
    (found,) = counted(replicas, shape_of(replicas, 256), layout(replicas, cpu_count=1, gpu_count=0))
    values = shape_of(replicas, 256).parameters
    assert found.step.far_bytes == pytest.approx(values * 3 / 4 * (4 + 4))  # weights gathered, gradients reduced, in fp32
    assert found.step.near_bytes == 0


@pytest.mark.parametrize(
    ("nodes", "procs", "replicate", "near", "far", "messages"),
    [
        (2, 2, 2, 1 / 2 * (4 + 4), 2 * 1 / 2 * 1 / 2 * 4, 1 + 1 + 2),  # a group on each node: shards of gradients alone leave it
        (4, 1, 4, 0, 2 * 3 / 4 * 4, 2 * 3),  # each rank has all of it
        (1, 4, 2, 1 / 2 * (4 + 4) + 2 * 1 / 2 * 1 / 2 * 4, 0, 1 + 1 + 2),
    ],
)
def test_with_hybrid_sharding_weights_stay_in_their_group_and_shards_of_gradients_are_summed_up_between_groups(
    nodes: int, procs: int, replicate: int, near: float, far: float, messages: int
):
    config = config_of(cluster={"procs_per_node": procs, "nodes": nodes}, parallel={"dp_replicate": replicate})
    (found,) = counted(config, shape_of(config, 256), layout(config, cpu_count=1, gpu_count=0))
    values, groups = shape_of(config, 256).parameters, 4 + 1
    assert found.step.near_bytes == pytest.approx(values * near)
    assert found.step.far_bytes == pytest.approx(values * far)
    assert found.step.messages == groups * messages + 2 * 3


def test_gradients_that_are_reduced_in_every_pass_are_sent_for_every_micro_batch():
    often = config_of(parallel={"reduce_gradients": "every"})
    seldom = config_of(parallel={"reduce_gradients": "last"})
    assert micro(often)[0].near_bytes > 0 == micro(seldom)[0].near_bytes


def test_shared_matrices_and_eager_layers_ask_for_more_operators():
    plain, shared, compiled = (
        micro(config_of(parallel={"tp": tp}, train={"compile": on}))[0].operations for tp, on in ((1, False), (4, False), (1, True))
    )
    assert compiled < plain < shared


def test_the_memory_that_a_bench_compares_is_the_plans_of_each_pipeline_rank(tmp_path: Path):
    config = Config.model_validate(
        {"model": {"layers": 5, "vocab_size": 61}, "cluster": {"procs_per_node": 2}, "parallel": {"pp": 2}}
    )
    planned = [memory(config, shape_of(config, 61), layout(config, cpu_count=1, gpu_count=0), rank) for rank in (0, 1)]
    assert [each.peak_bytes for each in rank_work(config)] == [each.peak for each in planned]
    assert rank_work(config)[0].state_bytes == planned[0].parameters + planned[0].gradients + planned[0].optimizer
