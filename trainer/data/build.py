"""Building a dataset: documents in, tokens out, in order, by several processes; whole or not at all.

`build` takes text and JSONL files, `prepare` what a config asks for. Both leave `<prefix>.bin`, `<prefix>.tokenizer.json`,
`<prefix>.json`, which says what they were made of, and last `<prefix>.idx`, without which nothing of it counts. A second call with
the same inputs finds them and does nothing.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.data import place, tokenizer
from trainer.data.documents import Batch, Corpus, Files, Source, batches
from trainer.data.durable import beside, locked
from trainer.data.errors import DataError, StorageError
from trainer.data.indexed import IndexedDataset, IndexedWriter, bin_path, idx_path, token_type
from trainer.data.pool import tokenized, trained

TRAINING_BYTES = 256 << 20  # of a larger input, batches at even distances train the tokenizer
_FORMAT = 2


@dataclass(frozen=True)
class Progress:
    """How far a build is. `documents` counts only while tokenizing."""

    stage: str
    done_bytes: int
    total_bytes: int
    documents: int = 0


Listener = Callable[[Progress], None]


def silent(progress: Progress) -> None:
    """No progress is shown."""


@dataclass(frozen=True)
class Vocabulary:
    """Which tokenizer: one trained to `size` tokens, or GPT-2's two files."""

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


def build(
    source: Source,
    prefix: Path,
    vocabulary: Vocabulary,
    *,
    workers: int,
    progress: Listener = silent,
    append_eod: bool = True,
    force: bool = False,
) -> Prepared:
    """Build a dataset, unless the same one is there.

    Args:
        prefix: path without suffix; its directory is made.
        workers: processes that tokenize, at least 1.
        append_eod: end each document with the end-of-text token.
        force: build it even if it is there, or if what is there was not built here.

    Raises:
        DataError: the input is not good, or would be written over; what is there was not built here; `prefix` has no name.
        StorageError: the place for the dataset is not.
    """
    if prefix.name in ("", ".."):
        raise DataError(f"{prefix} is a directory, and a prefix has the name of the dataset, too, as {prefix / 'corpus'}")
    prefix = prefix.absolute()
    made_of, *earlier = _made_of(source, vocabulary, append_eod)
    try:
        _must_spare_inputs(prefix, [*source.paths, *filter(None, (vocabulary.vocab_file, vocabulary.merges_file))])
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with locked(prefix.with_name(f".{prefix.name}.lock")):
            if not force:
                found = _found(prefix, [made_of, *earlier])
                if found is not None:
                    return found
                foreign = None if _built_here(prefix) else next((path for path in _targets(prefix) if path.exists()), None)
                if foreign is not None:
                    raise DataError(f"{foreign} is there and was not built here; choose another place, or --force")
            return _built(source, prefix, vocabulary, made_of, workers, progress, append_eod)
    except OSError as error:
        raise StorageError(
            f"cannot write {error.filename or prefix}: {error.strerror}; make room, or choose another place"
        ) from error


def _must_spare_inputs(prefix: Path, inputs: Sequence[Path]) -> None:
    """Nothing that is read is written over. Raises DataError."""
    for target in _targets(prefix):
        for path in (target, beside(target)):
            if path.exists() and any(path.samefile(each) for each in inputs):
                raise DataError(f"{path} is an input, and would be written over; choose another place")


def _made_of(source: Source, vocabulary: Vocabulary, append_eod: bool) -> list[dict[str, Any]]:
    """What a dataset is made of, as JSON; then the same as earlier versions said it. Raises DataError."""
    rest = {"vocabulary": _vocabulary_identity(vocabulary), "append_eod": append_eod}
    return [{"format": _FORMAT, "source": identity, **rest} for identity in source.identities()]


def prepare(
    text: str | Sequence[Path],
    directory: Path,
    *,
    vocab_size: int = 4096,
    vocab_file: Path | None = None,
    merges_file: Path | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    workers: int = 1,
    trained_on: bool = False,
    accepted: bool = False,
) -> Prepared:
    """Build what a config asks for as `<directory>/corpus`, unless it is there. Any number of processes may call it at once.

    Args:
        text: `auto` for the prose that Python carries, or files.
        progress: called with what is done, and bytes done and in all.
        trained_on: there are checkpoints of what is there: it is not replaced.
        accepted: other data may take its place for all that, and is built beside it.

    Raises:
        DataError: the input is not good, or the place for the dataset; or what is there was trained on, and something else is asked
            for.
    """
    source = Corpus() if isinstance(text, str) else Files(text)

    def listener(now: Progress) -> None:
        if progress is not None:
            progress(now.stage, now.done_bytes, now.total_bytes)

    chosen = Vocabulary(vocab_size, vocab_file, merges_file)
    prefix = place.prepared_prefix(directory)
    wanted = _made_of(source, chosen, True)
    if not trained_on or _found(prefix, wanted) is not None or not _is_whole(prefix):
        return build(source, prefix, chosen, workers=workers, progress=listener)
    if not accepted:
        raise DataError(
            f"{prefix} was prepared from other text, or with another tokenizer, and there are checkpoints that were trained on it; "
            "put the text back, go on with --accept data.text, or branch off with `resilient fork`"
        )
    first = directory / place.FIRST
    mark = _sha256(json.dumps(wanted[0], sort_keys=True).encode())
    other = first if _found(first, wanted) is not None else place.beside(directory, mark)
    made = build(source, other, chosen, workers=workers, progress=listener)
    place.use(other)
    return made


