"""Byte-level BPE: training, GPT-2's files, saving, and files that are no tokenizer."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from trainer.data import tokenizer
from trainer.data.errors import DataError
from trainer.data.tokenizer import END_OF_TEXT
from trainer.sources import tokens_of

TEXTS = ["the lower the newer, the wider the lowest", "newer and newer, lower and lower", "ünïcode is text as well"] * 5
SMALL = tokenizer.train(TEXTS, 300)

GPT2_VOCAB = {symbol: number for number, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
GPT2_VOCAB |= {"th": 256, "the": 257, "Ġthe": 258, END_OF_TEXT: 259}
GPT2_MERGES = "#version: 0.2\nt h\nth e\nĠ the\n"


def gpt2(directory: Path, vocab: Any = GPT2_VOCAB, merges: str = GPT2_MERGES) -> tuple[Path, Path]:
    (directory / "vocab.json").write_text(vocab if isinstance(vocab, str) else json.dumps(vocab))
    (directory / "merges.txt").write_text(merges)
    return directory / "vocab.json", directory / "merges.txt"


@settings(max_examples=100, deadline=None)
@given(st.text())
def test_every_text_comes_back_whole(text: str) -> None:
    ids = SMALL.encode(text, add_special_tokens=False).ids
    assert SMALL.decode(ids, skip_special_tokens=False) == text


def test_training_gives_the_same_tokenizer_however_many_threads_there_are() -> None:
    words = "import sys, inspect, pydoc, argparse; from trainer.data import tokenizer;"
    code = words + "sys.stdout.write(tokenizer.train(map(inspect.getsource, (inspect, pydoc, argparse)), 700).to_str())"
    made = {
        subprocess.run([sys.executable, "-c", code], env={"RAYON_NUM_THREADS": threads}, capture_output=True, check=True).stdout
        for threads in ("1", "2", "5", "2")
    }
    assert len(made) == 1
    assert len(made.pop()) > 1000


def test_the_vocabulary_is_as_large_as_asked_when_the_text_allows() -> None:
    assert tokenizer.vocabulary_size(tokenizer.train(TEXTS, 280)) == 280
    assert tokenizer.vocabulary_size(tokenizer.train(["a"], 300)) == 257


def test_text_that_spells_the_end_of_text_is_text() -> None:
    end = SMALL.token_to_id(END_OF_TEXT)
    assert end is not None
    assert end not in SMALL.encode(f"a{END_OF_TEXT}b", add_special_tokens=False).ids


def test_a_saved_tokenizer_is_the_same_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(SMALL.to_str())
    for again in (tokenizer.load(tmp_path / "t.json"), tokenizer.from_json(SMALL.to_str())):
        for text in (*TEXTS, f"x {END_OF_TEXT} y"):
            assert again.encode(text).ids == SMALL.encode(text).ids
        assert again.token_to_id(END_OF_TEXT) == SMALL.token_to_id(END_OF_TEXT)


def test_gpt2_files_give_the_tokens_that_they_name(tmp_path: Path) -> None:
    made = tokenizer.from_gpt2(*gpt2(tmp_path))
    symbol = {letter: GPT2_VOCAB[letter] for letter in "at"}
    assert made.encode("the the at").ids == [257, 258, GPT2_VOCAB["Ġ"], symbol["a"], symbol["t"]]
    assert made.token_to_id(END_OF_TEXT) == 259
    assert tokenizer.vocabulary_size(made) == 260


def test_gpt2_files_of_a_trained_tokenizer_give_that_tokenizer(tmp_path: Path) -> None:
    model = json.loads(SMALL.to_str())["model"]
    merges = "".join(f"{left} {right}\n" for left, right in model["merges"])
    made = tokenizer.from_gpt2(*gpt2(tmp_path, model["vocab"], merges))
    for text in TEXTS:
        assert made.encode(text).ids == SMALL.encode(text).ids


def _without(name: str) -> dict[str, int]:
    return {token: number for token, number in GPT2_VOCAB.items() if token != name}


BAD_GPT2: dict[str, tuple[Any, str, str]] = {
    "no JSON": ("{", GPT2_MERGES, r"vocab\.json is not JSON, as GPT-2's vocab.json is"),
    "no mapping": (["a"], GPT2_MERGES, r"vocab\.json does not map tokens to whole numbers"),
    "empty": ({}, GPT2_MERGES, r"vocab\.json does not map tokens"),
    "numbers that are none": (GPT2_VOCAB | {"x": "1"}, GPT2_MERGES, r"vocab\.json does not map tokens"),
    "negative numbers": (GPT2_VOCAB | {"x": -1}, GPT2_MERGES, r"vocab\.json does not map tokens"),
    "a number twice": (GPT2_VOCAB | {"xyz": 5}, GPT2_MERGES, r"vocab\.json gives one number to several tokens"),
    "a byte missing": (_without("a"), GPT2_MERGES, r"vocab\.json lacks 1 of the 256 byte symbols, 'a' for one"),
    "no end of text": (_without(END_OF_TEXT), GPT2_MERGES, r"vocab\.json has no <\|endoftext\|> token"),
    "merges of another one": (GPT2_VOCAB, GPT2_MERGES + "q u\n", r"merges\.txt merges 'q' and 'u', and .* has no 'qu'"),
    "merges that are none": (GPT2_VOCAB, "t h\nsome other text\n", r"merges\.txt:2 is 'some other text'"),
}


@pytest.mark.parametrize("damage", BAD_GPT2)
def test_bad_gpt2_files_are_refused_with_file_and_reason(tmp_path: Path, damage: str) -> None:
    vocab, merges, said = BAD_GPT2[damage]
    with pytest.raises(DataError, match=said):
        tokenizer.from_gpt2(*gpt2(tmp_path, vocab, merges))


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt"])
def test_a_missing_or_binary_gpt2_file_is_named(tmp_path: Path, name: str) -> None:
    files = gpt2(tmp_path)
    (tmp_path / name).write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=rf"{name} is not UTF-8 text \(invalid start byte at byte 0\)"):
        tokenizer.from_gpt2(*files)
    (tmp_path / name).unlink()
    with pytest.raises(DataError, match=rf"there is no .*{name}; GPT-2's {name} is expected there"):
        tokenizer.from_gpt2(*files)


def _saved(change: Callable[[Any], object]) -> str:
    saved = json.loads(SMALL.to_str())
    change(saved)
    return json.dumps(saved)


BAD_SAVED = {
    "cut": (SMALL.to_str()[:1000], "is not JSON"),
    "a list": ("[]", "is not a tokenizer.json with a byte-level BPE"),
    "another model": (_saved(lambda saved: saved["model"].update(type="Unigram")), "is not a tokenizer.json with a byte-level BPE"),
    "no merges": (_saved(lambda saved: saved["model"].pop("merges")), "is not a tokenizer.json with a byte-level BPE"),
    "odd merges": (_saved(lambda saved: saved["model"]["merges"].append([1, 2])), r"has a merge \[1, 2\]"),
    "no vocabulary": (_saved(lambda saved: saved["model"].pop("vocab")), "does not map tokens"),
}


@pytest.mark.parametrize("damage", BAD_SAVED)
def test_a_bad_saved_tokenizer_is_refused_with_file_and_reason(tmp_path: Path, damage: str) -> None:
    content, said = BAD_SAVED[damage]
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(DataError, match=rf"t\.json .*{said}|t\.json {said}"):
        tokenizer.load(tmp_path / "t.json")


def test_a_vocabulary_with_a_token_that_is_called_model_is_one(tmp_path: Path) -> None:
    """As GPT-2's has; a tokenizer.json has its vocabulary under that name."""
    vocab = {"a": 0, "model": 1, "added_tokens": 2, "<|endoftext|>": 3}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    assert tokens_of(tmp_path / "vocab.json") == vocab
