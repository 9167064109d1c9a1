"""What a lost node costs, as the plan says it."""

from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from resilient.cli import app
from resilient.config import Config, Layout, layout, layouts, layouts_by_ranks, load
from resilient.plan import nodes_left
from resilient.throughput import advice, computing, of_a_device_lost, of_nodes_left, passes_of_a_step

EXAMPLES = Path(__file__).parents[3] / "examples"


def made(
    nodes: int, batch: int, micro: int = 1, procs: int = 1, least: int | None = None, **parallel: object
) -> tuple[Config, Layout]:
    config = Config.model_validate(
        {
            "cluster": {"nodes": nodes, "procs_per_node": procs, "min_procs_per_node": least, "device": "cpu"},
            "parallel": parallel,
            "train": {"global_batch_size": batch, "micro_batch_size": micro},
        }
    )
    return config, layout(config, cpu_count=8, gpu_count=0)


def table(config: Config, found: Layout) -> list[tuple[int, int, float]]:
    """Nodes left, replicas and throughput."""
    return [(each.nodes, each.layout.dp, round(each.throughput, 3)) for each in of_nodes_left(config, layouts(config, found))]


def test_every_number_of_nodes_from_the_fewest_allowed_makes_a_layout_with_a_replica_for_each():
    for given in ({}, {"dp": 4}):
        config, found = made(4, 8, **given)
        assert {nodes: each.dp for nodes, each in layouts(config, found).items()} == {1: 1, 2: 2, 3: 3, 4: 4}


def test_a_lost_node_costs_what_the_replica_with_most_micro_batches_needs():
    assert table(*made(4, 8)) == [(3, 3, 0.667), (2, 2, 0.5), (1, 1, 0.25)]
    assert table(*made(4, 12)) == [(3, 3, 0.75), (2, 2, 0.5), (1, 1, 0.25)]
    assert table(*made(4, 400))[0] == (3, 3, 0.746)
    assert table(*made(9, 9))[:2] == [(8, 8, 0.5), (7, 7, 0.5)]


def test_what_makes_no_whole_pipeline_is_left_out_of_the_layout():
    assert table(*made(8, 16, pp=2)) == [(7, 3, 0.714), (4, 2, 0.556), (2, 1, 0.294)]


@pytest.mark.parametrize(
    ("schedule", "virtual", "passes"),
    [("1f1b", 1, 4 + 1), ("gpipe", 1, 4 + 1), ("interleaved_1f1b", 2, 4 + 1 / 2), ("zero_bubble", 1, 4 + 1 / 3)],
)
def test_a_pipeline_is_filled_and_emptied_once_a_step(schedule: str, virtual: int, passes: float):
    config, found = made(4, 8, pp=2, schedule=schedule, virtual_stages=virtual)
    assert passes_of_a_step(config, found) == pytest.approx(passes)


def test_where_replicas_have_little_to_do_a_smaller_micro_batch_is_proposed():
    config, found = made(8, 16, 8)
    assert computing(config, found) == 0.25
    text = advice(config, found)
    assert text is not None
    assert text.startswith("replicas compute in 25% of their time: 2 micro batches of 8 are dealt out to dp 8")
    assert text.endswith("with train.micro_batch_size=2 a step would take about 25% as long")
    assert advice(*made(3, 4)) == "replicas compute in 67% of their time: 4 micro batches of 1 are dealt out to dp 3"
    assert advice(*made(8, 16, 2)) is None
    assert advice(*made(3, 400)) is None


def planned(example: str, monkeypatch: pytest.MonkeyPatch) -> Result:
    for name in ("SCRATCH", "PROJECT", "USER", "TMPDIR"):
        monkeypatch.setenv(name, "/tmp")
    return CliRunner().invoke(app, ["plan", str(EXAMPLES / example)])


@pytest.mark.parametrize(("example", "nodes", "left"), [("teuken-7b.yaml", 128, "80%"), ("13b-juwels.yaml", 40, "88%")])
def test_of_all_nodes_of_a_large_example_one_that_is_lost_costs_no_more(
    example: str, nodes: int, left: str, monkeypatch: pytest.MonkeyPatch
):
    found = planned(example, monkeypatch)
    assert found.exit_code == 0, found.output
    assert f"then the run goes on with {nodes - 1} down to 1 nodes" in found.output
    assert f"  {nodes - 1}  {left} with" in found.output.replace("   ", "  ")
    config = load(EXAMPLES / example, [])
    assert sorted(layouts(config, layout(config, cpu_count=1, gpu_count=0))) == list(range(1, nodes + 1))


def test_where_nodes_may_go_on_with_fewer_ranks_layouts_are_of_any_number_of_ranks():
    config, found = made(2, 8, procs=4, least=3, tp=2)
    assert {ranks: each.dp for ranks, each in layouts_by_ranks(config, found).items()} == {8: 4, 6: 3, 4: 2}
    config, found = made(2, 8, procs=4, least=1)
    assert sorted(layouts_by_ranks(config, found)) == list(range(1, 9))
    config, found = made(2, 8, procs=4)
    assert sorted(layouts_by_ranks(config, found)) == [4, 8]


@pytest.mark.parametrize(
    ("least", "parallel", "left"),
    [(None, {}, None), (4, {}, None), (3, {}, (7, 0.5)), (3, {"tp": 2}, None), (2, {"tp": 2}, (3, 0.667)), (1, {"tp": 4}, None)],
)
def test_what_a_device_that_is_lost_costs_where_its_node_goes_on(least, parallel, left):
    config, found = made(2, 8, procs=4, least=least, **parallel)
    told = of_a_device_lost(config, layouts_by_ranks(config, found))
    assert (told and (told.layout.dp, round(told.throughput, 3))) == left
    rows = nodes_left(config, found)
    assert ("2, one without a device" in rows) == (left is not None)


def test_what_a_rank_holds_is_planned_for_the_ranks_of_this_machine(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    words = ["cluster.procs_per_node=auto", "parallel.tp=2"]
    found = CliRunner().invoke(app, ["plan", str(EXAMPLES / "quickstart.yaml"), *words])
    assert found.exit_code == 0, found.output
    assert "2 = tp 2" in found.output and "fp32 masters" in found.output
