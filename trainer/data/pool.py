"""Worker processes that tokenize batches, and train a tokenizer; results come in the order of the batches.

Owns these processes. A worker reads requests from its standard input and ends when that ends, so none outlives the process that
started it, however that one dies; and a worker that dies is an error, never a wait. They run in a session of their own: Ctrl-C at a
terminal reaches their owner alone, which ends them.
"""

import os
import pickle
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from trainer.data import tokenizer
from trainer.data.documents import Batch, text_of
from trainer.data.errors import DataError, WorkerEndedError

_CUT_OFF = (EOFError, pickle.UnpicklingError)  # the other side is gone, between two messages or in one
_ROOT = Path(__file__).parents[2]  # of the packages


class Tokenized(NamedTuple):
    """A batch in tokens."""

    tokens: np.ndarray[Any, Any]  # (tokens,), of all pieces one after the other
    pieces: list[tuple[int, bool]]  # tokens of each, and whether it ends a document
    raw_bytes: int  # that were read for it


class _Worker:
    """One process. Whoever starts it ends it."""

    def __init__(self, threads: int) -> None:
        path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", "from trainer.data.pool import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={
                **os.environ,
                "PYTHONPATH": path,
                "RAYON_NUM_THREADS": str(threads),
                "TOKENIZERS_PARALLELISM": "true" if threads > 1 else "false",
                "OPENBLAS_NUM_THREADS": "1",
            },
        )

    def send(self, request: object) -> None:
        assert self._process.stdin is not None
        try:
            pickle.dump(request, self._process.stdin)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._dead() from None

    def hear(self) -> Any:
        assert self._process.stdout is not None
        try:
            done, answer = pickle.load(self._process.stdout)
        except _CUT_OFF:
            raise self._dead() from None
        if not done:
            raise DataError(answer)
        return answer

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """Kill it and wait until it is gone."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # what it has not read any more
                pipe.close()

    def __enter__(self) -> "_Worker":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _dead(self) -> WorkerEndedError:
        status = self._process.wait()
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        return WorkerEndedError(f"a tokenizer process ended {how}; if memory ran out, use fewer workers or shorter documents")


def trained(source: Iterable[Batch], vocab_size: int, *, threads: int) -> str:
    """Train a tokenizer on these batches; returns it as JSON.

    Raises:
        DataError: a batch is not text.
    """
    with _Worker(threads) as worker:
        worker.send(("train", vocab_size))
        for batch in source:
            worker.send(batch)
        worker.send(None)
        answer: str = worker.hear()
        return answer


def tokenized(
    source: Iterable[Batch], serialized: str, dtype: np.dtype[Any], closing: int | None, *, workers: int
) -> Iterator[Tokenized]:
    """The tokens of each batch, in order, at most two batches per worker in flight.

    Args:
        serialized: the tokenizer, as JSON.
        dtype: of the tokens.
        closing: token put at the end of each document, if any.

    Raises:
        DataError: a batch is not text.
    """
    idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()

    def ask(batch: Batch) -> Tokenized:
        worker = idle.get()
        try:
            worker.send(batch)
            tokens, pieces = worker.hear()
        finally:
            idle.put(worker)
        return Tokenized(np.frombuffer(tokens, dtype), pieces, sum(len(piece.raw) for piece in batch))

    with ExitStack() as stack:
        running = [stack.enter_context(_Worker(1)) for _ in range(workers)]
        for worker in running:
            worker.send(("tokenize", serialized, dtype.str, closing))
            idle.put(worker)
        threads = ThreadPoolExecutor(workers, thread_name_prefix="tokenize")
        stack.callback(threads.shutdown, cancel_futures=True)
        stack.callback(_kill, running)  # first of all, so that every thread that waits for a worker returns
        flying: deque[Future[Tokenized]] = deque()
        for batch in source:
            flying.append(threads.submit(ask, batch))
            if len(flying) >= 2 * workers:
                yield flying.popleft().result()
        while flying:
            yield flying.popleft().result()


def _kill(running: Iterable[_Worker]) -> None:
    for worker in running:
        worker.kill()


# -- in the worker -----------------------------------------------------------------------------------------------------


def serve() -> None:
    """Answer requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a stray print must not end up among the answers
    try:
        kind, *given = pickle.load(sys.stdin.buffer)
        if kind == "train":
            _answer(answers, lambda: _train(*given))
        else:
            encode = _encoder(*given)
            for batch in _requests():
                _answer(answers, lambda batch=batch: encode(batch))  # type: ignore[misc]
    except (*_CUT_OFF, BrokenPipeError):
        os._exit(1)  # the owner is gone; nothing is left to flush


def _requests() -> Iterator[Any]:
    while True:
        try:
            yield pickle.load(sys.stdin.buffer)
        except _CUT_OFF:
            return


def _answer(answers: Any, work: Callable[[], object]) -> None:
    try:
        answer = (True, work())
    except DataError as error:
        answer = (False, str(error))
    pickle.dump(answer, answers)
    answers.flush()


def _train(vocab_size: int) -> str:
    problems: list[DataError] = []

    def texts() -> Iterator[str]:
        while (batch := pickle.load(sys.stdin.buffer)) is not None:
            if problems:
                continue
            try:
                yield from [text_of(piece) for piece in batch]
            except DataError as error:  # kept until all is read: the owner is still writing
                problems.append(error)
        threading.Thread(target=_die_with_owner, daemon=True).start()

    made = tokenizer.train(texts(), vocab_size)
    if problems:
        raise problems[0]
    return made.to_str()


def _die_with_owner() -> None:
    """Training goes on for minutes without reading. Nothing is sent in that time, so the input has only its end to tell."""
    os.read(0, 1)
    os._exit(1)


def _encoder(serialized: str, dtype: str, closing: int | None) -> Callable[[Batch], tuple[bytes, list[tuple[int, bool]]]]:
    chosen = tokenizer.from_json(serialized)

    def encode(batch: Batch) -> tuple[bytes, list[tuple[int, bool]]]:
        tokens: list[int] = []
        ends = []
        for piece in batch:
            found = chosen.encode(text_of(piece), add_special_tokens=False).ids
            if piece.ends and found and closing is not None:
                found.append(closing)
            tokens += found
            ends.append((len(found), piece.ends))
        return np.asarray(tokens, dtype).tobytes(), ends

    return encode
