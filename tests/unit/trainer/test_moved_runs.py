"""A run directory that was moved or copied is read with the data and the tokenizer that are in it, whatever is at its old path."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from trainer_ranks import trained, write_config
from typer.testing import CliRunner

from resilient.worker import load_config
from trainer.cli import app
from trainer.export import export_checkpoint
from trainer.main import prepare
from trainer.restore import find

CATS = "the small cat sat on the mat and saw the dog run over the hill\n" * 100
OTHER = "QUARTZ 0123456789 jumps! vexed nymph, fjord; glyphs waltz big\n" * 100
TRAIN = {"steps": 2, "precision": "fp32"}


def prepared(place: Path, text: str, **sections: dict[str, Any]) -> Path:
    """A config of a run in `place`, whose data is there; as a supervisor does, it is written into the run directory."""
    place.mkdir(exist_ok=True)
    (place / "text.txt").write_text(text)
    data = {"path": None, "text": [str(place / "text.txt")], "tokenizer": {"vocab_size": 300}}
    config = write_config(place, place, data=data, train=TRAIN, **sections)
    prepare(load_config(config), lambda *_: None)
    return Path(shutil.copy(config, place / "run"))


def trainer(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def evaluated(path: Path) -> dict[str, Any]:
    found = trainer("evaluate", path, "--json")
    assert found.exit_code == 0, found.output
    (record,) = [json.loads(line) for line in found.stdout.splitlines()]
    return {name: record[name] for name in ("step", "loss", "tokens", "bits_per_byte")}


def tokenizers_of(path: Path, out: Path) -> list[bytes]:
    """What both commands that export write as the tokenizer."""
    assert trainer("export", path, out / "command").exit_code == 0
    export_checkpoint(find(path), out / "exporter")
    return [(out / name / "tokenizer.json").read_bytes() for name in ("command", "exporter")]


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("moved") / "campaign"
    trained(prepared(place, CATS), 1)
    return place


@contextmanager
def moved(place: Path, to: Path) -> Iterator[Path]:
    """The run, moved, while the data of another campaign is at its old path."""
    run = (place / "run").rename(to / "moved")
    prepared(place, OTHER)
    try:
        yield run
    finally:
        shutil.rmtree(place / "run")
        run.rename(place / "run")


def test_a_run_that_was_moved_is_read_with_its_own_data_and_tokenizer(trained_once: Path, tmp_path: Path):
    before = evaluated(trained_once / "run")
    own = (trained_once / "run/data/corpus.tokenizer.json").read_bytes()
    with moved(trained_once, tmp_path) as run:
        assert (trained_once / "run/data/corpus.tokenizer.json").read_bytes() != own
        for path in (run, run / "checkpoints", find(run)):
            assert evaluated(path) == before
            (out := tmp_path / f"out-{path.name}").mkdir()
            assert tokenizers_of(path, out) == [own, own]
        assert trainer("generate", run, "the cat", "--tokens", 2).exit_code == 0


def test_a_run_that_was_moved_without_its_data_is_not_read_with_that_of_another(trained_once: Path, tmp_path: Path):
    run = Path(shutil.copytree(trained_once / "run", tmp_path / "run", ignore=shutil.ignore_patterns("data")))
    for words in (("evaluate", run), ("generate", run, "the cat")):
        refused = trainer(*words)
        assert refused.exit_code != 0 and f"there is no {run}/data/corpus" in refused.stderr
    found = trainer("export", run, tmp_path / "command")
    assert found.exit_code == 0 and "no tokenizer was written" in found.stderr and f"{run}/data/corpus" in found.stderr
    assert "without a tokenizer" in export_checkpoint(find(run), tmp_path / "exporter")
    assert not (tmp_path / "command/tokenizer.json").exists() and not (tmp_path / "exporter/tokenizer.json").exists()


def test_a_run_that_was_moved_has_its_own_data_with_checkpoints_that_lie_elsewhere(tmp_path: Path):
    place = tmp_path / "campaign"
    trained(prepared(place, CATS, checkpoint={"tiers": [{"name": "durable", "path": str(tmp_path / "durable")}]}), 1)
    before = evaluated(place / "run")
    with moved(place, tmp_path) as run:
        assert find(run).parent == tmp_path / "durable" and evaluated(run) == before


def test_a_run_that_branched_off_and_has_no_data_yet_is_read_with_that_of_the_one_that_it_came_from(
    tmp_path: Path, trained_once: Path
):
    branch = tmp_path / "branch"
    shutil.copytree(trained_once / "run/checkpoints", branch / "checkpoints")
    config = yaml.safe_load((trained_once / "run/config.yaml").read_text())
    (branch / "config.yaml").write_text(yaml.safe_dump({**config, "run_dir": str(branch)}))
    assert evaluated(branch) == evaluated(trained_once / "run")
