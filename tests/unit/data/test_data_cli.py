"""`resilient data build`, as a process."""

import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from soak import soaked, soaked_after

from trainer.data.indexed import IndexedDataset

COMMAND = [sys.executable, "-c", "from trainer.data.cli import app; app(prog_name='resilient data')", "build"]
PROSE = "The order is a pure function of seed, epoch and index. Nothing is stored; nothing is lost.\n"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, check=False)


@pytest.fixture
def words(tmp_path: Path) -> Path:
    (tmp_path / "words.txt").write_text(PROSE * 20)
    return tmp_path / "words.txt"


def test_a_dataset_is_built_then_found(tmp_path: Path, words: Path) -> None:
    options = (words, "--output", tmp_path / "out/d", "--vocab-size", 300)
    first = run(*options)
    assert first.returncode == 0
    assert re.fullmatch(r".*/out/d: built: 1 documents, [\d,]+ tokens, vocabulary 300\n", first.stdout)
    assert [line.split(":")[0] for line in first.stderr.splitlines()] == [
        "reading the text",
        "training the tokenizer",
        "tokenizing",
    ]
    again = run(*options)
    assert again.returncode == 0
    assert "is there already: 1 documents" in again.stdout
    assert again.stderr == ""
    assert "d: built:" in run(*options, "--force").stdout
    assert len(IndexedDataset(tmp_path / "out/d")) == 1


def test_the_end_of_text_token_can_be_left_out(tmp_path: Path, words: Path) -> None:
    run(words, "--output", tmp_path / "with", "--vocab-size", 300, "--workers", 1)
    run(words, "--output", tmp_path / "without", "--vocab-size", 300, "--workers", 1, "--no-append-eod")
    sizes = [len(IndexedDataset(tmp_path / name).tokens) for name in ("with", "without")]
    assert sizes[0] == sizes[1] + 1


BAD = {
    "missing input": (["none.txt", "--output", "out/d"], "there is no file none.txt"),
    "a directory": ([".", "--output", "out/d"], "is not a file"),
    "not text": (["bad.txt", "--output", "out/d"], "bad.txt:1 is not UTF-8 text"),
    "not JSON": (["bad.jsonl", "--output", "out/d"], "bad.jsonl:2 is not JSON"),
    "another key": (["good.jsonl", "--output", "out/d", "--json-key", "body"], "good.jsonl:1 has no key 'body', only 'text'"),
    "a tiny vocabulary": (["words.txt", "--output", "out/d", "--vocab-size", "99"], "a vocabulary of 99 is too small"),
    "half a tokenizer": (["words.txt", "--output", "out/d", "--vocab-file", "v.json"], "give both vocab_file and merges_file"),
    "a missing tokenizer": (
        ["words.txt", "--output", "out/d", "--vocab-file", "v.json", "--merges-file", "m.txt"],
        "v.json cannot be read: No such file",
    ),
    "no tokenizer": (["words.txt", "--output", "out/d", "--vocab-file", "bad.jsonl", "--merges-file", "words.txt"], "is not JSON"),
}


@pytest.mark.parametrize("bad", soaked_after(3, BAD))
def test_bad_input_is_one_message_and_exit_78(tmp_path: Path, words: Path, bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "good.jsonl").write_text('{"text": "x"}\n')
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\nnonsense\n')
    arguments, said = BAD[bad]
    done = run(*arguments)
    assert done.returncode == 78
    last = done.stderr.splitlines()[-1]
    assert last.startswith("resilient: ") and said in last
    assert "Traceback" not in done.stderr and done.stdout == ""
    assert not list((tmp_path / "out").glob("*"))


def test_an_input_that_the_dataset_would_take_the_place_of_is_one_message_and_exit_78(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.json"
    corpus.write_text('{"text": "x"}\n')
    done = run(corpus, "--output", tmp_path / "corpus", "--force")
    assert (done.returncode, done.stdout) == (78, "")
    assert done.stderr == f"resilient: {corpus} is an input, and would be written over; choose another place\n"
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.json"] and corpus.read_text() == '{"text": "x"}\n'


def test_a_place_that_cannot_be_written_is_one_message_and_exit_69(words: Path) -> None:
    done = run(words, "--output", words / "d")
    assert done.returncode == 69
    assert done.stderr.startswith("resilient: cannot write")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [("{spoilt}",), ("{words}", "--vocab-file", "{spoilt}", "--merges-file", "{words}")], ids=str)
def test_a_file_that_cannot_be_read_for_an_error_of_its_disk_is_one_message_and_exit_69(
    tmp_path: Path, words: Path, arguments: tuple[str, ...]
) -> None:
    spoilt = "/proc/self/mem"  # its first bytes are an input/output error
    done = run(*(each.format(spoilt=spoilt, words=words) for each in arguments), "--output", tmp_path / "d")
    assert done.returncode == 69
    assert done.stderr.splitlines()[-1].startswith(f"resilient: {spoilt} cannot be read: Input/output error")
    assert "Traceback" not in done.stderr


@pytest.fixture
def much(tmp_path: Path) -> Path:
    """Enough text that a build does not end by itself while a test looks at it."""
    lines = [f"{number} {PROSE.split('.')[number % 2]} {number * 7919 % 100_003}\n" for number in range(100_000)]
    (tmp_path / "much.txt").write_text("".join(lines))
    return tmp_path / "much.txt"


TRAINING, TOKENIZING = "training the tokenizer", "tokenizing"


@pytest.mark.parametrize(
    ("sent", "code", "stage"),
    soaked_after(
        1,
        [
            (signal.SIGINT, 130, TRAINING),
            (signal.SIGTERM, 143, TRAINING),
            (signal.SIGKILL, -9, TOKENIZING),
            soaked(signal.SIGINT, 130, TOKENIZING),
            soaked(signal.SIGTERM, 143, TOKENIZING),
            soaked(signal.SIGKILL, -9, TRAINING),
        ],
    ),
)
def test_a_build_that_is_stopped_leaves_no_process_and_nothing_taken_for_good(
    tmp_path: Path, much: Path, sent: signal.Signals, code: int, stage: str
) -> None:
    command = [*COMMAND, str(much), "--output", str(tmp_path / "out/d"), "--vocab-size", "300", "--workers", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stderr is not None
        while not (line := process.stderr.readline()).startswith(stage):
            assert line
        running: list[psutil.Process] = []
        while len(running) < (1 if stage.startswith("training") else 2):
            assert process.poll() is None
            running = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, sent)  # as a terminal does
        rest = process.stderr.read()
        assert process.wait(120) == code
    assert psutil.wait_procs(running, timeout=120)[1] == []
    assert "Traceback" not in rest
    if sent is not signal.SIGKILL:
        assert list((tmp_path / "out").iterdir()) == []
    assert not (tmp_path / "out/d.idx").exists()
    much.write_text(PROSE * 20)
    assert run(*command[len(COMMAND) :]).returncode == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["d.bin", "d.idx", "d.json", "d.tokenizer.json"]


def test_on_a_terminal_there_is_a_bar(tmp_path: Path, words: Path) -> None:
    mine, theirs = pty.openpty()
    command = [*COMMAND, str(words), "--output", str(tmp_path / "d"), "--vocab-size", "300"]
    process = subprocess.Popen(
        command, stderr=theirs, stdout=subprocess.DEVNULL, env={**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    )
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(mine, 65536):
            shown += part
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(mine)
    assert process.wait() == 0
    assert b"tokenizing, 1 documents" in shown
    assert "━".encode() in shown
