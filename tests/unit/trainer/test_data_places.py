"""Data whose place is of no use, or is gone: what is a wrong config, and what is not."""

import shutil
from pathlib import Path

import pytest
from trainer_ranks import run_ranks, train, write_config, write_dataset

from resilient import worker
from resilient.worker import Config, ConfigError, EnvironmentUnusable
from trainer.data.errors import MissingError, StorageError
from trainer.main import prepare


def config_of(directory: Path, **data: object) -> Config:
    """A config of a tiny model."""
    model = {"layers": 1, "hidden": 16, "heads": 2, "seq_len": 8}
    return Config.model_validate({"run_dir": directory / "run", "model": model, "data": {"split": [9, 1, 0], **data}})


def of_text(directory: Path) -> Config:
    text = directory / "text.txt"
    text.write_text("the cat and the dog sat on the mat\n" * 200)
    return config_of(directory, text=[text], tokenizer={"vocab_size": 280})


EVALUATED = {"steps": 4, "eval_interval": 2, "eval_iters": 1, "global_batch_size": 4, "precision": "fp32"}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A campaign's config, and its dataset in `data/`, a directory of its own."""
    (tmp_path / "data").mkdir()
    return write_config(tmp_path, write_dataset(tmp_path / "data/walks"), train=EVALUATED)


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


def train_without(config: Path, directory: Path) -> list[tuple[str, int]]:
    """Train as this rank; the dataset goes as soon as the first step was computed."""
    beat = worker.beat

    def beat_and_delete(step: int) -> None:
        beat(step)
        shutil.rmtree(directory, ignore_errors=True)

    worker.beat = beat_and_delete
    return [(line["event"], line["step"]) for line in train(config)]


def test_training_and_validation_go_on_when_the_files_of_the_data_are_deleted(config: Path, tmp_path: Path) -> None:
    (told,) = run_ranks(1, train_without, config, tmp_path / "data")
    assert [step for event, step in told if event == "validation"] == [0, 2, 4]


def test_data_that_is_gone_when_ranks_start_is_a_fault_and_no_error_of_the_config(config: Path, tmp_path: Path) -> None:
    for name in ("walks.bin", "walks.idx", "walks.tokenizer.json"):
        (tmp_path / "data" / name).unlink()
        (ended,) = run_ranks(1, train, config)
        assert isinstance(ended, MissingError) and name in str(ended)


def test_data_that_cannot_be_read_when_ranks_start_is_a_fault_and_no_error_of_the_config(config: Path, tmp_path: Path) -> None:
    for name in ("walks.idx", "walks.tokenizer.json"):
        (tmp_path / "data" / name).unlink()
        (tmp_path / "data" / name).mkdir()
        (ended,) = run_ranks(1, train, config)
        assert isinstance(ended, StorageError) and f"{name} cannot be read" in str(ended)


def test_data_that_is_damaged_when_ranks_start_is_an_error_of_the_config(config: Path, tmp_path: Path) -> None:
    (tmp_path / "data/walks.bin").write_bytes(b"no")
    (ended,) = run_ranks(1, train, config)
    assert isinstance(ended, ConfigError) and "walks.bin is truncated" in str(ended)


def test_data_that_is_not_there_before_the_ranks_is_an_error_of_the_config(config: Path, tmp_path: Path) -> None:
    (tmp_path / "data/walks.idx").unlink()
    with pytest.raises(ConfigError, match=r"data\.path: there is no .*walks\.idx"):
        prepare(worker.load_config(config, []), silent)
