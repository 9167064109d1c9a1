"""Experiments: what a file may say, and what is said where it says something else."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from chaos import faults
from chaos.experiment import SHIPPED, Campaign, Experiment, ExperimentError, find, lasting, located, read, seed_of
from chaos.fitting import fit
from chaos.orchestration.campaign import is_one_of, merged, resolve, shortened
from chaos.planning import World, plan
from resilient.config import Config, spans

GOOD: dict[str, Any] = {"name": "test", "campaign": {}, "faults": [{"fault": "worker_kill"}]}


def written(directory: Path, **changes: Any) -> Path:
    path = directory / "experiment.yaml"
    path.write_text(yaml.safe_dump({**GOOD, **changes}))
    return path


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"fautls": []}, "fautls: unknown key; did you mean 'faults'"),
        ({"name": "a b"}, "name = a b: allowed: text, of the form"),
        ({"faults": []}, "there is neither a fault in `faults` nor a mix"),
        ({"faults": [{"fault": "worker_kil"}]}, "faults.0.fault = worker_kil: there is no such fault; allowed: agent_kill"),
        (
            {"faults": [{"fault": "worker_raise", "with": {"mesage": "x"}}]},
            "faults.0.with.mesage: unknown parameter; allowed here: message",
        ),
        ({"faults": [{"fault": "worker_kill", "at": {"phase": "lunch"}}]}, "faults.0.at.phase = lunch: allowed: start, load"),
        ({"faults": [{"fault": "worker_kill", "at": {"after": "x"}}]}, "faults.0.at.after = x: no fault above it has this id"),
        ({"faults": [{"id": "x", "fault": "worker_kill"}] * 2}, "faults.1.id = x: stands twice"),
        (
            {"faults": [{"fault": "worker_kill", "target": {"host": 1}}]},
            "faults.0.target = .*: allowed: a mapping or random, culprit",
        ),
        ({"random": {"kinds": {"nothing": 1}}}, "random.kinds.nothing: there is no such fault"),
        ({"random": {"kinds": {"worker_kill": 0}}}, "random.kinds.worker_kill.weight: allowed: a number, above 0"),
        ({"random": {"kinds": {"worker_kill": 1}, "calm_s": [3, 1]}}, r"random.calm_s = \[3.0, 1.0\]: shortest and longest"),
        (
            {"random": {"kinds": {"worker_kill": 1}}, "campaign": {"until": "faults"}},
            "campaign.until = faults: .*does not say how many",
        ),
        ({"limits": {"minutes": 0}}, "limits.minutes = 0: allowed: a number, above 0"),
        ({"tolerance": float("inf")}, "tolerance = inf: allowed: .*finite"),
        ({"faults": [{"fault": "worker_kill", "at": {"s": float("inf")}}]}, "faults.0.at.s = inf: allowed: .*finite"),
        (
            {"faults": [{"fault": "worker_stop", "with": {"seconds": float("nan")}}]},
            "faults.0.with.seconds = nan: allowed: .*finite",
        ),
    ],
)
def test_what_cannot_be_is_told_with_file_line_key_and_what_is_allowed(tmp_path: Path, changes: dict[str, Any], told: str):
    path = written(tmp_path, **changes)
    with pytest.raises(ExperimentError, match=rf"(?s)^{path}(:\d+)?: {told}") as error:
        read(path)
    assert error.value.code == 78


STEPS = {"train": {"steps": 60}}
RAM = {"checkpoint": {"tiers": [{"name": "ram", "path": "/dev/shm"}, {"name": "lustre", "path": "/lustre"}]}}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"faults": [{"fault": "worker_kill", "at": {"step": 61}}]}, ":4: faults.0.at.step = 61: allowed: up to 60, "),
        ({"steady_steps": 100}, ":5: steady_steps = 100: allowed: below 60, "),
        (
            {"faults": [{"fault": "tier_full", "with": {"tier": "nosuch"}}]},
            ":5: faults.0.with.tier = nosuch: allowed: memory, ram, lustre",
        ),
        (
            {"faults": [{"fault": "snapshot_lost", "with": {"tier": "durable"}}]},
            ":5: faults.0.with.tier = durable: allowed: memory, ram$",
        ),
        (
            {"faults": [{"fault": "snapshot_lost", "with": {"tier": "lustre"}}]},
            ":5: faults.0.with.tier = lustre: allowed: memory, ram$",
        ),
        (
            {"random": {"kinds": {"tier_full": {"with": {"tier": "nvme"}}}}},
            ":9: random.kinds.tier_full.with.tier = nvme: allowed: memory",
        ),
    ],
)
def test_an_experiment_that_can_not_strike_its_campaign_is_refused(tmp_path: Path, changes: dict[str, Any], told: str):
    path = written(tmp_path, **changes)
    with pytest.raises(ExperimentError, match=f"^{path}{told}"), located(path):
        fit(read(path), Config.model_validate(STEPS | RAM))
    longer = Config.model_validate(
        {"train": {"steps": 200}, "checkpoint": {"tiers": [{"name": "nvme", "path": "/nvme"}, *RAM["checkpoint"]["tiers"]]}}
    )
    if "tier" not in told or "nvme" in told:
        fit(read(path), longer)


def test_of_a_script_whose_end_only_it_knows_any_step_may_come(tmp_path: Path):
    path = written(tmp_path, faults=[{"fault": "worker_kill", "at": {"step": 10**6}}])
    fit(read(path), Config.model_validate({"entrypoint": "train.py"}))


def test_a_file_that_is_not_there_or_not_yaml_is_told(tmp_path: Path):
    with pytest.raises(ExperimentError, match=r"none\.yaml: there is no such file"):
        read(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(ExperimentError, match=r"bad\.yaml:\d+: not valid YAML"):
        read(tmp_path / "bad.yaml")


MALFORMED = {
    "alias of itself": (b"faults: &a [*a]\n", "stands within what it stands for"),
    "aliases of aliases": (
        b"a0: &a0 [x, x]\n" + b"".join(b"a%d: &a%d [%s]\n" % (n, n, b", ".join([b"*a%d" % (n - 1)] * 9)) for n in range(1, 12)),
        "more than 50,000 values",
    ),
    "3,000 deep": (b"[" * 3000 + b"]" * 3000, "nested more than 32 deep"),
    "key that is no text": (b"name: x\n5: x\n", "5"),
    "list": (b"- x\n", "an experiment is a mapping"),
    "nothing": (b"", "campaign: is missing"),
    "no UTF-8": (b"name: \xff\n", "not UTF-8"),
    "number of 5,000 digits": (b"name: x\nsteady_steps: " + b"9" * 5000, "5,000 characters"),
    "no calendar": (b"name: 2001-99-99\n", "not valid YAML"),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_experiment_is_one_line_for_each_problem(kind: str, tmp_path: Path):
    text, told = MALFORMED[kind]
    path = tmp_path / "bad.yaml"
    path.write_bytes(text)
    with pytest.raises(ExperimentError) as error:
        read(path)
    assert told in str(error.value)
    assert all(line.startswith(f"{path}:") for line in str(error.value).splitlines())


def test_an_experiment_or_a_campaign_that_is_no_file_is_not_waited_for(tmp_path: Path):
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    with pytest.raises(ExperimentError, match=r"pipe\.yaml: is a named pipe"):
        read(pipe)
    for file in ("pipe.yaml", "/dev/zero"):
        with pytest.raises(ExperimentError, match=r"campaign\.file = .*: is a (named pipe|device)"):
            resolve(Campaign(file=Path(file)), tmp_path / "x.yaml", tmp_path / "out", allow=True)
    (tmp_path / "list.yaml").write_text("- x\n")
    with pytest.raises(ExperimentError, match=r"list\.yaml: a config is a mapping"):
        resolve(Campaign(file=Path("list.yaml")), tmp_path / "x.yaml", tmp_path / "out", allow=True)


def test_experiments_that_come_along_are_found_by_their_names_and_others_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    assert find("quick") == SHIPPED / "quick.yaml"
    with pytest.raises(ExperimentError, match=r"quik: there is no such file; experiments that come along: .*quick"):
        find("quik")
    (tmp_path / "quick").mkdir()
    assert find("quick") == SHIPPED / "quick.yaml"
    (tmp_path / "quick").rmdir()
    (tmp_path / "quick").write_text("")
    assert find("quick") == Path("quick")


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.yaml")), ids=lambda path: path.stem)
def test_experiments_that_come_along_can_be_planned_and_their_campaigns_resolved(path: Path, tmp_path: Path):
    experiment = read(path)
    config = resolve(experiment.campaign, path, tmp_path, allow=True)
    fit(experiment, config)
    cluster = config.cluster
    assert isinstance(cluster.procs_per_node, int)
    everything = frozenset(need for name in faults.names() for need in faults.kind(name).needs)
    found = plan(experiment, 0, World(cluster.nodes, cluster.procs_per_node, everything))
    assert found.strikes
    assert not [why for why in found.left_out.values() if "cgroup" not in why]  # which this machine need not have


def test_a_campaign_is_the_file_with_changes_in_a_directory_of_its_own(tmp_path: Path):
    (tmp_path / "base.yaml").write_text("train: {steps: 5, global_batch_size: 4}\nrun_dir: elsewhere\n")
    wanted = Campaign(file=Path("base.yaml"), config={"train": {"steps": 7}})
    config = resolve(wanted, tmp_path / "experiment.yaml", tmp_path / "out", allow=True, changes={"seed": 3})
    assert (config.train.steps, config.train.global_batch_size, config.seed) == (7, 4, 3)
    assert config.run_dir == tmp_path / "out" / "run"
    assert config.chaos.allow
    assert not resolve(wanted, tmp_path / "experiment.yaml", tmp_path / "twin", allow=False).chaos.allow
    with pytest.raises(ExperimentError, match=r"campaign\.file = none\.yaml: .*none\.yaml: there is no such file"):
        resolve(Campaign(file=Path("none.yaml")), tmp_path / "experiment.yaml", tmp_path / "out", allow=True)


TIERS = (
    "    checkpoint:\n      tiers:\n      - name: ram\n        path: /dev/shm\n      - {name: durable, path: /d, keep_last: 0}\n"
)


@pytest.mark.parametrize("file", ["", "  file: base.yaml\n"], ids=["whole", "changes"])
@pytest.mark.parametrize(
    ("config", "line", "told"),
    [
        (TIERS, 7, "checkpoint.tiers.1.keep_last = 0: allowed"),
        (
            TIERS.replace("name: durable", "nme: x").replace("keep_last: 0", "keep_last: 1"),
            7,
            "checkpoint.tiers.1.name: is missing",
        ),
        ("    slurm:\n      extra:\n      - --hold\n      - 5\n", 6, "slurm.extra.1 = 5: allowed: text"),
        ("    train:\n      steps: [1]\n", 4, "train.steps = "),
    ],
)
def test_what_is_wrong_in_a_list_of_a_campaigns_config_is_told_with_its_line(
    tmp_path: Path, config: str, line: int, told: str, file: str
):
    (tmp_path / "base.yaml").write_text("train: {steps: 5}\ncheckpoint: {tiers: [{name: a, path: /a}, {name: b, path: /b}]}\n")
    path = tmp_path / "experiment.yaml"
    path.write_text(f"campaign:\n  config:\n{config}{file}name: x\nfaults: [{{fault: worker_kill}}]\n")
    with pytest.raises(ExperimentError) as error, located(path):
        resolve(read(path).campaign, path, tmp_path / "out", allow=True)
    assert f"{path}:{line}: campaign.config.{told}" in str(error.value)


def test_what_is_wrong_with_a_campaign_is_told_where_it_was_written(tmp_path: Path):
    (tmp_path / "base.yaml").write_text("train:\n  steps: none\n")
    path = tmp_path / "experiment.yaml"
    path.write_text("name: x\nfaults: []\ncampaign:\n  file: base.yaml\n  config:\n    train:\n      stepz: 7\n")
    for wanted, told in (
        (Campaign(config={"train": {"stepz": 7}}), rf"^{path}:7: campaign\.config\.train\.stepz: .*did you mean 'steps'"),
        (Campaign(file=Path("base.yaml")), rf"^{tmp_path / 'base.yaml'}:2: train\.steps = none: allowed"),
    ):
        with pytest.raises(ExperimentError, match=told), located(path):
            resolve(wanted, path, tmp_path / "out", allow=True)


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
