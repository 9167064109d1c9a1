"""Text to a dataset: what becomes a document, what is said of bad input, and what is built again."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets_of_text import PROSE, SMALL, contents, put, texts_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from trainer.data import DataError, StorageError, tokenizer
from trainer.data.build import Prepared, Progress, Vocabulary, build
from trainer.data.documents import Batch, Files, text_of
from trainer.data.indexed import IndexedDataset
from trainer.data.tokenizer import END_OF_TEXT


def made(tmp_path: Path, *paths: Path, **options: Any) -> list[str]:
    build(
        Files(paths, options.pop("json_key", "text")), tmp_path / "out" / "d", SMALL, workers=options.pop("workers", 1), **options
    )
    return texts_of(tmp_path / "out" / "d")


# -- what becomes a document -------------------------------------------------------------------------------------------


def test_a_text_file_is_a_document_and_marker_lines_make_several(tmp_path: Path) -> None:
    one = put(tmp_path / "a.txt", "first\nfile ünï\n")
    two = put(tmp_path / "b.txt", f"x\n{END_OF_TEXT}\n\n  \n{END_OF_TEXT}\r\ny {END_OF_TEXT} y\n{END_OF_TEXT}\n")
    assert made(tmp_path, one, two) == [text + END_OF_TEXT for text in ("first\nfile ünï\n", "x\n", f"y {END_OF_TEXT} y\n")]


def test_only_the_end_of_a_document_is_the_end_of_text_token(tmp_path: Path) -> None:
    made(tmp_path, put(tmp_path / "a.jsonl", json.dumps({"text": f"a{END_OF_TEXT}b"})))
    tokens = IndexedDataset(tmp_path / "out" / "d").tokens
    end = tokenizer.load(tmp_path / "out" / "d.tokenizer.json").token_to_id(END_OF_TEXT)
    assert np.flatnonzero(tokens == end).tolist() == [len(tokens) - 1]


@pytest.mark.parametrize("name", ["a.jsonl", "A.JSONL", "a.Json"])
def test_a_line_of_jsonl_is_a_document_under_its_key(tmp_path: Path, name: str) -> None:
    lines = [{"body": "one", "text": 5}, {"body": ""}, {"body": " \n"}, {"body": "zwei\nZeilen"}]
    path = put(tmp_path / name, "\ufeff" + "\n\n".join(map(json.dumps, lines)))
    assert made(tmp_path, path, json_key="body") == [f"one{END_OF_TEXT}", f"zwei\nZeilen{END_OF_TEXT}"]


def test_without_the_end_of_text_token_documents_are_text_alone(tmp_path: Path, words: Path) -> None:
    assert made(tmp_path, words, append_eod=False) == [PROSE * 20]


def test_documents_keep_their_order_with_any_number_of_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.data.documents.BATCH_BYTES", 500)
    documents = [f"{number} " + "word " * (number * 37 % 90) for number in range(300)]
    path = put(tmp_path / "a.jsonl", "\n".join(json.dumps({"text": text}) for text in documents))
    results = []
    for workers in (1, 3):
        build(Files([path]), tmp_path / str(workers) / "d", SMALL, workers=workers)
        results.append(contents(tmp_path / str(workers)))
    assert results[0] == results[1]
    assert texts_of(tmp_path / "3" / "d") == [text + END_OF_TEXT for text in documents]


def test_a_long_document_in_pieces_has_the_tokens_that_it_has_in_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"line {number}{'  ' * (number % 3)}\n{' ' * (number % 4)}" + "\n" * (number % 5 == 0) for number in range(500))
    path = put(tmp_path / "a.txt", text + "ünï\n\u00a0x\n\u3000y\nz")
    chosen = tokenizer.train([text], 300)
    whole = [piece for piece in Files([path]).pieces() if piece.raw]
    monkeypatch.setattr("trainer.data.documents.PIECE_BYTES", 40)
    parts = list(Files([path]).pieces())
    assert len(whole) == 1 and len(parts) > 30
    assert [part.ends for part in parts] == [False] * (len(parts) - 1) + [True]
    assert [number for part in parts for number in chosen.encode(text_of(part)).ids] == chosen.encode(text_of(whole[0])).ids
    assert made(tmp_path, path) == [path.read_text() + END_OF_TEXT]


LINES = {
    "CRLF": "line one\r\n",
    "double spaced CRLF": "line one\r\n\r\n",
    "Cyrillic": "Мама мыла раму\n",
    "Chinese": "我們在這裡。\n",
    "combining marks": "\u0301Ame\u0301\n",
    "no-break space": "line one\u00a0\n",
    "line separator": "line\u2028one\u2028\n",
    "ideographic space": "我們\u3000\n",
    "next line": "line one\u0085\n",
    "information separator": "line\x1c\n",
    "trailing spaces": "line one  \n",
}


def in_pieces(path: Path, chosen: Tokenizer, size_bytes: int) -> tuple[int, list[int]]:
    """How many pieces a text has that are this long at least, and all tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.data.documents.PIECE_BYTES", size_bytes)
        parts = list(Files([path]).pieces())
    return len(parts), [number for part in parts for number in chosen.encode(text_of(part)).ids]


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_a_text_of_any_script_and_any_line_ends_is_cut_into_pieces_without_a_change_to_its_tokens(
    tmp_path: Path, line: str
) -> None:
    path = put(tmp_path / "a.txt", line * 500)
    chosen = tokenizer.train([line, PROSE], 300)
    count, tokens = in_pieces(path, chosen, 100)
    assert count > len(path.read_bytes()) // 200
    assert (1, tokens) == in_pieces(path, chosen, 1 << 30) and tokens == chosen.encode(line * 500).ids


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="\n\n\n\r a'sЖ中\u0301\u00a0\u2028\u3000\u0085\u180e\u200b\x1c\ufeff\t\x0b\0🙂1.", max_size=60),
    size=st.integers(1, 20),
)
def test_random_text_has_the_same_tokens_in_pieces_as_in_one(
    tmp_path_factory: pytest.TempPathFactory, text: str, size: int
) -> None:
    path = put(tmp_path_factory.getbasetemp() / "random.txt", text)
    chosen = tokenizer.train([PROSE], 300)
    assert in_pieces(path, chosen, size)[1] == in_pieces(path, chosen, 1 << 30)[1]


