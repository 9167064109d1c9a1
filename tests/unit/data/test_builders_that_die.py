"""What builders and their tokenizer processes leave when they are killed, or stopped early."""

import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from crash_points import crashing_at
from datasets_of_text import PROSE, SMALL, contents, put
from forked import forked
from soak import soaked

from resilient.config import Config
from resilient.worker import EnvironmentUnusable
from trainer.data import DataError, open_split, pool, tokenizer
from trainer.data.build import Vocabulary, build
from trainer.data.documents import Batch, Files, Piece, batches
from trainer.data.errors import WorkerEndedError
from trainer.sources import refused


def build_and_die(words: Path, prefix: Path, left: int) -> None:
    """In a process of its own, killed at the call number `left` of those that matter."""
    os.fsync, Path.replace, Path.unlink = map(crashing_at(left), (os.fsync, Path.replace, Path.unlink))  # type: ignore[method-assign]
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


def build_and_die_publishing(words: Path, prefix: Path, left: int) -> None:
    """In a process of its own, killed when so many files are in place."""
    Path.replace = crashing_at(left)(Path.replace)  # type: ignore[method-assign]
    build(Files([words]), prefix, SMALL, workers=1)


@pytest.mark.parametrize("left", range(4))
def test_what_a_builder_killed_in_an_empty_place_has_left_is_built_again(tmp_path: Path, left: int) -> None:
    words = put(tmp_path / "words.txt", PROSE * 20)
    builder = forked(build_and_die_publishing, words, tmp_path / "out" / "d", left, daemon=False)
    builder.join()
    assert builder.exitcode == -signal.SIGKILL
    assert len([name for name in contents(tmp_path / "out") if name in ("d.bin", "d.json", "d.tokenizer.json")]) == left
    assert not build(Files([words]), tmp_path / "out" / "d", SMALL, workers=1).reused
    assert sorted(contents(tmp_path / "out")) == ["d.bin", "d.idx", "d.json", "d.tokenizer.json"]


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
    with pytest.raises(WorkerEndedError, match="a tokenizer process ended by signal 9; if memory ran out") as raised:
        list(pool.tokenized(killing(), serialized, np.dtype("<u2"), None, workers=2))
    assert own_workers() == []
    told = refused(Config.model_validate({"data": {"text": "auto"}}), raised.value)
    assert isinstance(told, EnvironmentUnusable), "nothing is wrong with the config"


def test_a_consumer_that_stops_early_leaves_no_worker() -> None:
    serialized = tokenizer.train(["some text"], 300).to_str()
    pieces = (Piece("x", 1, None, b"some text " * 1000, True) for _ in range(1000))
    stream = pool.tokenized(batches(pieces), serialized, np.dtype("<u2"), None, workers=2)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert own_workers() == []
