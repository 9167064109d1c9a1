"""What a config's text is prepared to, once something was trained on it."""

import json
import os
from pathlib import Path

import pytest

from trainer.data import prepare
from trainer.data.errors import DataError
from trainer.data.place import prepared_prefix

SIZE = 300


@pytest.fixture
def words(tmp_path: Path) -> Path:
    path = tmp_path / "a.txt"
    path.write_text("the cat sat on the mat, and the dog ran far away\n" * 50)
    return path


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if not path.name.startswith(".")}


def test_what_was_trained_on_is_not_replaced(tmp_path: Path, words: Path):
    data = tmp_path / "data"
    prepare([words], data, vocab_size=SIZE)
    before = contents(data)
    assert prepare([words], data, vocab_size=SIZE, trained_on=True).reused
    text = words.read_text()
    words.write_text(text + "more\n")
    with pytest.raises(DataError, match="checkpoints that were trained on it"):
        prepare([words], data, vocab_size=SIZE, trained_on=True)
    words.write_text(text)
    with pytest.raises(DataError, match="another tokenizer"):
        prepare([words], data, vocab_size=SIZE + 1, trained_on=True)
    assert contents(data) == before


def test_before_anything_was_trained_it_is_built_in_its_place(tmp_path: Path, words: Path):
    data = tmp_path / "data"
    first = prepare([words], data, vocab_size=SIZE)
    words.write_text(words.read_text() * 2)
    second = prepare([words], data, vocab_size=SIZE)
    assert second.prefix == first.prefix == prepared_prefix(data) and not second.reused and second.tokens > first.tokens


def test_other_text_that_is_accepted_lies_beside_and_the_way_back_is_open(tmp_path: Path, words: Path):
    data = tmp_path / "data"
    first = prepare([words], data, vocab_size=SIZE)
    before, text = contents(data), words.read_text()
    words.write_text(text + "more\n")
    second = prepare([words], data, vocab_size=SIZE, trained_on=True, accepted=True)
    assert second.prefix != first.prefix and prepared_prefix(data) == second.prefix
    assert before.items() <= contents(data).items()
    assert prepare([words], data, vocab_size=SIZE, trained_on=True).reused  # asked for no more
    words.write_text(text)
    third = prepare([words], data, vocab_size=SIZE, trained_on=True, accepted=True)
    assert third.reused and prepared_prefix(data) == third.prefix == first.prefix


def test_a_file_that_was_touched_or_moved_is_the_same_text(tmp_path: Path, words: Path):
    prepare([words], tmp_path / "data", vocab_size=SIZE)
    os.utime(words, (1, 1))
    assert prepare([words], tmp_path / "data", vocab_size=SIZE).reused
    assert prepare([words.rename(tmp_path / "b.txt")], tmp_path / "data", vocab_size=SIZE).reused


def test_what_an_earlier_version_prepared_is_known_by_sizes_and_times(tmp_path: Path, words: Path):
    data = tmp_path / "data"
    prepare([words], data, vocab_size=SIZE)
    described = json.loads((data / "corpus.json").read_text())
    stat = words.stat()
    described["made_of"]["source"]["files"] = [[str(words.resolve()), stat.st_size, stat.st_mtime_ns]]
    (data / "corpus.json").write_text(json.dumps(described))
    assert prepare([words], data, vocab_size=SIZE, trained_on=True).reused
    words.write_text(words.read_text() + "more\n")
    with pytest.raises(DataError, match="resilient fork"):
        prepare([words], data, vocab_size=SIZE, trained_on=True)


def test_a_damaged_dataset_that_was_trained_on_is_made_again(tmp_path: Path, words: Path):
    data = tmp_path / "data"
    prepare([words], data, vocab_size=SIZE)
    before = contents(data)
    (data / "corpus.bin").write_bytes(before["corpus.bin"][:-2])
    assert not prepare([words], data, vocab_size=SIZE, trained_on=True).reused
    assert contents(data) == before


@pytest.mark.parametrize("name", ["../../etc/passwd", "corpus-xyz", "", "corpus-" + "0" * 9, "\udcff"])
def test_a_place_that_is_none_is_not_followed(tmp_path: Path, name: str):
    (tmp_path / "current").write_bytes(os.fsencode(name))
    assert prepared_prefix(tmp_path) == tmp_path / "corpus"
