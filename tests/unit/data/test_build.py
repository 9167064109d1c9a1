"""Building datasets, from Python and by the command: order, reuse, bad input, and a builder that is killed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from trainer.data import corpus, tokenizer
from trainer.data.build import Files, Vocabulary, build, prepare
from trainer.data.errors import DataError
from trainer.data.indexed import IndexedDataset

WORDS = "the quick brown fox jumps over the lazy dog and runs away from all of them"
SMALL = Vocabulary(300)


def documents(prefix: Path) -> list[str]:
    data = IndexedDataset(prefix)
    chosen = tokenizer.load(Path(f"{prefix}.tokenizer.json"))
    bounds = [data.boundary(number) for number in range(len(data) + 1)]
    texts = [chosen.decode(data.tokens[a:b].tolist(), skip_special_tokens=False) for a, b in pairwise(bounds)]
    return [text.removesuffix(tokenizer.END_OF_TEXT) for text in texts]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "resilient", "data", "build", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_jsonl_gives_a_document_a_line_in_order_with_any_number_of_workers(tmp_path: Path):
    texts = [f"{number} {WORDS} ünï {number}" for number in range(400)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"body": text}) + "\n\n" for text in texts))
    source = Files([tmp_path / "in.jsonl"], json_key="body")
    build(source, tmp_path / "one", SMALL, workers=1)
    build(source, tmp_path / "two", SMALL, workers=2)
    assert documents(tmp_path / "one") == texts
    for suffix in (".bin", ".idx", ".tokenizer.json"):
        assert Path(f"{tmp_path}/one{suffix}").read_bytes() == Path(f"{tmp_path}/two{suffix}").read_bytes()


def test_a_text_file_is_a_document_or_several_between_end_of_text_lines(tmp_path: Path):
    (tmp_path / "a.txt").write_text(f"{WORDS}\nsecond line\n")
    (tmp_path / "b.txt").write_text(f"one\n{tokenizer.END_OF_TEXT}\ntwo\n{tokenizer.END_OF_TEXT}\n")
    build(Files([tmp_path / "a.txt", tmp_path / "b.txt"]), tmp_path / "d", SMALL, workers=1)
    assert documents(tmp_path / "d") == [f"{WORDS}\nsecond line\n", "one\n", "two\n"]


def test_a_document_longer_than_a_piece_stays_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("trainer.data.build.PIECE_CHARS", 100)
    text = "".join(f"{number} {WORDS}\n" for number in range(50))
    (tmp_path / "a.txt").write_text(text)
    made = build(Files([tmp_path / "a.txt"]), tmp_path / "d", SMALL, workers=1)
    assert made.documents == 1
    assert documents(tmp_path / "d") == [text]


def test_every_document_ends_with_the_end_of_text_token_unless_that_is_off(tmp_path: Path):
    (tmp_path / "a.txt").write_text(WORDS)
    source = Files([tmp_path / "a.txt"])
    build(source, tmp_path / "with", SMALL, workers=1)
    build(source, tmp_path / "without", SMALL, workers=1, append_eod=False)
    with_end, without = IndexedDataset(tmp_path / "with").tokens, IndexedDataset(tmp_path / "without").tokens
    end = tokenizer.load(tmp_path / "with.tokenizer.json").token_to_id(tokenizer.END_OF_TEXT)
    assert with_end.tolist() == [*without.tolist(), end]


def test_the_same_dataset_is_not_built_twice_and_another_one_is(tmp_path: Path):
    (tmp_path / "a.txt").write_text(WORDS)
    source = Files([tmp_path / "a.txt"])
    assert not build(source, tmp_path / "d", SMALL, workers=1).reused
    assert build(source, tmp_path / "d", SMALL, workers=1).reused
    assert not build(source, tmp_path / "d", Vocabulary(301), workers=1).reused
    (tmp_path / "a.txt").write_text(WORDS + "!")
    assert not build(source, tmp_path / "d", Vocabulary(301), workers=1).reused
    os.truncate(tmp_path / "d.bin", 3)
    assert not build(source, tmp_path / "d", Vocabulary(301), workers=1).reused
    assert not build(source, tmp_path / "d", Vocabulary(301), workers=1, force=True).reused


def gpt2_files(directory: Path) -> tuple[Path, Path]:
    """A small tokenizer in GPT-2's two files."""
    trained = json.loads(tokenizer.train([WORDS] * 5, 300).to_str())
    merges = "\n".join(" ".join(pair) for pair in trained["model"]["merges"])
    (directory / "vocab.json").write_text(json.dumps(trained["model"]["vocab"]))
    (directory / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    return directory / "vocab.json", directory / "merges.txt"


def test_gpt2_files_are_taken_as_they_are(tmp_path: Path):
    vocab, merges = gpt2_files(tmp_path)
    (tmp_path / "a.txt").write_text(WORDS)
    done = run(tmp_path / "a.txt", "--output", tmp_path / "d", "--vocab-file", vocab, "--merges-file", merges)
    assert done.returncode == 0, done.stderr
    assert documents(tmp_path / "d") == [WORDS]
    expected = tokenizer.train([WORDS] * 5, 300).encode(WORDS).ids
    assert IndexedDataset(tmp_path / "d").tokens.tolist()[:-1] == expected


def test_the_corpus_is_real_prose_and_always_the_same():
    first, second = list(corpus.documents(400_000)), list(corpus.documents(400_000))
    assert first == second
    assert 400_000 <= sum(len(text.encode()) for text in first) < 1_500_000
    assert "assert" in first[0]


def test_the_quickstarts_corpus_is_prepared_once(tmp_path: Path):
    said: list[str] = []
    made = prepare("auto", tmp_path, vocab_size=500, progress=lambda what, done, total: said.append(what), workers=1)
    assert made.tokens > 300_000
    assert {"training the tokenizer", "tokenizing"} <= set(said)
    assert prepare("auto", tmp_path, vocab_size=500).reused


BAD_INPUT = {
    "no such file": (lambda d: [d / "none.txt"], "there is no file"),
    "a directory": (lambda d: [d], "is not a file"),
    "bytes that are no text": (lambda d: [put(d / "a.txt", b"ab\xff\xfe")], "not UTF-8"),
    "lines that are no JSON": (lambda d: [put(d / "a.jsonl", b'{"text": "a"}\nnonsense\n')], "a.jsonl:2 is not JSON"),
    "objects without the key": (lambda d: [put(d / "a.jsonl", b'{"body": "a"}\n')], "a.jsonl:1 is no object with the key 'text'"),
    "values that are no text": (lambda d: [put(d / "a.jsonl", b'{"text": 5}\n')], "a.jsonl:1: the value of 'text' is not text"),
    "lists": (lambda d: [put(d / "a.jsonl", b"[1]\n")], "a.jsonl:1"),
    "nothing": (lambda d: [put(d / "a.txt", b"")], "there is no text"),
    "a vocabulary that is missing": (
        lambda d: [put(d / "a.txt", b"x"), "--vocab-file", d / "v.json", "--merges-file", d / "m.txt"],
        "there is no .*v.json",
    ),
    "a vocabulary that is none": (
        lambda d: [
            put(d / "a.txt", b"x"), "--vocab-file", put(d / "v.json", b"[]"), "--merges-file", put(d / "m.txt", b"")
        ],
        "not a mapping",
    ),
    "a vocabulary alone": (lambda d: [put(d / "a.txt", b"x"), "--vocab-file", put(d / "v.json", b"{}")], "go together"),
}  # fmt: skip


def put(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("bad", BAD_INPUT)
def test_bad_input_ends_with_one_message_and_leaves_nothing(tmp_path: Path, bad: str):
    arguments, words = BAD_INPUT[bad]
    out = tmp_path / "out"
    done = run(*arguments(tmp_path), "--output", out / "d")
    assert done.returncode == 78, done.stderr
    assert re.search(words, done.stderr)
    assert "Traceback" not in done.stderr
    assert not [path for path in out.glob("*") if path.suffix != ".lock"]


def test_a_builder_that_is_killed_leaves_nothing_that_is_taken_for_good(tmp_path: Path):
    lines = "".join(json.dumps({"text": f"{number} {WORDS * 20}"}) + "\n" for number in range(20_000))
    (tmp_path / "in.jsonl").write_text(lines)
    (tmp_path / "vocab").mkdir()
    vocab, merges = gpt2_files(tmp_path / "vocab")
    prefix = tmp_path / "out" / "d"
    options = ["--output", str(prefix), "--vocab-file", str(vocab), "--merges-file", str(merges), "--workers", "2"]
    command = [sys.executable, "-m", "resilient", "data", "build", str(tmp_path / "in.jsonl"), *options]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size > 0 for path in prefix.parent.glob("d.bin.new*")):
        assert process.poll() is None
        assert time.monotonic() < deadline
    process.send_signal(signal.SIGKILL)
    process.wait()
    with pytest.raises(DataError):
        IndexedDataset(prefix)
    (tmp_path / "in.jsonl").write_text(lines[: len(lines) // 50].rpartition("\n")[0] + "\n")
    assert run(*command[5:]).returncode == 0
    assert IndexedDataset(prefix).tokens.size > 0
    assert not list(prefix.parent.glob("*.new*"))


def test_ctrl_c_ends_with_130_and_leaves_nothing(tmp_path: Path):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": f"{n} {WORDS * 20}"}) + "\n" for n in range(20_000)))
    command = [sys.executable, "-m", "resilient", "data", "build", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out/d")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "out/d.lock").exists():
        assert time.monotonic() < deadline
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["d.lock"]
