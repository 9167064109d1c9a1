"""The output of ranks on its way to the node's log: real pipes, and files that cannot be written."""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resilient.agent import logs
from resilient.agent.logs import NodeOutput, RankOutput
from resilient.driver.lease import LOCK

PATIENCE_S = 120.0
LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} \[rank (\d+)\] (.*)")


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def output() -> Iterator[NodeOutput]:
    with NodeOutput() as made:
        yield made


class Rank:
    """Prints to a pipe as a rank does."""

    def __init__(self, output: NodeOutput, directory: Path, number: int = 3, log: Path | None = None) -> None:
        self.log = log or directory / "logs" / "g1" / "node0.log"
        self.output, self.read = output, output.open(number, directory / f"rank{number}.output", self.log)
        self.fd = os.open(self.read.pipe, os.O_WRONLY)

    def print(self, text: str | bytes) -> None:
        data = text.encode() if isinstance(text, str) else text
        while data:
            data = data[os.write(self.fd, data) :]

    def end(self) -> None:
        os.close(self.fd)
        self.output.end(self.read)


def last_words(read: RankOutput) -> str:
    wait_for(lambda: read.over)
    return read.tail()


def texts(log: Path) -> list[tuple[int, str]]:
    """Rank and text of each line; every line has both."""
    found = []
    for line in log.read_bytes().decode(errors="replace").split("\n")[:-1]:
        match = LINE.fullmatch(line)
        assert match is not None, line
        found.append((int(match[1]), match[2]))
    return found


def lines_of(rank: Rank, count: int) -> list[str]:
    wait_for(lambda: rank.log.exists() and rank.log.read_bytes().count(b"\n") >= count)
    return [text for _, text in texts(rank.log)]


def test_every_line_has_its_time_and_its_rank(output: NodeOutput, tmp_path: Path):
    ranks = [Rank(output, tmp_path, number) for number in (3, 12)]
    for number in range(200):
        for rank in ranks:
            rank.print(f"line {number}\n")
    for rank in ranks:
        rank.end()
        assert last_words(rank.read).endswith("line 198\nline 199\n")
    assert output.flush(PATIENCE_S)
    found = texts(ranks[0].log)
    for rank in (3, 12):
        assert [text for number, text in found if number == rank] == [f"line {number}" for number in range(200)]
    assert not ranks[0].read.pipe.exists()


def test_what_a_process_printed_last_before_it_was_killed_is_there(output: NodeOutput, tmp_path: Path):
    read = output.open(0, tmp_path / "pipe", tmp_path / "log")
    code = "import os, sys; print('first'); print('last', end='', flush=True); os.kill(os.getpid(), 9)"
    with read.pipe.open("wb") as pipe:
        assert subprocess.run([sys.executable, "-c", code], stdout=pipe, check=False).returncode == -9
    output.end(read)
    assert last_words(read) == "first\nlast"
    assert output.flush(PATIENCE_S)
    assert [text for _, text in texts(tmp_path / "log")] == ["first", "last"]


def test_a_line_without_an_end_is_written_when_nothing_more_comes(output: NodeOutput, tmp_path: Path):
    rank = Rank(output, tmp_path)
    rank.print("loading ... ")
    assert lines_of(rank, 1) == ["loading ... "]
    rank.print("done\n")
    assert lines_of(rank, 2) == ["loading ... ", "done"]
    rank.end()


