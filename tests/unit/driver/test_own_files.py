"""Which paths are of the run's own data, as far as its config tells."""

from pathlib import Path
from typing import Any

import pytest

from resilient.config import Config
from resilient.driver.job import own_files


def told(**given: Any) -> set[str]:
    config = Config.model_validate({"name": "x", "run_dir": "/runs/x", "entrypoint": "trainer.main:train", **given})
    return set(own_files(config)) - {"/runs/x"}


@pytest.mark.parametrize(
    ("given", "paths"),
    [
        ({"data": {"path": "/data/corpus"}}, {"/data/corpus"}),
        ({"data": {"path": [{"path": "/data/a", "weight": 1}, {"path": "/data/b", "weight": 2}]}}, {"/data/a", "/data/b"}),
        ({"data": {"text": ["/texts/a.txt"]}}, {"/texts/a.txt"}),
        ({}, set()),
        ({"entrypoint": "toys:count", "args": {"sets": [{"train": "/data/x"}], "mode": "fast", "root": "/"}}, {"/data/x"}),
        ({"entrypoint": "/src/train.py --data=/data/y --lr 1e-3"}, {"/src/train.py", "/data/y"}),
    ],
)
def test_paths_that_a_config_names_are_the_runs_own(given: dict[str, Any], paths: set[str], tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert told(**given) == paths


def test_a_relative_path_is_told_in_both_forms_and_a_word_is_a_path_where_it_is_there(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").mkdir()
    assert told(entrypoint="toys:count", args={"data": "corpus", "name": "other"}) == {"corpus", str(tmp_path / "corpus")}
