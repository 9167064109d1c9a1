"""Experiments: what a file may say, and what is said where it says something else."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from chaos import faults
from chaos.experiment import SHIPPED, Campaign, Experiment, ExperimentError, find, lasting, read, seed_of
from chaos.orchestration.campaign import is_one_of, merged, resolve, shortened
from chaos.planning import World, plan
from resilient.config import ConfigError, spans

GOOD: dict[str, Any] = {"name": "test", "campaign": {}, "faults": [{"fault": "worker_kill"}]}


def written(directory: Path, **changes: Any) -> Path:
    path = directory / "experiment.yaml"
    path.write_text(yaml.safe_dump({**GOOD, **changes}))
    return path


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"fautls": []}, "fautls: Extra inputs"),
        ({"name": "a b"}, "name: "),
        ({"faults": []}, "neither a fault in `faults` nor a mix"),
        ({"faults": [{"fault": "worker_kil"}]}, "faults.0: Value error, there is no fault 'worker_kil'; there are agent_kill"),
        ({"faults": [{"fault": "worker_raise", "with": {"mesage": "x"}}]}, "faults.0: .*with.mesage: .*its parameters are message"),
        ({"faults": [{"fault": "worker_kill", "at": {"phase": "lunch"}}]}, "faults.0.at.phase: "),
        ({"faults": [{"fault": "worker_kill", "at": {"after": "x"}}]}, "faults.0.at.after: no fault above it has the id 'x'"),
        ({"faults": [{"id": "x", "fault": "worker_kill"}] * 2}, "faults.1.id: 'x' stands twice"),
        ({"faults": [{"fault": "worker_kill", "target": {"host": 1}}]}, "faults.0.target"),
        ({"random": {"kinds": {"nothing": 1}}}, "random: .*there is no fault 'nothing'"),
        ({"random": {"kinds": {"worker_kill": 0}}}, "random.kinds.worker_kill.weight: "),
        ({"random": {"kinds": {"worker_kill": 1}, "calm_s": [3, 1]}}, "calm_s: shortest and longest"),
        ({"random": {"kinds": {"worker_kill": 1}}, "campaign": {"until": "faults"}}, "does not say how many"),
        ({"limits": {"minutes": 0}}, "limits.minutes: "),
    ],
)
def test_what_cannot_be_is_told_with_file_and_key(tmp_path: Path, changes: dict[str, Any], told: str):
    path = written(tmp_path, **changes)
    with pytest.raises(ExperimentError, match=rf"(?s)^{path}: .*{told}") as error:
        read(path)
    assert error.value.code == 78


def test_a_file_that_is_not_there_or_not_yaml_is_told(tmp_path: Path):
    with pytest.raises(ExperimentError, match=r"none\.yaml: No such file"):
        read(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(ExperimentError, match=r"bad\.yaml: not YAML"):
        read(tmp_path / "bad.yaml")


def test_experiments_that_come_along_are_found_by_their_names_and_others_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    assert find("quick") == SHIPPED / "quick.yaml"
    with pytest.raises(ExperimentError, match=r"quik: there is no such file; experiments that come along: .*quick"):
        find("quik")
    (tmp_path / "quick").write_text("")
    assert find("quick") == Path("quick")


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.yaml")), ids=lambda path: path.stem)
def test_experiments_that_come_along_can_be_planned_and_their_campaigns_resolved(path: Path, tmp_path: Path):
    experiment = read(path)
    config = resolve(experiment.campaign, path, tmp_path, allow=True)
    cluster = config.cluster
    assert isinstance(cluster.procs_per_node, int)
    everything = frozenset(need for name in faults.names() for need in faults.kind(name).needs)
    found = plan(experiment, 0, World(cluster.nodes, cluster.procs_per_node, everything))
    assert found.strikes
    assert not found.left_out


def test_a_campaign_is_the_file_with_changes_in_a_directory_of_its_own(tmp_path: Path):
    (tmp_path / "base.yaml").write_text("train: {steps: 5, global_batch_size: 4}\nrun_dir: elsewhere\n")
    wanted = Campaign(file=Path("base.yaml"), config={"train": {"steps": 7}})
    config = resolve(wanted, tmp_path / "experiment.yaml", tmp_path / "out", allow=True, changes={"seed": 3})
    assert (config.train.steps, config.train.global_batch_size, config.seed) == (7, 4, 3)
    assert config.run_dir == tmp_path / "out" / "run"
    assert config.chaos.allow
    assert not resolve(wanted, tmp_path / "experiment.yaml", tmp_path / "twin", allow=False).chaos.allow
    with pytest.raises(ExperimentError, match=r"campaign\.file: .*none\.yaml: No such file"):
        resolve(Campaign(file=Path("none.yaml")), tmp_path / "experiment.yaml", tmp_path / "out", allow=True)
    with pytest.raises(ConfigError, match="did you mean 'steps'"):
        resolve(Campaign(config={"train": {"stepz": 7}}), tmp_path / "experiment.yaml", tmp_path / "out", allow=True)


@pytest.mark.parametrize("optimizer", [{}, {"decay_samples": 900}, {"warmup_tokens": 640, "decay_tokens": 640_000}])
def test_a_reference_run_that_ends_earlier_has_the_same_learning_rates(optimizer: dict[str, Any], tmp_path: Path):
    wanted = Campaign(config={"train": {"steps": 1_000_000}, "model": {"seq_len": 64}, "optimizer": optimizer})
    config = resolve(wanted, tmp_path / "experiment.yaml", tmp_path / "out", allow=True)
    reference = resolve(wanted, tmp_path / "experiment.yaml", tmp_path / "twin", allow=False, changes=shortened(config, 30))
    assert reference.train.steps == 30
    assert spans(reference) == spans(config)


def test_mappings_are_merged_and_all_else_is_replaced():
    assert merged({"a": {"b": 1, "c": [1]}, "d": 1}, {"a": {"c": [2]}, "e": 2}) == {"a": {"b": 1, "c": [2]}, "d": 1, "e": 2}


def test_a_mix_can_be_told_to_last_and_nothing_else_can():
    mixed = Experiment.model_validate({**GOOD, "random": {"count": 3, "kinds": {"worker_kill": 1}, "seed": 5}})
    longer = lasting(mixed, 90.0)
    assert longer.random is not None
    assert (longer.random.minutes, longer.random.count, longer.campaign.until) == (90.0, None, "faults")
    assert longer.limits.minutes > 90
    with pytest.raises(ExperimentError, match="no random mix"):
        lasting(Experiment.model_validate(GOOD), 5.0)
    assert (seed_of(mixed, None), seed_of(mixed, 9), seed_of(Experiment.model_validate(GOOD), None)) == (5, 9, 0)


@pytest.mark.parametrize(
    ("code", "exits", "fits"), [(75, {75}, True), (-9, {137}, True), (137, {-9}, True), (-9, {75}, False), (1, {-9, 75}, False)]
)
def test_an_end_by_a_signal_may_be_written_in_both_ways(code: int, exits: set[int], fits: bool):
    assert is_one_of(code, frozenset(exits)) is fits
