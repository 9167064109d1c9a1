"""Text to a dataset: what becomes a document, what is said of bad input, and what a builder that dies leaves."""

import contextlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from forked import forked
from soak import soaked

from trainer.data import DataError, StorageError, corpus, open_split, pool, prepare, tokenizer
from trainer.data.build import Prepared, Progress, Vocabulary, build
from trainer.data.documents import Batch, Files, Piece, batches, text_of
from trainer.data.indexed import IndexedDataset
from trainer.data.tokenizer import END_OF_TEXT

SMALL = Vocabulary(300)
PROSE = "The order is a pure function of seed, epoch and index. Nothing is stored; nothing is lost.\n"


def texts_of(prefix: Path) -> list[str]:
    data = IndexedDataset(prefix)
    chosen = tokenizer.load(Path(f"{prefix}.tokenizer.json"))
    bounds = [data.boundary(number) for number in range(len(data) + 1)]
    return [chosen.decode(data.tokens[first:last].tolist(), skip_special_tokens=False) for first, last in pairwise(bounds)]


def made(tmp_path: Path, *paths: Path, **options: Any) -> list[str]:
    build(
        Files(paths, options.pop("json_key", "text")), tmp_path / "out" / "d", SMALL, workers=options.pop("workers", 1), **options
    )
    return texts_of(tmp_path / "out" / "d")


