"""Configs that are right: defaults, overrides, variables, and what they come to on a machine."""

import os
import pwd
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from resilient.config import Config, ConfigError, attribute, dump, layout, load
from resilient.config.errors import Problem
from resilient.config.fields import Section
from resilient.config.reference import markdown

ROOT = Path(__file__).parents[3]


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


def test_an_empty_config_is_good(tmp_path: Path):
    config = load(write(tmp_path, ""))
    assert config.train.steps == 300
    assert config.run_dir == Path.cwd() / "runs/run"
    assert config.checkpoint.tiers[0].path == config.run_dir / "checkpoints"


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_is_good(path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("SCRATCH", "PROJECT", "USER"):  # where sites say what is where
        monkeypatch.setenv(name, f"/{name.lower()}")
    load(path)


def test_an_override_wins_over_the_file(tmp_path: Path):
    path = write(tmp_path, "train: {steps: 5}\noptimizer: {warmup_samples: 0}\n")
    assert load(path, ["train.steps=7"]).train.steps == 7
    assert load(path, ["optimizer.lr=2e-3"]).optimizer.lr == 2e-3
    assert load(path, ["logging.tensorboard=false"]).logging.tensorboard is False


def test_an_override_reaches_into_a_list(tmp_path: Path):
    path = write(tmp_path, "checkpoint: {tiers: [{name: a, path: /a}]}\n")
    assert load(path, ["checkpoint.tiers.0.keep_last=9"]).checkpoint.tiers[0].keep_last == 9


def test_numbers_that_yaml_reads_as_text_are_numbers(tmp_path: Path):
    assert load(write(tmp_path, "optimizer: {lr: 1e-3, min_lr: 1e-5}\n")).optimizer.lr == 0.001


@pytest.mark.parametrize(
    ("text", "override", "says"),
    [
        ('train: {steps: "200"}', "train.steps='200'", "train.steps = '200': allowed: a whole number, at least 1 and at most "),
        ("seed: 1e3", "seed=1e3", "seed = '1e3': allowed: a whole number, at least 0 and below "),
        ('cluster: {nodes: "2"}', "cluster.nodes='2'", "cluster.nodes = '2': allowed: a whole number, at least 1 or auto; this is"),
        (
            'logging: {tensorboard: "true"}',
            "logging.tensorboard='true'",
            "tensorboard = 'true': allowed: true or false; this is",
        ),
    ],
)
def test_text_that_looks_like_a_number_or_a_boolean_is_told_from_one(tmp_path: Path, text: str, override: str, says: str):
    for written, overrides in ((text, []), ("", [override])):
        with pytest.raises(ConfigError, match=re.escape(says)) as raised:
            load(write(tmp_path, written), overrides)
        assert "; this is text: write " in str(raised.value) and len(raised.value.problems) == 1


def _words(section: type[BaseModel], key: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Each key of a section and below it, with each of the words that are allowed there."""
    for name, field in section.model_fields.items():
        options = [field.annotation, *typing.get_args(field.annotation)]
        for option in options:
            if typing.get_origin(option) is typing.Literal:
                yield from ((".".join((*key, name)), word) for word in typing.get_args(option) if isinstance(word, str))
            elif isinstance(option, type) and issubclass(option, BaseModel):
                yield from _words(option, (*key, name))


def test_a_word_that_yaml_reads_as_a_boolean_needs_no_quotes(tmp_path: Path):
    found = [(key, word) for key, word in _words(Config) if isinstance(yaml.safe_load(word), bool)]
    assert found == [("cluster.tls", "off"), ("resilience.straggler", "off")]
    for key, word in found:
        section, name = key.split(".")
        loaded = load(write(tmp_path, f"{section}:\n  {name}: {word}\n"))
        assert getattr(getattr(loaded, section), name) == word
        assert getattr(getattr(load(write(tmp_path, ""), [f"{key}={word}"]), section), name) == word
    with pytest.raises(ConfigError, match=r"cluster\.tls = true: allowed: off, psk"):
        load(write(tmp_path, "cluster: {tls: on}\n"))


def test_variables_in_paths_are_replaced(tmp_path: Path):
    path = write(tmp_path, "name: n\nrun_dir: $SCRATCH/${name}\ncheckpoint: {tiers: [{name: a, path: '${run_dir}/c/${USER}'}]}\n")
    config = load(path, environ={"SCRATCH": "/scratch", "USER": "me"})
    assert config.run_dir == Path("/scratch/n")
    assert config.checkpoint.tiers[0].path == Path("/scratch/n/c/me")


def test_the_user_is_known_where_the_environment_does_not_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As in a container, which has no USER, and maybe no name for the number that it is run under."""
    for name in ("USER", "LOGNAME", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    path = write(tmp_path, "run_dir: /scratch/${USER}/run\n")
    assert load(path, environ={}).run_dir == Path(f"/scratch/{pwd.getpwuid(os.getuid()).pw_name}/run")
    monkeypatch.setattr(os, "getuid", lambda: 987_654_321)
    assert load(path, environ={}).run_dir == Path("/scratch/987654321/run")


def test_a_path_alone_turns_the_text_off(tmp_path: Path):
    config = load(write(tmp_path, "data: {path: /a/b}\n"))
    assert (config.data.text, config.data.path) == (None, Path("/a/b"))


def test_anchors_and_merges_work(tmp_path: Path):
    path = write(tmp_path, "args:\n  base: &base {a: 1, b: 2}\n  more: {<<: *base, b: 3}\n")
    assert load(path).args["more"] == {"a": 1, "b": 3}


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("args: {a: &x {lr: 1}, b: *x}\n", "args.b.lr"),
        ("args: {a: &x {opt: {lr: 1}}, b: {<<: *x}}\n", "args.b.opt.lr"),
        ("args: {a: &x [1], b: *x}\n", "args.b.0"),
    ],
)
def test_an_override_leaves_what_is_written_by_the_same_anchor_as_it_is(tmp_path: Path, text: str, key: str):
    path = write(tmp_path, text)
    before, found = load(path).args, load(path, [f"{key}=2"]).args
    assert found["a"] == before["a"] and found["b"] != before["b"]


@pytest.mark.parametrize("text", ["#5", "Issue #5", " # a", "5 # five", "a # b # c", "# Title\ntext", "#!/bin/sh\n[1]"])
def test_a_word_of_the_command_line_has_no_comments(tmp_path: Path, text: str):
    assert load(write(tmp_path, ""), [f"args.x={text}"]).args == {"x": text}


@pytest.mark.parametrize(("text", "value"), [("'a #b'", "a #b"), ("[1, 2] # both", [1, 2]), ("a#b", "a#b"), ("", None)])
def test_what_is_no_plain_text_is_read_as_yaml(tmp_path: Path, text: str, value: object):
    assert load(write(tmp_path, ""), [f"args.x={text}"]).args == {"x": value}


def test_variables_are_as_they_are_written(tmp_path: Path):
    text = (
        "args: {e: &e {A: 3.10, B: 0x10, F: 2.0}}\n"
        "slurm: {environment: {<<: *e, C: 1_000, D: 1.50, E: x, F: y, G: &n 8.0}}\ntrain: {steps: 5}\n"
    )
    found = load(write(tmp_path, text), ["slurm.environment.D=12.10", "slurm.environment.H=1.0"])
    assert found.slurm.environment == {
        "A": "3.10", "B": "0x10", "F": "y", "C": "1_000", "D": "12.10", "E": "x", "G": "8.0", "H": "1.0",
    }  # fmt: skip
    assert found.args == {"e": {"A": 3.1, "B": 16, "F": 2.0}}
    assert load(write(tmp_path, dump(found))).slurm.environment == found.slurm.environment
    for override in ("slurm.environment={A: 3.10}", "slurm={environment: {A: 3.10}}"):
        assert load(write(tmp_path, text), [override]).slurm.environment == {"A": "3.10"}


def test_a_config_is_kept_as_utf8_whatever_the_locale_is(tmp_path: Path):
    program = (
        "from pathlib import Path; from resilient.config import load, write; "
        "write(load(Path('c.yaml')), Path('kept.yaml')); assert load(Path('kept.yaml')) == load(Path('c.yaml'))"
    )
    (tmp_path / "c.yaml").write_text("slurm: {account: größe}\n", encoding="utf-8")
    environ = {**os.environ, "LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environ, check=True)
    assert load(tmp_path / "kept.yaml").slurm.account == "größe"


def test_what_is_dumped_loads_to_the_same(tmp_path: Path):
    path = write(tmp_path, "name: n\nrun_dir: $HERE/r\ndata: {path: [{path: a}, {path: b, weight: 2}]}\nargs: {x: [1, {y: z}]}\n")
    config = load(path, environ={"HERE": str(tmp_path)})
    again = tmp_path / "again.yaml"
    again.write_text(dump(config))
    assert load(again, environ={}) == config


@settings(max_examples=30, deadline=None)
@given(
    steps=st.integers(50, 10**6),
    lr=st.floats(1e-6, 1.0),
    micro=st.integers(1, 8),
    dp=st.integers(1, 4),
    accumulation=st.integers(1, 4),
    name=st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,20}\Z"),
)
def test_any_good_config_survives_a_round_trip(tmp_path_factory, steps, lr, micro, dp, accumulation, name):
    directory = tmp_path_factory.mktemp("round")
    batch = micro * dp * accumulation
    overrides = [f"train.steps={steps}", f"optimizer.lr={lr!r}", "optimizer.min_lr=0", "optimizer.warmup_samples=0"]
    overrides += [f"train.micro_batch_size={micro}", f"train.global_batch_size={batch}", f"cluster.procs_per_node={dp}"]
    path = write(directory, f"name: '{name}'\nrun_dir: {directory}\n")
    config = load(path, overrides)
    again = directory / "again.yaml"
    again.write_text(dump(config))
    assert load(again) == config
    assert layout(config, cpu_count=8, gpu_count=0).accumulation == accumulation


def test_the_layout_settles_every_auto():
    found = layout(Config.model_validate({"cluster": {"procs_per_node": 2}}), cpu_count=8, gpu_count=0)
    assert (found.world_size, found.dp, found.accumulation, found.threads_per_proc) == (2, 2, 2, 4)


def test_on_a_machine_with_gpus_there_is_one_rank_per_gpu():
    assert layout(Config(), cpu_count=8, gpu_count=4).procs_per_node == 4
    assert layout(Config(), cpu_count=8, gpu_count=0).procs_per_node == 1
    cpu = Config.model_validate({"cluster": {"device": "cpu"}})
    assert layout(cpu, cpu_count=8, gpu_count=4).procs_per_node == 1


def test_a_layout_that_does_not_come_out_here_is_refused():
    with pytest.raises(ConfigError, match=r"train.global_batch_size = 16: has no sample for each of dp = 17 replicas"):
        layout(Config(), cpu_count=8, gpu_count=17)
    with pytest.raises(ConfigError, match="there is no GPU here"):
        layout(Config.model_validate({"cluster": {"device": "cuda"}}), cpu_count=8, gpu_count=0)


def test_an_error_that_is_found_later_gets_its_file_and_line(tmp_path: Path):
    path = write(tmp_path, "name: x\nparallel:\n  tp: 2\n")
    later = ConfigError([Problem("parallel.tp", 2, "not in this version")])
    assert str(attribute(later, path)) == f"{path}:3: parallel.tp = 2: not in this version"
    assert str(attribute(later, path, ["parallel.tp=4"])).startswith("command line: parallel.tp")


def test_a_config_cannot_change_under_the_campaigns_feet():
    with pytest.raises(ValueError, match="frozen"):
        Config().train.steps = 5  # type: ignore[misc]


def test_the_reference_of_all_keys_is_up_to_date():
    assert (ROOT / "docs/config.md").read_text() == markdown()


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _sections(annotation: Any, title: str) -> Iterator[tuple[str, type[Section]]]:
    """The sections that a key may hold, whatever wraps them, and those inside of them: each with the title of its table."""
    if _is_section(annotation):
        yield title, annotation
        for name, field in annotation.model_fields.items():
            yield from _sections(field.annotation, name if annotation is Config else f"{title}.{name}")
    elif typing.get_origin(annotation) is list:
        yield from _sections(typing.get_args(annotation)[0], f"entries of {title}")
    else:
        for part in typing.get_args(annotation):
            yield from _sections(part, title)


def test_the_page_has_a_table_for_every_section_with_all_of_its_keys():
    tables: dict[str, set[str]] = {}
    for part in (ROOT / "docs/config.md").read_text().split("\n## ")[1:]:
        title, _, rest = part.partition("\n")
        tables[title] = set(re.findall(r"^\| `(\w+)` \|", rest, re.MULTILINE))
    found = dict(_sections(Config, "top level"))
    assert {"train.guard", "train.batch_rampup", "data.tokenizer", "entries of checkpoint.tiers"} <= found.keys()
    missing = []
    for title, section in found.items():
        told = tables.get(title, set())  # a key that is a section has a table in place of a row
        keys = [name for name, field in section.model_fields.items() if not _is_section(field.annotation)]
        missing += [f"{title}: {name}" for name in keys if name not in told]
    assert not missing


def test_a_script_without_a_target_has_none_after_its_config_was_kept(tmp_path: Path):
    config = load(write(tmp_path, "entrypoint: train.py\n"))
    assert config.target_step is None
    kept = write(tmp_path, dump(config))
    assert load(kept) == config and load(kept).target_step is None
    assert load(write(tmp_path, dump(load(kept, ["train.steps=300"])))).target_step == 300


@pytest.mark.parametrize(
    "train",
    [
        "{samples: 1000, global_batch_size: 0}",
        "{samples: .inf}",
        "{samples: 1000, batch_rampup: {start: 0, increment: 1, samples: 100}}",
        "{samples: 1000, batch_rampup: {start: 2, increment: 0, samples: 100}}",
    ],
)
def test_numbers_of_samples_that_are_wrong_are_told_and_not_computed_with(tmp_path: Path, train: str):
    with pytest.raises(ConfigError):
        load(write(tmp_path, f"train: {train}\n"))


@pytest.mark.parametrize("text", ["run_dir: ~nosuch/x", "data: {text: ['~draft.txt']}", "slurm: {profile: ~nosuch/site.yaml}"])
def test_a_home_that_there_is_not_is_told(tmp_path: Path, text: str):
    with pytest.raises(ConfigError, match="no such"):
        load(write(tmp_path, f"{text}\n"))