def test_a_piece_knows_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.data.documents.PIECE_BYTES", 10)
    path = put(tmp_path / "a.txt", b"".join(b"line %d\n" % number for number in range(1, 50)) + b"\xff\n")
    with pytest.raises(DataError, match=r"a\.txt:50 is not UTF-8 text: invalid start byte"):
        for piece in Files([path]).pieces():
            text_of(piece)


def test_large_vocabularies_are_stored_in_four_bytes(tmp_path: Path, words: Path) -> None:
    vocab = json.loads(tokenizer.train([PROSE], 300).to_str())["model"]["vocab"]
    vocab[END_OF_TEXT] = 70_000
    files = put(tmp_path / "vocab.json", json.dumps(vocab)), put(tmp_path / "merges.txt", "")
    done = build(Files([words]), tmp_path / "d", Vocabulary(vocab_file=files[0], merges_file=files[1]), workers=1)
    assert done.vocab_size == 70_001
    data = IndexedDataset(tmp_path / "d")
    assert data.dtype == np.dtype("<i4") and data.tokens[-1] == 70_000


def test_of_a_large_input_batches_at_even_distances_train_the_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: Path
) -> None:
    seen: list[list[Batch]] = []

    def trained(source: Iterator[Batch], vocab_size: int, *, threads: int) -> str:
        seen.append(list(source))
        return tokenizer.train([PROSE], vocab_size).to_str()

    monkeypatch.setattr("trainer.data.build.trained", trained)
    monkeypatch.setattr("trainer.data.documents.BATCH_BYTES", 1)
    monkeypatch.setattr("trainer.data.build.TRAINING_BYTES", 300)
    path = put(tmp_path / "a.jsonl", "".join(json.dumps({"text": "x" * 89}) + "\n" for _ in range(10)))
    assert path.stat().st_size == 1020
    build(Files([path]), tmp_path / "d", SMALL, workers=1)
    assert [piece.line for batch in seen[0] for piece in batch] == [1, 5, 9]


def test_progress_ends_with_everything_done(tmp_path: Path, words: Path) -> None:
    seen: list[Progress] = []
    build(Files([words]), tmp_path / "d", SMALL, workers=1, progress=seen.append)
    size = words.stat().st_size
    assert list(dict.fromkeys(now.stage for now in seen)) == ["reading the text", "training the tokenizer", "tokenizing"]
    assert seen[-1] == Progress("tokenizing", size, size, 1)
    assert all(now.done_bytes <= now.total_bytes for now in seen)


# -- bad input ---------------------------------------------------------------------------------------------------------

