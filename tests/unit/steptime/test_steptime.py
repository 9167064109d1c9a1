"""From counted work to a step's time: the schedule and shared cores, fits, the order of layouts."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from resilient import compiling
from resilient.bench import results
from resilient.bench.rows import Row, Spread
from resilient.cli import app
from resilient.config import Config, Layout, layout
from resilient.steptime.asking import asked
from resilient.steptime.candidates import ordered
from resilient.steptime.rates import Rates, fitted, left_out, rank_correlation
from resilient.steptime.work import RankWork, Work, of_step
from resilient.suggest import described

MICRO = Work(flops=10.0, messages=1.0)
ONCE = Work(near_bytes=100.0)


def made(procs: int = 4, batch: int = 8, **parallel: object) -> tuple[Config, Layout]:
    config = Config.model_validate(
        {
            "cluster": {"procs_per_node": procs, "device": "cpu"},
            "model": {"layers": 4, "hidden": 64, "heads": 4},
            "parallel": parallel,
            "train": {"global_batch_size": batch, "micro_batch_size": 1},
        }
    )
    return config, layout(config, cpu_count=8, gpu_count=0)


def test_a_step_is_the_way_through_the_slowest_stage_with_its_bubble_and_what_is_done_once():
    ranks = [RankWork(MICRO, ONCE), RankWork(MICRO * 2, ONCE)]
    assert of_step(*made(pp=2), ranks) == Work(flops=20.0 * (4 + 1), near_bytes=100.0, messages=2.0 * (4 + 1))


def test_ranks_that_share_cores_compute_in_the_bubbles_of_each_other():
    ranks = [RankWork(MICRO, ONCE), RankWork(MICRO * 2, ONCE)]
    assert of_step(*made(pp=2), ranks, crowding=2.0).flops == 2 * 15.0 * 4  # all the work there is, and no bubble
    assert of_step(*made(pp=2), ranks, crowding=1.0).flops == 20.0 * (4 + 1)


COSTS = {"flops": 2e-12, "near_bytes": 1e-9, "far_bytes": 0.0, "messages": 3e-5, "operations": 0.0}
WORKS = [Work(flops=(1 + n % 3) * 1e11, near_bytes=(n % 4) * 5e7, messages=(n * n) % 7 * 1e3) for n in range(10)]


def test_a_fit_finds_the_costs_by_which_steps_came_about_and_none_is_below_zero():
    exact = Rates(COSTS)
    found = fitted([(work, exact(work)) for work in WORKS])
    assert {name: found.seconds[name] for name in ("flops", "near_bytes", "messages")} == pytest.approx(
        {name: COSTS[name] for name in ("flops", "near_bytes", "messages")}
    )
    against = [(work, 2e-11 * work.flops - 4e-9 * work.near_bytes) for work in WORKS]  # what is sent makes it faster
    assert min(fitted(against).seconds.values()) >= 0
    assert fitted(against).seconds["near_bytes"] == 0


def test_where_no_sample_goes_to_another_node_bytes_cost_what_they_do_inside_of_one():
    found = fitted([(work, Rates(COSTS)(work)) for work in WORKS])
    assert found.seconds["far_bytes"] == found.seconds["near_bytes"] == pytest.approx(1e-9)


def test_a_sample_that_is_left_out_has_no_say_in_its_prediction():
    samples = [(work, Rates(COSTS)(work)) for work in WORKS]
    odd = [*samples[:-1], (samples[-1][0], 50 * samples[-1][1])]
    assert left_out(odd)[-1] == pytest.approx(samples[-1][1])


def test_rank_correlation_is_that_of_the_order():
    assert rank_correlation([1, 2, 3, 4], [10, 200, 3000, 3e9]) == pytest.approx(1.0)
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    assert rank_correlation([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9487, abs=1e-4)
    assert rank_correlation([1, 1], [1, 2]) is None
    assert rank_correlation([1], [1]) is None


def test_rates_are_stated_in_the_form_in_which_they_are_told():
    found = Rates.stated({"flops_per_s": 4e14, "message_s": 2e-6, "bytes_per_s": 2e11})
    assert found(Work(flops=4e14, near_bytes=2e11, far_bytes=2e11, messages=5e5)) == pytest.approx(4.0)
    assert described(found).startswith("flops_per_s=4e+14, bytes_per_s=2e+11, far_bytes_per_s=2e+11, message_s=2e-06")
    for name, value in (("flops", 1.0), ("flops_per_s", 0.0), ("flops_per_s", float("nan"))):
        with pytest.raises(ValueError, match=name):
            Rates.stated({name: value})


def test_all_possible_layouts_are_in_the_order_of_their_steps_and_those_that_do_not_fit_behind_them():
    config, _ = made(4)

    def work_of(each: Config, _: Layout) -> list[RankWork]:
        slow = {1: 1.0, 2: 3.0, 4: 2.0}[each.parallel.tp]
        return [RankWork(Work(flops=slow), fits=each.parallel.pp < 4)] * each.parallel.pp

    found = ordered(config, lambda each: layout(each, cpu_count=8, gpu_count=0), work_of, lambda *_: 1.0, Rates({"flops": 1.0}))
    sizes = [(each.layout.tp, each.layout.pp, each.layout.dp) for each in found]
    assert sizes == [(1, 1, 4), (1, 2, 2), (2, 1, 2), (4, 1, 1), (2, 2, 1), (1, 4, 1)]
    assert [each.step_s for each in found[:-1]] == sorted(each.step_s for each in found[:-1])
    assert [each.fits for each in found] == [True] * 5 + [False]


def test_groups_that_shard_the_state_are_as_large_as_each_layout_leaves_them():
    config, _ = made(8, dp_replicate=2, dp_shard=4)
    found = ordered(
        config,
        lambda each: layout(each, cpu_count=8, gpu_count=0),
        lambda each, _: [RankWork()] * each.parallel.pp,
        lambda *_: 1.0,
        Rates({}),
    )
    shards = {(each.layout.tp, each.layout.pp): (each.layout.dp_replicate, each.layout.dp_shard) for each in found}
    assert shards == {(1, 1): (2, 4), (1, 2): (2, 2), (2, 1): (2, 2), (1, 4): (2, 1), (2, 2): (2, 1), (4, 1): (2, 1)}


def test_work_is_asked_for_as_many_ranks_as_there_are_where_the_config_leaves_that_open():
    config = Config.model_validate({"model": {"layers": 4, "hidden": 64, "heads": 4, "vocab_size": 64}, "parallel": {"pp": 2}})
    _, four = made(4, pp=2)
    assert len(asked(config, four)) == 2


CONFIG = """
cluster: {procs_per_node: 4, device: cpu}
model: {layers: 4, hidden: 64, heads: 4, seq_len: 64, vocab_size: 256}
train: {global_batch_size: 16, micro_batch_size: 2}
"""


def first_columns(output: str) -> list[tuple[int, ...]]:
    lines = [line.split() for line in output.splitlines()]
    return [tuple(map(int, words[:4])) for words in lines if len(words) > 4 and words[0].isdigit()]


def test_plan_orders_layouts_by_the_results_of_a_bench(tmp_path: Path):
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    bench = tmp_path / "bench"
    bench.mkdir()
    for number, work in enumerate(WORKS):
        took_s = 1e-4 * work.messages + 1e-12 * work.flops  # messages are dear here: layouts of few come first
        results.append(bench, Row(str(number), {}, "measured", step_s=Spread(took_s, took_s, took_s), work=work))
    said = CliRunner().invoke(app, ["plan", str(config), "--suggest", "--results", str(bench)])
    assert said.exit_code == 0, said.output
    found = first_columns(said.output)
    assert found[0] == (1, 1, 2, 2) and found[-1] == (4, 1, 1, 1)
    assert sorted(found) == [(1, 1, 1, 4), (1, 1, 2, 2), (1, 1, 4, 1), (2, 1, 1, 2), (2, 1, 2, 1), (4, 1, 1, 1)]
    assert "10 rows" in said.output and "message_s=0.0001" in said.output


def test_plan_orders_layouts_by_stated_rates_and_says_what_it_needs(tmp_path: Path):
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)

    def suggest(*words: str) -> str:
        said = CliRunner().invoke(app, ["plan", str(config), *words])
        return said.output if said.exit_code == 0 else f"{said.output}{said.exception}"

    found = first_columns(suggest("--suggest", "--rate", "flops_per_s=1e11", "--rate", "bytes_per_s=1e6"))
    assert found[-1] == (4, 1, 1, 1)
    anywhere = suggest("--suggest", "--rate", "flops_per_s=1e11", "cluster.device=auto")
    assert (1, 4, 1, 1) in first_columns(anywhere) and "on GPUs only" in anywhere
    assert "--results of a bench, or --rate flops_per_s" in suggest("--suggest")
    assert "there is no such file or directory" in suggest("--suggest", "--results", str(tmp_path / "nothing"))
    assert "'flops' is no rate" in suggest("--suggest", "--rate", "flops_per_s=1", "--rate", "flops=1")
    assert "must be NAME=NUMBER" in suggest("--suggest", "--rate", "flops_per_s=fast")
    assert "goes with --suggest" in suggest("--results", str(tmp_path))


def test_on_gpus_each_layout_is_predicted_as_it_would_run_compiled_where_it_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setattr(compiling, "_builds", lambda: True)
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)

    def table(*words: str) -> str:
        said = CliRunner().invoke(
            app, ["plan", str(config), "--suggest", "--rate", "flops_per_s=1e11", *words, "cluster.device=auto"]
        )
        assert said.exit_code == 0, said.output
        return said.output

    assert {sizes[0] for sizes in first_columns(table())} == {1, 2, 4}, "tensor-parallel ones, which are not compiled"
    rates = ("--rate", "operation_s=1e-5")
    assert table(*rates) == table(*rates, "parallel.tp=2"), "whatever the layout of the config is"
    assert {sizes[0] for sizes in first_columns(table("train.compile=true"))} == {1}, "as the config says"
