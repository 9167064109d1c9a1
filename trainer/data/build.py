"""Building a dataset: documents in, tokens out, in order, by several processes; whole or not at all.

`build` takes text and JSONL files, `prepare` what a config asks for. Both leave `<prefix>.bin`, `<prefix>.idx`,
`<prefix>.tokenizer.json` and last `<prefix>.json`, which says what they were made of: a second call finds it and does nothing.
"""

import fcntl
import hashlib
import json
import multiprocessing
import os
import platform
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from trainer.data import corpus, tokenizer
from trainer.data.errors import DataError
from trainer.data.indexed import IndexedDataset, IndexedWriter, token_type

PIECE_CHARS = 1 << 20  # a longer document is tokenized in pieces, cut at the ends of lines
BATCH_CHARS = 1 << 19
TRAINING_CHARS = 64 << 20  # as much text is read to train a tokenizer
_FORMAT = 1

Progress = Callable[[str, int, int], None]
Piece = tuple[str, bool, int]  # text, whether it ends a document, bytes read of the input so far


def silent(what: str, done: int, total: int) -> None:
    """No progress is shown."""


@dataclass(frozen=True)
class Vocabulary:
    """Which tokenizer: one trained to `size` tokens, or GPT-2's files."""

    size: int = 4096
    vocab_file: Path | None = None
    merges_file: Path | None = None


@dataclass(frozen=True)
class Prepared:
    """A dataset that is there."""

    prefix: Path
    tokenizer_file: Path
    vocab_size: int
    documents: int
    tokens: int
    reused: bool = False


class Files:
    """Text files (one document each, or several, separated by lines that say `<|endoftext|>`) and JSONL files (one a line).

    Raises:
        DataError: a file is missing or is none.
    """

    def __init__(self, paths: Sequence[Path], json_key: str = "text") -> None:
        self._paths, self._key = list(paths), json_key
        for path in paths:
            if not path.is_file():
                raise DataError(f"there is no file {path}" if not path.exists() else f"{path} is not a file")
        self.bytes = sum(path.stat().st_size for path in paths)

    def identity(self) -> Any:
        """Changes when the contents do."""
        stats = [(str(path.absolute()), path.stat()) for path in self._paths]
        return {"files": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats], "json_key": self._key}

    def pieces(self) -> Iterator[Piece]:
        done = 0
        for path in self._paths:
            read = self._jsonl if path.suffix in (".jsonl", ".json") else self._text
            try:
                for text, ends, count in read(path):
                    yield text, ends, done + count
            except UnicodeDecodeError as error:
                raise DataError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
            done += path.stat().st_size

    def _jsonl(self, path: Path) -> Iterator[Piece]:
        count = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                count += len(line)
                if not line.strip():
                    continue
                try:
                    text = json.loads(line)[self._key]
                except UnicodeDecodeError:
                    raise
                except ValueError as error:
                    raise DataError(f"{path}:{number} is not JSON: {error}") from error
                except (KeyError, TypeError):
                    raise DataError(f"{path}:{number} is no object with the key {self._key!r}; see --json-key") from None
                if not isinstance(text, str):
                    raise DataError(f"{path}:{number}: the value of {self._key!r} is not text")
                yield text, True, count

    def _text(self, path: Path) -> Iterator[Piece]:
        lines: list[str] = []
        size = count = 0
        with path.open("rb") as file:
            for line in file:
                count += len(line)
                text = line.decode("utf-8")
                if text.strip() == tokenizer.END_OF_TEXT:
                    yield "".join(lines), True, count
                    lines, size = [], 0
                    continue
                lines.append(text)
                size += len(text)
                if size >= PIECE_CHARS:
                    yield "".join(lines), False, count
                    lines, size = [], 0
        yield "".join(lines), True, count


class Corpus:
    """The prose that Python carries."""

    @cached_property
    def _documents(self) -> list[str]:
        return list(corpus.documents())

    @cached_property
    def bytes(self) -> int:
        return sum(len(text.encode()) for text in self._documents)

    def identity(self) -> Any:
        return {"corpus": platform.python_version(), "limit": corpus.LIMIT_BYTES}

    def pieces(self) -> Iterator[Piece]:
        done = 0
        for text in self._documents:
            done += len(text.encode())
            yield text, True, done