BAD_INPUT: dict[str, tuple[str, bytes, str]] = {
    "not UTF-8": ("a.txt", b"good\nbad \xff\xfe\n", r"a\.txt:2 is not UTF-8 text"),
    "UTF-8 cut at the end": ("a.txt", "good\nü".encode()[:-1], r"a\.txt:2 is not UTF-8 text: unexpected end"),
    "only white space": ("a.txt", b" \n\n\t\n", "no text in the input"),
    "empty": ("a.txt", b"", "no text in the input"),
    "empty JSONL": ("a.jsonl", b"\n", "no text in the input"),
    "not JSON": ("a.jsonl", b'{"text": "x"}\n{"text": \n', r"a\.jsonl:2 is not JSON: .*each line of a JSONL file is one object"),
    "pretty-printed JSON": ("a.json", b'{\n"text": "x"\n}\n', r"a\.json:1 is not JSON"),
    "a JSON list": ("a.jsonl", b'["x"]\n', r"a\.jsonl:1 is a JSON list"),
    "another key": ("a.jsonl", b'{"body": "x", "id": 1}\n', r"a\.jsonl:1 has no key 'text', only 'body', 'id'; see --json-key"),
    "a number for text": ("a.jsonl", b'{"text": 5}\n', r"a\.jsonl:1 has int under 'text' instead of text"),
    "half a character": ("a.jsonl", b'{"text": "\\ud800"}\n', r"a\.jsonl:1 has half a character"),
    "JSONL not UTF-8": ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}\n', r"a\.jsonl:2 is not UTF-8 text"),
    "JSON that is too deep": ("a.jsonl", b"[" * 100_000, r"a\.jsonl:1 is not JSON"),
}


@pytest.mark.parametrize("damage", BAD_INPUT)
def test_bad_input_is_refused_with_file_and_line_and_leaves_nothing(tmp_path: Path, damage: str) -> None:
    name, content, said = BAD_INPUT[damage]
    source = Files([put(tmp_path / name, content)])
    with pytest.raises(DataError, match=said):
        build(source, tmp_path / "out" / "d", SMALL, workers=2)
    assert contents(tmp_path / "out") == {}


def test_bad_input_is_refused_as_well_when_the_tokenizer_is_given(tmp_path: Path) -> None:
    vocab = json.loads(tokenizer.train([PROSE], 300).to_str())["model"]["vocab"]
    files = put(tmp_path / "vocab.json", json.dumps(vocab)), put(tmp_path / "merges.txt", "")
    source = Files([put(tmp_path / "a.jsonl", '{"text": "x"}\n' * 9 + "5\n")])
    with pytest.raises(DataError, match=r"a\.jsonl:10 is a JSON int"):
        build(source, tmp_path / "out" / "d", Vocabulary(vocab_file=files[0], merges_file=files[1]), workers=2)
    assert contents(tmp_path / "out") == {}


def test_inputs_that_are_no_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no file .*/none\.txt"):
        Files([tmp_path / "none.txt"])
    with pytest.raises(DataError, match="is not a file; name the files themselves"):
        Files([tmp_path])
    with pytest.raises(DataError, match="no file is named"):
        Files([])


def test_one_gpt2_file_without_the_other_and_a_tiny_vocabulary_are_refused(tmp_path: Path, words: Path) -> None:
    with pytest.raises(DataError, match="give both vocab_file and merges_file"):
        build(Files([words]), tmp_path / "d", Vocabulary(vocab_file=words), workers=1)
    with pytest.raises(DataError, match="a vocabulary of 256 is too small; at least 257"):
        build(Files([words]), tmp_path / "d", Vocabulary(256), workers=1)


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, words: Path) -> None:
    with pytest.raises(StorageError, match=r"cannot write .*words\.txt: (Not a directory|File exists)"):
        build(Files([words]), words / "d", SMALL, workers=1)


def test_what_was_not_built_here_is_not_written_over_unless_forced(tmp_path: Path, words: Path) -> None:
    build(Files([words]), tmp_path / "d", SMALL, workers=1)
    (tmp_path / "d.json").unlink()
    before = contents(tmp_path)
    with pytest.raises(DataError, match=r"d\.idx is there and was not built here"):
        build(Files([words]), tmp_path / "d", SMALL, workers=1)
    assert contents(tmp_path) == before
    assert not build(Files([words]), tmp_path / "d", SMALL, workers=1, force=True).reused