def test_long_lines_progress_bars_and_bytes_that_are_no_text_are_lines_too(
    output: NodeOutput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(logs, "PARTIAL_S", PATIENCE_S)  # or a pause between the prints would end a line
    rank = Rank(output, tmp_path)
    long = "x" * (3 * logs.LINE_BYTES) + "y"
    rank.print(f"{long}\n\r 10 %\r")
    first = [*["x" * logs.LINE_BYTES] * 3, "y", ""]
    assert lines_of(rank, 5) == first
    rank.print("\n 20 %\r\n\n")
    rank.print(b"\xff\x00\xfe\n")
    rank.end()
    assert lines_of(rank, 9) == [*first, " 10 %", " 20 %", "", "\ufffd\x00\ufffd"]


def test_only_the_end_of_what_a_rank_printed_is_kept_in_memory(output: NodeOutput, tmp_path: Path):
    rank = Rank(output, tmp_path)
    rank.print("a" * 100_000 + "\n" + "b" * (logs.TAIL_BYTES - 1) + "\n")
    rank.end()
    assert last_words(rank.read) == "b" * (logs.TAIL_BYTES - 1) + "\n"


def test_a_child_that_holds_the_pipe_keeps_nobody(output: NodeOutput, tmp_path: Path):
    rank = Rank(output, tmp_path)
    rank.print("mine\n")
    held = os.dup(rank.fd)
    rank.end()
    wait_for(lambda: not rank.read.pipe.exists())  # given up
    assert rank.read.tail() == "mine\n"
    os.close(held)


def test_what_a_rank_printed_last_is_there_although_it_is_read_late(
    output: NodeOutput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As where the thread that reads gets no core for a second."""
    monkeypatch.setattr(logs, "ORPHAN_S", 0.0)
    monkeypatch.setattr(logs, "READ_BYTES", 1 << 10)
    rank = Rank(output, tmp_path)
    held = os.dup(rank.fd)  # so the pipe has no end that could be waited for
    go_on, put = threading.Event(), output._writer.put
    monkeypatch.setattr(output._writer, "put", lambda *lines: (go_on.wait(PATIENCE_S), put(*lines)))
    rank.print("first\n")
    wait_for(lambda: rank.read.tail() == "first\n")
    rank.print("".join(f"line {number}\n" for number in range(1000)))
    rank.end()
    go_on.set()
    assert last_words(rank.read).endswith("line 998\nline 999\n")
    assert lines_of(rank, 1001) == ["first", *(f"line {number}" for number in range(1000))]
    os.close(held)


def test_what_is_left_at_a_ranks_end_is_read_without_waiting_for_a_child_that_goes_on_printing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    read = RankOutput(0, tmp_path / "pipe", tmp_path / "log")
    fd = os.open(read.pipe, os.O_WRONLY)
    read_once, lines = read.read, iter([b"line\n"] * 1000)

    def read_and_have_it_print() -> tuple[list[bytes], bool]:
        found = read_once()
        os.write(fd, next(lines, b""))
        return found

    monkeypatch.setattr(read, "read", read_and_have_it_print)
    os.write(fd, next(lines))
    assert read.left()
    assert next(lines, None) is not None
    os.close(fd)
    read.close()


def test_lines_that_come_late_are_in_the_log_of_their_own_generation(output: NodeOutput, tmp_path: Path):
    old, new = (Rank(output, tmp_path, number, tmp_path / f"g{number}" / "node0.log") for number in (1, 2))
    new.print("new\n")
    assert lines_of(new, 1) == ["new"]
    old.print("late\n")
    assert lines_of(old, 1) == ["late"]
    for rank in (old, new):
        rank.end()
    assert lines_of(new, 1) == ["new"]


@pytest.fixture
def stalled(tmp_path: Path) -> Iterator[tuple[Path, Callable[[], bytes]]]:
    """A log that takes nothing, since it is a pipe that nobody reads, and what reads it to its end."""
    path = tmp_path / "stalled"
    os.mkfifo(path)
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # or its opening alone would wait

    def read() -> bytes:
        try:
            return os.read(fd, 1 << 20)
        except BlockingIOError:
            return b""

    yield path, read
    os.close(fd)


def test_a_log_that_takes_nothing_does_not_stop_a_rank_and_says_afterwards_what_is_missing(
    tmp_path: Path, stalled: tuple[Path, Callable[[], bytes]]
):
    log, read = stalled
    with NodeOutput() as output:
        rank = Rank(output, tmp_path, log=log)
        count = 3 * logs.BUFFER_BYTES // 100
        for number in range(count):  # would hang here
            rank.print(f"{number:0100}\n")
        rank.end()
        assert last_words(rank.read).endswith(f"{count - 1:0100}\n")
        assert not output.flush(0.0)
        data = b""
        while not output.flush(0.01):
            data += read()
        while more := read():
            data += more
    lines = data.decode().splitlines()
    (gap,) = [index for index, line in enumerate(lines) if "dropped while the log could not be written" in line]
    dropped = int(lines[gap].split("... ")[1].split()[0])
    written = [int(match[2]) for line in lines if (match := LINE.fullmatch(line))]
    assert written == [*range(gap), *range(gap + dropped, count)]
    assert sum(map(len, lines[gap:])) > logs.BUFFER_BYTES // 2


def test_a_rank_and_the_end_of_an_agent_wait_for_no_log_that_stays_stalled(
    tmp_path: Path, stalled: tuple[Path, Callable[[], bytes]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(logs, "CLOSE_S", 0.1)
    with NodeOutput() as output:
        rank = Rank(output, tmp_path, log=stalled[0])
        for _ in range(1000):
            rank.print("x" * 1000 + "\n")
        rank.end()
        assert last_words(rank.read).endswith("x\n")
    assert stalled[1]()


def printing(output: NodeOutput, log: Path, text: str, then: str = "") -> "subprocess.Popen[bytes]":
    """A process that is no rank, whose output is passed on."""
    reading, writing = os.pipe()
    code = f"import sys\nsys.stderr.write(sys.argv[1])\nsys.stderr.flush()\n{then}"
    process = subprocess.Popen([sys.executable, "-c", code, text], stdin=subprocess.PIPE, stderr=writing)
    os.close(writing)
    output.pass_on(reading, log)
    return process


def test_what_other_processes_print_is_passed_on_as_it_is_with_the_last_words(output: NodeOutput, tmp_path: Path):
    with printing(output, tmp_path / "log", "first\nlast", "import os; os.kill(os.getpid(), 9)") as process:
        assert process.wait() == -9
    wait_for(lambda: (tmp_path / "log").exists() and (tmp_path / "log").read_text() == "first\nlast\n")


def test_other_processes_are_read_after_the_ends_of_all_ranks_and_hold_up_no_end(tmp_path: Path):
    log, then = tmp_path / "log", "input(); sys.stderr.write('last'); sys.stderr.flush(); input()"
    with NodeOutput() as output:
        process = printing(output, log, "first\n", then)
        assert process.stdin is not None
        output.end_all()
        wait_for(lambda: output.over)
        process.stdin.write(b"go on\n")
        process.stdin.flush()
        wait_for(lambda: log.exists() and log.read_text() == "first\nlast\n")
    assert process.poll() is None
    process.communicate(b"\n")


def test_a_log_that_takes_nothing_stops_no_other_process(tmp_path: Path, stalled: tuple[Path, Callable[[], bytes]]):
    with NodeOutput() as output:
        with printing(output, stalled[0], "", "for _ in range(100): print('x' * 10_000, file=sys.stderr)") as process:
            assert process.wait(PATIENCE_S) == 0
        while not output.flush(0.01):
            stalled[1]()


def test_a_directory_that_cannot_be_written_is_tried_again(output: NodeOutput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logs, "RETRY_S", 0.01)
    (tmp_path / "logs").write_text("a file where a directory should be")
    rank = Rank(output, tmp_path)
    rank.print("kept\n")
    rank.end()
    assert last_words(rank.read) == "kept\n"
    assert not output.flush(0.1)
    (tmp_path / "logs").unlink()
    assert output.flush(PATIENCE_S)
    assert lines_of(rank, 1) == ["kept"]


@pytest.mark.parametrize("gone", ["moved", "unmounted"])
def test_a_run_directory_that_is_gone_is_not_made_anew_for_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: str):
    monkeypatch.setattr(logs, "RETRY_S", 0.01)
    run_dir, elsewhere = tmp_path / "runs" / "gpt", tmp_path / "elsewhere"
    run_dir.mkdir(parents=True)
    (run_dir / LOCK).touch()
    with NodeOutput(run_dir) as output:
        before = Rank(output, tmp_path, number=1, log=run_dir / "logs/g1/node0.log")
        before.print("before\n")
        assert lines_of(before, 1) == ["before"]
        run_dir.rename(elsewhere)
        if gone == "unmounted":
            run_dir.mkdir()  # the mount point
        rank = Rank(output, tmp_path, number=2, log=run_dir / "logs/g2/node0.log")
        rank.print("kept\n")
        rank.end()
        assert last_words(rank.read) == "kept\n"
        assert not output.flush(0.2)
        assert run_dir.exists() is (gone == "unmounted") and not (run_dir / "logs").exists()
        if gone == "unmounted":
            run_dir.rmdir()
        elsewhere.rename(run_dir)
        assert output.flush(PATIENCE_S)
        assert lines_of(rank, 1) == ["kept"]
        before.end()


def test_a_pipe_that_a_killed_agent_left_is_made_anew(tmp_path: Path):
    (tmp_path / "pipe").write_text("of another one")
    read = RankOutput(0, tmp_path / "pipe", tmp_path / "log")
    assert read.pipe.is_fifo()
    read.close()