def put(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture
def words(tmp_path: Path) -> Path:
    return put(tmp_path / "words.txt", PROSE * 20)


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


def test_a_line_of_jsonl_is_a_document_under_its_key(tmp_path: Path) -> None:
    lines = [{"body": "one", "text": 5}, {"body": ""}, {"body": " \n"}, {"body": "zwei\nZeilen"}]
    path = put(tmp_path / "a.jsonl", "\ufeff" + "\n\n".join(map(json.dumps, lines)))
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
    assert list(dict.fromkeys(now.stage for now in seen)) == ["reading", "training the tokenizer", "tokenizing"]
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
    force = (name, damage) == ("d.json", "missing")  # nothing says any more that it was built here
    assert not build(Files([words]), directory / "d", SMALL, workers=1, force=force).reused
    assert contents(directory) == good


# -- builders that die -------------------------------------------------------------------------------------------------


def build_and_die(words: Path, prefix: Path, left: int) -> None:
    """In a process of its own, killed at the call number `left` of those that matter."""

    def dying(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*given, **named)

        return call

    os.fsync, Path.replace, Path.unlink = map(dying, (os.fsync, Path.replace, Path.unlink))  # type: ignore[method-assign]
    build(Files([words]), prefix, Vocabulary(290), workers=1)


@pytest.mark.soak
@pytest.mark.parametrize("every", [3, soaked(1)])
def test_a_builder_killed_at_any_call_that_matters_leaves_nothing_that_is_taken_for_good(tmp_path: Path, every: int) -> None:
    words = put(tmp_path / "words.txt", PROSE * 20)
    build(Files([words]), tmp_path / "clean" / "d", Vocabulary(290), workers=1)
    build(Files([put(tmp_path / "other.txt", PROSE.upper() * 20)]), tmp_path / "old" / "d", SMALL, workers=1)
    clean, old = contents(tmp_path / "clean"), contents(tmp_path / "old")
    seen = set()
    for left in range(0, 40, every):
        directory = tmp_path / f"{left}"
        shutil.copytree(tmp_path / "old", directory)
        builder = forked(build_and_die, words, directory / "d", left, daemon=False)
        builder.join()
        if builder.exitcode == 0:
            break
        assert builder.exitcode == -signal.SIGKILL
        if (directory / "d.idx").exists():
            present = {name: content for name, content in contents(directory).items() if name in clean}
            assert present in (old, clean)
            seen.add("old" if present == old else "clean")
        else:
            with pytest.raises(DataError, match="there is no"):
                open_split([(directory / "d", 1.0)], (1, 0, 0), "train", 8, 1)
            seen.add("none")
        build(Files([words]), directory / "d", Vocabulary(290), workers=1)
        assert contents(directory) == clean
    else:
        pytest.fail("the builder never finished")
    assert seen == {"old", "none", "clean"}


def test_no_worker_outlives_a_builder_that_is_killed(tmp_path: Path) -> None:
    code = """
import sys
from trainer.data import pool
from trainer.data.documents import Piece
import numpy as np, os
def endless():
    while True:
        yield [Piece("x", 1, None, b"some text " * 20_000, True)]
from trainer.data import tokenizer
serialized = tokenizer.train(["some text"], 300).to_str()
for number, _ in enumerate(pool.tokenized(endless(), serialized, np.dtype("<u2"), None, workers=3)):
    if number == 2:
        print("running", flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process, process.stdout:
        assert process.stdout.readline() == "running\n"
        workers = psutil.Process(process.pid).children(recursive=True)
        groups = {os.getpgid(worker.pid) for worker in workers}
        process.kill()
    assert len(workers) == len(groups - {os.getpgrp()}) == 3  # a Ctrl-C at the terminal is for their owner alone
    assert psutil.wait_procs(workers, timeout=120)[1] == []


def test_a_worker_that_trains_for_long_ends_with_its_owner() -> None:
    code = """
import signal
from trainer.data import pool, tokenizer
tokenizer.train = lambda texts, size: (list(texts), signal.pause())
pool.serve()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        for message in (("train", 300), [Piece("x", 1, None, b"text", True)], None):
            pickle.dump(message, process.stdin)
        process.stdin.close()
        assert process.wait(120) == 1


def own_workers() -> list[psutil.Process]:
    """The tokenizer processes of this one; other tests may have children of other kinds."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "trainer.data.pool" in " ".join(child.cmdline()):
                found.append(child)
    return found


def test_a_worker_that_dies_is_an_error_and_no_wait() -> None:
    def killing() -> Iterator[Batch]:
        for number in range(100):
            if number == 5:
                assert len(own_workers()) == 2
                for worker in own_workers():
                    worker.kill()
            yield [Piece("x", 1, None, b"some text " * 1000, True)]

    serialized = tokenizer.train(["some text"], 300).to_str()
    with pytest.raises(DataError, match="a tokenizer process ended by signal 9; if memory ran out"):
        list(pool.tokenized(killing(), serialized, np.dtype("<u2"), None, workers=2))
    assert own_workers() == []


def test_a_consumer_that_stops_early_leaves_no_worker() -> None:
    serialized = tokenizer.train(["some text"], 300).to_str()
    pieces = (Piece("x", 1, None, b"some text " * 1000, True) for _ in range(1000))
    stream = pool.tokenized(batches(pieces), serialized, np.dtype("<u2"), None, workers=2)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert own_workers() == []


# -- what a config asks for --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare("auto", tmp_path_factory.mktemp("quickstart") / "data", vocab_size=1000, workers=2)


@pytest.mark.soak
def test_the_corpus_is_enough_prose_for_the_quickstart(quickstart: Prepared) -> None:
    assert quickstart.vocab_size == 1000
    assert quickstart.documents > 400
    assert quickstart.tokens > 400_000
    for which in ("train", "valid", "test"):
        samples = open_split([(quickstart.prefix, 1.0)], (949, 50, 1), which, 256, 42, vocab_size=1000)
        assert samples.get(np.arange(len(samples))).shape == (len(samples), 257)
    text = " ".join(texts_of(quickstart.prefix)).lower()
    assert all(f" {word} " in text for word in ("the", "of", "statement", "returns", "object"))


@pytest.mark.soak
def test_what_is_prepared_is_prepared_once(quickstart: Prepared) -> None:
    before = contents(quickstart.prefix.parent)
    again = prepare("auto", quickstart.prefix.parent, vocab_size=1000, workers=2)
    assert again.reused
    assert contents(quickstart.prefix.parent) == before


def test_the_corpus_is_the_same_every_time_and_a_limit_cuts_its_end() -> None:
    library = Path(sysconfig.get_path("stdlib")) / "concurrent"
    whole = corpus.documents(library=library)
    assert len(whole) > 3
    assert whole == corpus.documents(library=library)
    assert whole[:2] == corpus.documents(sum(len(text.encode()) for text in whole[:2]), library)


def test_the_corpus_leaves_out_what_does_not_belong_to_it(tmp_path: Path) -> None:
    for name in ("b.py", "a/c.py", "test/d.py", "a/site-packages/e.py", "a/tests/f.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        put(tmp_path / name, f'"""Of {name}."""\ndef f():\n    """Its f."""\n')
    put(tmp_path / "broken.py", '"""Not Python.\n')
    put(tmp_path / "silent.py", "x = 1\n")
    put(tmp_path / "surrogate.py", '"""\\ud800"""\n')
    (tmp_path / "pydoc_data").mkdir()
    put(tmp_path / "pydoc_data/topics.py", "topics = {'x': 'A ' 'topic.'}\n")
    assert sorted(corpus.documents(library=tmp_path)) == ["A topic.", "Of a/c.py.\n\nIts f.", "Of b.py.\n\nIts f."]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no sources of the standard library"):
        corpus.documents(library=tmp_path / "empty")


def test_processes_that_prepare_at_once_make_one_dataset(tmp_path: Path, words: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from trainer.data import prepare;"
        "print(prepare([Path(sys.argv[1])], Path(sys.argv[2]), vocab_size=300).reused)"
    )
    command = [sys.executable, "-c", code, str(words), str(tmp_path / "data")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    said = sorted(process.communicate()[0] for process in processes)
    assert said == ["False\n", "True\n", "True\n", "True\n"]
    assert sorted(contents(tmp_path / "data")) == ["corpus.bin", "corpus.idx", "corpus.json", "corpus.tokenizer.json"]


def test_data_is_prepared_without_torch_and_imported_without_numpy() -> None:
    code = "import sys, trainer.data.cli; assert 'numpy' not in sys.modules; from trainer.data import prepare, open_split;"
    subprocess.run([sys.executable, "-c", code + "assert 'torch' not in sys.modules"], check=True)