@pytest.mark.parametrize("name", ["d.idx", "d.bin", "d.tokenizer.json", "d.json"])
def test_a_file_that_no_build_has_left_is_not_written_over_unless_forced(tmp_path: Path, words: Path, name: str) -> None:
    put(tmp_path / name, "[1, 2]")
    put(tmp_path / "d.json", '{"text": "somebody\'s own"}')
    before = contents(tmp_path)
    with pytest.raises(DataError, match=rf"{name} is there and was not built here"):
        build(Files([words]), tmp_path / "d", SMALL, workers=1)
    assert contents(tmp_path) == before
    assert not build(Files([words]), tmp_path / "d", SMALL, workers=1, force=True).reused


@pytest.mark.parametrize("name", ["d.json", "d.bin", "d.tokenizer.json", "d.idx.tmp"])
def test_an_input_is_never_written_over(tmp_path: Path, name: str) -> None:
    put(tmp_path / name, json.dumps({"text": PROSE}))
    (tmp_path / "link.jsonl").symlink_to(name)
    before = contents(tmp_path)
    for path in (tmp_path / name, tmp_path / "link.jsonl"):
        with pytest.raises(DataError, match=rf"{name} is an input, and would be written over; choose another place"):
            build(Files([path]), tmp_path / "d", SMALL, workers=1, force=True)
        assert contents(tmp_path) == before


@pytest.mark.parametrize("prefix", ["/", "{}/..", "{}/d/..", ".", "..", "./"])
def test_a_directory_alone_is_no_prefix(tmp_path: Path, words: Path, monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
    monkeypatch.chdir(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(DataError, match=r"is a directory, and a prefix has the name of the dataset, too, as .*corpus$"):
        build(Files([words]), Path(prefix.format(tmp_path)), SMALL, workers=1)
    assert contents(tmp_path) == before


def test_a_tokenizer_that_is_read_is_never_written_over(tmp_path: Path, words: Path) -> None:
    vocab = put(tmp_path / "d.json", json.dumps(json.loads(tokenizer.train([PROSE], 300).to_str())["model"]["vocab"]))
    given = Vocabulary(vocab_file=vocab, merges_file=put(tmp_path / "merges.txt", ""))
    before = contents(tmp_path)
    with pytest.raises(DataError, match=r"d\.json is an input"):
        build(Files([words]), tmp_path / "d", given, workers=1, force=True)
    assert contents(tmp_path) == before


# -- again -------------------------------------------------------------------------------------------------------------


def test_the_same_inputs_are_not_built_again_and_others_are(tmp_path: Path, words: Path) -> None:
    def again(**options: Any) -> Prepared:
        return build(Files([words], options.pop("json_key", "text")), tmp_path / "d", options.pop("vocabulary", SMALL), **options)

    first = again(workers=1)
    assert not first.reused
    second = again(workers=2)
    assert second.reused
    assert (second.tokens, second.vocab_size, second.documents) == (first.tokens, first.vocab_size, first.documents)
    assert not again(workers=1, force=True).reused
    assert not again(workers=1, append_eod=False).reused
    assert not again(workers=1, vocabulary=Vocabulary(290)).reused
    put(words, PROSE * 19 + PROSE.upper())
    os.utime(words, ns=(1, 1))
    assert not again(workers=1, vocabulary=Vocabulary(290)).reused


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A text file, and the directory of a dataset `d` that was built of it."""
    directory = tmp_path_factory.mktemp("built")
    words = put(directory / "words.txt", PROSE * 20)
    build(Files([words]), directory / "out" / "d", SMALL, workers=1)
    return words, directory / "out"


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (name, damage)
        for name in ("d.bin", "d.idx", "d.json", "d.tokenizer.json")
        for damage in ("missing", "cut", "changed")
        if (name, damage) != ("d.bin", "changed")  # the format has no checksum
    ],
)
def test_a_damaged_dataset_is_built_again(tmp_path: Path, built: tuple[Path, Path], name: str, damage: str) -> None:
    words, whole = built
    directory = shutil.copytree(whole, tmp_path / "out")
    good = contents(directory)
    assert build(Files([words]), directory / "d", SMALL, workers=1).reused
    path = directory / name
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(good[name][:-3] if damage == "cut" else good[name].replace(b"e", b"a").replace(b"\1", b"\2"))
    force = name == "d.json" and damage != "cut"  # nothing says any more that it was built here
    assert not build(Files([words]), directory / "d", SMALL, workers=1, force=force).reused
    assert contents(directory) == good
