"""What `resilient run` makes of its words."""

import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from resilient.cli import app
from resilient.config import ConfigError, load
from resilient.entry import find, parse
from resilient.run_words import NO_CONFIG, OPTIONS, asks_for_help, understand

NOTHING: dict[str, Any] = {"procs": None, "nodes": None, "run_dir": None}


def test_a_config_is_taken_with_its_settings():
    told = understand(["run.yaml", "train.steps=5"], **NOTHING)
    assert (told.config, told.settings) == (Path("run.yaml"), ("train.steps=5",))


def test_words_may_have_any_characters(tmp_path: Path):
    told = understand(["train.py", "--prompt", "hi \U0001f642"], **{**NOTHING, "run_dir": tmp_path / "\U0001f680"})
    config = load(told.config, told.settings)
    assert (config.entrypoint, config.run_dir) == ("train.py --prompt 'hi \U0001f642'", tmp_path / "\U0001f680")


@pytest.mark.parametrize("character", ["\n", "\t", "\x7f", "\x9f", "\u2028", "\ufeff", '"', "'", "\\", "#", ": "])
def test_a_script_gets_its_words_as_they_are(character: str):
    word = f"a{character}b"
    told = understand(["train.py", word], **{**NOTHING, "run_dir": Path("/x") / word})
    config = load(told.config, told.settings)
    assert (parse(config.entrypoint).args, config.run_dir) == ((word,), Path("/x") / word)


def test_words_that_are_no_text_are_refused_with_what_they_are():
    told = understand(["train.py", "a\udce9b"], **NOTHING)
    with pytest.raises(ConfigError, match=r"entrypoint: train.py 'a\\xe9b' has bytes that are not UTF-8"):
        load(told.config, told.settings)


@pytest.mark.parametrize("text", ["def f(:", "return 1", "def f():\n    x = 1\n    global x", "\0"])
def test_a_script_that_python_does_not_compile_is_refused_before_it_is_run(tmp_path: Path, text: str):
    (tmp_path / "broken.py").write_text(text)
    said = find(parse(f"{tmp_path}/broken.py 1"))[1]
    assert said is not None and "broken.py is not Python" in said


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


@pytest.mark.parametrize(
    ("line", "entrypoint"),
    [
        ("-m package.train", "-m package.train"),
        ("--module package.train", "-m package.train"),
        ("--procs 2 -m package.train --lr 3 -m x", "-m package.train --lr 3 -m x"),
        ("-m seed=7 package.train seed=8", "-m package.train seed=8"),
        ("seed=7 -m package.train", "-m package.train"),
        ("train.py -m package.train", "train.py -m package.train"),
    ],
)
def test_the_command_takes_a_module_where_torchrun_does(line: str, entrypoint: str):
    given = typer.main.get_group(app).commands["run"].make_context("run", shlex.split(line)).params
    assert set(given) == set(inspect.signature(understand).parameters), "no option is left out"
    told = understand(**{**given, "accept": given["accept"] or ()})
    assert load(told.config, told.settings).entrypoint == entrypoint


@pytest.mark.parametrize("python", ["python", "python3", "/opt/env/bin/python3.12"])
def test_an_interpreter_is_not_taken_for_a_config(python: str):
    with pytest.raises(ConfigError, match=f"leave {re.escape(python)} out") as refused:
        understand([python, "train.py"], **NOTHING)
    assert sys.executable in str(refused.value)


@pytest.mark.parametrize("words", [[], ["-m"], ["train.steps=5"], ["--prcos", "4", "train.py"]])
def test_what_cannot_be_run_is_said(words: list[str]):
    with pytest.raises(ConfigError, match=r"a script \(train.py\)|options come before"):
        understand(words, **NOTHING)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nproc_per_node=4", "train.py"], "--nproc_per_node is torchrun's: here it is --procs N"),
        (["--nproc-per-node", "4", "train.py"], "--nproc-per-node is torchrun's: here it is --procs N"),
        (["--nnodes=1:2", "train.py"], "here it is --nodes N"),
        (["--standalone", "train.py"], "leave it out"),
        (["--rdzv-endpoint=node0:29400", "train.py"], "leave it out"),
        (["--prcos", "4", "train.py"], "did you mean --procs?"),
        (["run_dir=runs/a", "--procs=2", "train.py"], "write --procs right behind `resilient run`"),
        (["--learning-rate", "4", "train.py"], "is none of `resilient run`: --procs, --nodes, "),
        (["run.yaml", "--procs", "4"], "write --procs right behind `resilient run`"),
        (["run.yaml", "seed=3", "-m", "x"], "write -m right behind `resilient run`"),
        (["run.yaml", "--nproc-per-node=4"], "here it is --procs N"),
        (["run.yaml", "--dry-run"], "`resilient plan` checks a config"),
        (["--dry-run", "run.yaml"], "`resilient plan` checks a config"),
        (["run.yaml", "-x"], "-x is none of `resilient run`: --procs, --nodes, "),
    ],
)
def test_an_option_that_there_is_not_is_answered_with_the_one_that_is_meant(words: list[str], said: str):
    with pytest.raises(ConfigError, match=re.escape(said)):
        understand(words, **NOTHING)


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (["run.yaml", "--help"], True),
        (["seed=3", "run.yaml", "train.steps=5", "-h"], True),
        (["seed=3", "--help"], True),
        (["run.yaml", "args.flag=-h"], False),
        (["train.py", "--help"], False),
        (["seed=3", "train.py", "-h"], False),
        (["-m", "package.train", "--help"], False),
        (["seed=3"], False),
    ],
)
def test_help_is_that_of_the_command_behind_a_config_and_that_of_the_script_behind_a_script(words: list[str], asked: bool):
    assert asks_for_help(words) is asked


def test_the_command_shows_its_help_behind_a_config(tmp_path: Path):
    config = tmp_path / "run.yaml"
    config.write_text("")
    words = [sys.executable, "-m", "resilient", "run", config, "-h"]
    shown = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "Usage: " in shown.stdout and "CONFIG [KEY=VALUE]... |" in " ".join(shown.stdout.split())
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"], "nothing was started"


def test_the_options_that_are_named_are_those_of_the_command():
    command = typer.main.get_group(app).commands["run"]
    assert {max(each.opts, key=len) for each in command.params if each.opts[0].startswith("-")} | {"--help"} == set(OPTIONS)


def test_what_is_accepted_may_stand_before_a_config_or_behind_it_and_never_behind_a_script():
    told = understand(["run.yaml", "--accept", "seed", "train.steps=5", "--accept=model.norm"], **NOTHING, accept=["data.text"])
    assert (told.settings, told.accept) == (("train.steps=5",), ("data.text", "seed", "model.norm"))
    told = understand(["train.py", "--accept", "seed"], **NOTHING, accept=["entrypoint"])
    assert told.accept == ("entrypoint",) and load(told.config, told.settings).entrypoint == "train.py --accept seed"
    with pytest.raises(ConfigError, match="names a key"):
        understand(["run.yaml", "--accept"], **NOTHING)
