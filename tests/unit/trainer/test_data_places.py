"""Data whose place is of no use, or is gone: what is a wrong config, and what is not."""

from pathlib import Path

import pytest

from resilient.worker import Config, ConfigError, EnvironmentUnusable
from trainer.main import prepare


def config_of(directory: Path, **data: object) -> Config:
    """A config of a tiny model."""
    model = {"layers": 1, "hidden": 16, "heads": 2, "seq_len": 8}
    return Config.model_validate({"run_dir": directory / "run", "model": model, "data": {"split": [9, 1, 0], **data}})


def of_text(directory: Path) -> Config:
    text = directory / "text.txt"
    text.write_text("the cat and the dog sat on the mat\n" * 200)
    return config_of(directory, text=[text], tokenizer={"vocab_size": 280})


def silent(what: str, done: int, total: int) -> None:
    pass


def test_no_room_for_the_data_is_no_error_of_the_config(tmp_path: Path) -> None:
    config = of_text(tmp_path)
    (tmp_path / "run/data").mkdir(parents=True)
    (tmp_path / "run/data/corpus.bin.tmp").symlink_to("/dev/full")
    with pytest.raises(EnvironmentUnusable, match=r"data\.text: cannot write .*run/data/corpus.*: No space left on device"):
        prepare(config, silent)


def test_a_text_that_is_not_there_is_an_error_of_the_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.text: there is no file .*/none\.txt"):
        prepare(config_of(tmp_path, text=[tmp_path / "none.txt"]), silent)
