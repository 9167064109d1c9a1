"""What `resilient run` makes of its words."""

from pathlib import Path
from typing import Any

import pytest

from resilient.config import ConfigError, load
from resilient.run_words import NO_CONFIG, understand

NOTHING: dict[str, Any] = {"procs": None, "nodes": None, "run_dir": None}


def test_a_config_is_taken_with_its_settings():
    told = understand(["run.yaml", "train.steps=5"], **NOTHING)
    assert (told.config, told.settings) == (Path("run.yaml"), ("train.steps=5",))


def test_what_follows_a_script_is_its_own():
    words = ["train.global_batch_size=8", "train.py", "--lr", "3e-4", "steps=7", "a b"]
    told = understand(words, **{**NOTHING, "procs": 3, "nodes": 2, "run_dir": Path("some where")})
    config = load(told.config, told.settings)
    assert told.config == NO_CONFIG
    assert (config.entrypoint, config.name) == ("train.py --lr 3e-4 steps=7 'a b'", "train")
    assert (config.cluster.procs_per_node, config.cluster.nodes, config.run_dir) == (3, 2, Path("some where").absolute())
    assert config.train.global_batch_size == 8
    assert config.is_script and config.target_step is None


def test_a_script_has_a_target_only_where_somebody_has_said_so():
    assert load(NO_CONFIG, ["entrypoint=train.py", "train.steps=300"]).target_step == 300
    assert load(NO_CONFIG, []).target_step == 300


def test_a_module_is_run_as_python_does_it():
    told = understand(["-m", "some.package.train", "-m", "x"], **NOTHING)
    config = load(told.config, told.settings)
    assert (config.entrypoint, config.name) == ("-m some.package.train -m x", "train")


@pytest.mark.parametrize("words", [[], ["-m"], ["train.steps=5"], ["--prcos", "4", "train.py"]])
def test_what_cannot_be_run_is_said(words: list[str]):
    with pytest.raises(ConfigError, match=r"a script \(train.py\)|options come before"):
        understand(words, **NOTHING)


def test_what_is_accepted_may_stand_before_a_config_or_behind_it_and_never_behind_a_script():
    told = understand(["run.yaml", "--accept", "seed", "train.steps=5", "--accept=model.norm"], **NOTHING, accept=["data.text"])
    assert (told.settings, told.accept) == (("train.steps=5",), ("data.text", "seed", "model.norm"))
    told = understand(["train.py", "--accept", "seed"], **NOTHING, accept=["entrypoint"])
    assert told.accept == ("entrypoint",) and load(told.config, told.settings).entrypoint == "train.py --accept seed"
    with pytest.raises(ConfigError, match="names a key"):
        understand(["run.yaml", "--accept"], **NOTHING)