def build(
    source: Files | Corpus,
    prefix: Path,
    vocabulary: Vocabulary,
    *,
    workers: int,
    progress: Progress = silent,
    append_eod: bool = True,
    force: bool = False,
) -> Prepared:
    """Build a dataset, unless the same one is there.

    Args:
        prefix: path without suffix; its directory is made.
        workers: processes that tokenize; 1 for none beside this one.
        progress: called with what is done, and bytes done and in all.
        append_eod: end each document with the end-of-text token.
        force: build it even if it is there.

    Raises:
        DataError: the input is not good.
    """
    prefix.parent.mkdir(parents=True, exist_ok=True)
    made_of = {
        "format": _FORMAT,
        "source": source.identity(),
        "vocabulary": {name: str(value) for name, value in asdict(vocabulary).items()},
        "append_eod": append_eod,
    }
    mark = hashlib.blake2b(json.dumps(made_of, sort_keys=True).encode(), digest_size=16).hexdigest()
    with _locked(prefix):
        if not force and (found := _found(prefix, mark)) is not None:
            return found
        Path(f"{prefix}.json").unlink(missing_ok=True)
        progress("reading", 0, 0)
        chosen = _tokenizer(source, vocabulary, progress)
        closing = chosen.token_to_id(tokenizer.END_OF_TEXT) if append_eod else None
        with IndexedWriter(prefix, token_type(chosen.get_vocab_size())) as writer:
            for tokens, ends, done in _tokenized(source.pieces(), chosen, workers):
                writer.add(tokens, end=ends, closing=closing)
                progress("tokenizing", done, source.bytes)
            if writer.tokens == 0:
                raise DataError("there is no text in the input")
        _write(Path(f"{prefix}.tokenizer.json"), chosen.to_str())
        data = IndexedDataset(prefix)
        made = Prepared(prefix, Path(f"{prefix}.tokenizer.json"), chosen.get_vocab_size(), len(data), len(data.tokens))
        described = {"mark": mark, "vocab_size": made.vocab_size, "documents": made.documents, "tokens": made.tokens}
        _write(Path(f"{prefix}.json"), json.dumps({**described, "made_of": made_of}, indent=1))
        return made


def prepare(
    text: str | Sequence[Path],
    directory: Path,
    *,
    vocab_size: int,
    vocab_file: Path | None = None,
    merges_file: Path | None = None,
    progress: Progress = silent,
    workers: int = 1,
) -> Prepared:
    """Build what a config asks for as `<directory>/corpus`, unless it is there.

    Args:
        text: `auto` for the prose that Python carries, or files.

    Raises:
        DataError: the input is not good.
    """
    if isinstance(text, str):
        source: Files | Corpus = Corpus()
    else:
        source = Files(text)
    chosen = Vocabulary(vocab_size, vocab_file, merges_file)
    return build(source, directory / "corpus", chosen, workers=workers, progress=progress)


def _found(prefix: Path, mark: str) -> Prepared | None:
    """The dataset, if it is there, was made of the same, and is whole."""
    try:
        described = json.loads(Path(f"{prefix}.json").read_text())
        if described["mark"] != mark:
            return None
        data = IndexedDataset(prefix)
        tokenizer.load(Path(f"{prefix}.tokenizer.json"))
    except (OSError, ValueError, KeyError, DataError):
        return None
    if len(data.tokens) != described["tokens"]:
        return None
    return Prepared(prefix, Path(f"{prefix}.tokenizer.json"), described["vocab_size"], len(data), len(data.tokens), reused=True)


def _tokenizer(source: Files | Corpus, vocabulary: Vocabulary, progress: Progress) -> Tokenizer:
    if vocabulary.vocab_file is not None and vocabulary.merges_file is not None:
        return tokenizer.from_gpt2(vocabulary.vocab_file, vocabulary.merges_file)

    def texts() -> Iterator[str]:
        used = 0
        for text, _, done in source.pieces():
            progress("training the tokenizer", done, source.bytes)
            yield text
            used += len(text)
            if used >= TRAINING_CHARS:
                return

    return tokenizer.train(texts(), vocabulary.size)


# -- several processes -------------------------------------------------------------------------------------------------

_own: Tokenizer | None = None  # of a worker process


def _start_worker(serialized: str) -> None:
    global _own
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the process that started this one
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # these processes are the parallelism
    _own = Tokenizer.from_str(serialized)


def _encode_in_worker(batch: list[Piece]) -> list[tuple[list[int], bool, int]]:
    assert _own is not None
    return _encode(_own, batch)


def _encode(chosen: Tokenizer, batch: list[Piece]) -> list[tuple[list[int], bool, int]]:
    encoded = chosen.encode_batch([text for text, _, _ in batch], add_special_tokens=False)
    return [(each.ids, ends, done) for each, (_, ends, done) in zip(encoded, batch, strict=True)]


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece[0])
        if size >= BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _tokenized(pieces: Iterable[Piece], chosen: Tokenizer, workers: int) -> Iterator[tuple[list[int], bool, int]]:
    """Tokens of each piece, in order. At most a few batches per worker are in flight, however large the input."""
    if workers <= 1:
        for batch in _batches(pieces):
            yield from _encode(chosen, batch)
        return
    with multiprocessing.get_context("spawn").Pool(workers, _start_worker, (chosen.to_str(),)) as pool:
        batches = _batches(pieces)
        flying = [pool.apply_async(_encode_in_worker, (batch,)) for batch in islice(batches, 2 * workers)]
        while flying:
            yield from flying.pop(0).get()
            flying += [pool.apply_async(_encode_in_worker, (batch,)) for batch in islice(batches, 1)]


@contextmanager
def _locked(prefix: Path) -> Iterator[None]:
    """One builder per prefix at a time; the lock falls with its process."""
    fd = os.open(f"{prefix}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        for left in prefix.parent.glob(f"{prefix.name}.*.new*"):
            left.unlink(missing_ok=True)  # of a builder that was killed
        yield
    finally:
        os.close(fd)


def _write(path: Path, text: str) -> None:
    new = path.with_name(f"{path.name}.new{os.getpid()}")
    with new.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