def _built(
    source: Source,
    prefix: Path,
    vocabulary: Vocabulary,
    made_of: dict[str, Any],
    workers: int,
    progress: Listener,
    append_eod: bool,
) -> Prepared:
    serialized = _tokenizer(source, vocabulary, workers, progress)
    chosen = tokenizer.from_json(serialized)
    vocab_size = tokenizer.vocabulary_size(chosen)
    closing = chosen.token_to_id(tokenizer.END_OF_TEXT) if append_eod else None
    dtype = token_type(vocab_size)
    total = source.size_bytes
    done = 0
    with IndexedWriter(prefix, dtype) as writer:
        progress(Progress("tokenizing", 0, total))
        for batch in tokenized(batches(source.pieces()), serialized, dtype, closing, workers=workers):
            at = 0
            for count, ends in batch.pieces:
                writer.add(batch.tokens[at : at + count], end=ends)
                at += count
            done += batch.raw_bytes
            progress(Progress("tokenizing", min(done, total), total, writer.documents))
        if writer.tokens == 0:
            raise DataError("there is no text in the input, only empty documents")
        described = {
            "made_of": made_of,
            "vocab_size": vocab_size,
            "documents": writer.documents,
            "tokens": writer.tokens,
            "tokenizer_sha256": _sha256(serialized.encode()),
        }
        progress(Progress("tokenizing", total, total, writer.documents))
        # What says that a build was here comes first: the files of one that is interrupted are then no foreign ones.
        writer.commit({_json_path(prefix): json.dumps(described, indent=1).encode(), _tokenizer_path(prefix): serialized.encode()})
        return Prepared(prefix, _tokenizer_path(prefix), vocab_size, writer.documents, writer.tokens)


def _tokenizer(source: Source, vocabulary: Vocabulary, workers: int, progress: Listener) -> str:
    if vocabulary.vocab_file is not None and vocabulary.merges_file is not None:
        return tokenizer.from_gpt2(vocabulary.vocab_file, vocabulary.merges_file).to_str()
    progress(Progress("reading the text", 0, 0))
    total = source.size_bytes
    stride = max(1, -(-total // TRAINING_BYTES))

    def sampled() -> Iterator[Batch]:
        done = 0
        for number, batch in enumerate(batches(source.pieces())):
            done += sum(len(piece.raw) for piece in batch)
            if number % stride == 0:
                progress(Progress("training the tokenizer", min(done, total), total))
                yield batch

    progress(Progress("training the tokenizer", 0, total))
    return trained(sampled(), vocabulary.size, threads=workers)


def _vocabulary_identity(vocabulary: Vocabulary) -> dict[str, Any]:
    """JSON that changes when the tokenizer would. Raises DataError."""
    files = (vocabulary.vocab_file, vocabulary.merges_file)
    if (files[0] is None) != (files[1] is None):
        raise DataError("a GPT-2 tokenizer is two files: give both vocab_file and merges_file, or neither")
    if files[0] is None:
        if vocabulary.size < tokenizer.SMALLEST_VOCABULARY:
            raise DataError(f"a vocabulary of {vocabulary.size} is too small; at least {tokenizer.SMALLEST_VOCABULARY}")
        return {"trained": vocabulary.size}
    contents = []
    for path in files:
        assert path is not None
        try:
            contents.append(_sha256(path.read_bytes()))
        except OSError as error:
            kind = DataError if isinstance(error, FileNotFoundError) else StorageError
            raise kind(f"{path} cannot be read: {error.strerror}; a GPT-2 tokenizer is a vocab.json and a merges.txt") from error
    return {"gpt2": contents}


def _built_here(prefix: Path) -> bool:
    """Whether a build has written what describes the dataset, be it damaged; however large a file of that name is."""
    try:
        with _json_path(prefix).open("rb") as file:
            return re.match(rb'\{\s*"made_of":', file.read(64)) is not None
    except FileNotFoundError:
        return False


def _is_whole(prefix: Path) -> bool:
    """Whether a dataset that was built here is there, of whatever."""
    try:
        return _found(prefix, [json.loads(_json_path(prefix).read_bytes())["made_of"]]) is not None
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _found(prefix: Path, made_of: Sequence[Any]) -> Prepared | None:
    """The dataset, if it is there, was made of one of these, and is whole."""
    try:
        described = json.loads(_json_path(prefix).read_bytes())
        if described["made_of"] not in made_of or described["tokenizer_sha256"] != _sha256(_tokenizer_path(prefix).read_bytes()):
            return None
        data = IndexedDataset(prefix)
        if (len(data), len(data.tokens)) != (described["documents"], described["tokens"]):
            return None
        return Prepared(prefix, _tokenizer_path(prefix), described["vocab_size"], len(data), len(data.tokens), reused=True)
    except (OSError, ValueError, KeyError, TypeError, DataError):  # what is there is of no use: it is built again
        return None


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _targets(prefix: Path) -> list[Path]:
    """The files of a dataset."""
    return [idx_path(prefix), bin_path(prefix), _tokenizer_path(prefix), _json_path(prefix)]


def _tokenizer_path(prefix: Path) -> Path:
    return Path(f"{prefix}.tokenizer.json")


def _json_path(prefix: Path) -> Path:
    return Path(f"{prefix}.json")
