"""What is printed reaches its stream; a stream that does not take it holds nobody up."""

import contextlib
import io
import os
import sys
import threading
import time
from pathlib import Path

from resilient.driver import terminal
from resilient.driver.driver_log import DriverLog
from resilient.driver.terminal import PatientStream

PATIENCE_S = 120.0


def test_text_arrives_whole_and_in_order():
    behind = io.StringIO()
    stream = PatientStream(behind)
    for number in range(1000):
        stream.write(f"{number}\n")
    assert stream.end(PATIENCE_S)
    assert behind.getvalue() == "".join(f"{number}\n" for number in range(1000))


def test_a_stream_that_does_not_take_it_holds_nobody_up_and_the_oldest_text_is_left_out(monkeypatch):
    monkeypatch.setattr(terminal, "KEPT_CHARACTERS", 1000)
    reading, writing = os.pipe()
    _fill(writing)
    with os.fdopen(reading, "rb", buffering=0) as reader, os.fdopen(writing, "w") as writer:
        stream = PatientStream(writer)
        for number in range(100_000):
            stream.write(f"{number:08}\n")
        assert not stream.drain(0.0)
        received = bytearray()

        def read() -> None:
            while part := reader.read(1 << 16):
                received.extend(part)
                if b"00099999" in part:
                    return

        thread = threading.Thread(target=read)
        thread.start()
        assert stream.end(PATIENCE_S)
        thread.join()
    numbers = [int(line) for line in received.split()]
    assert numbers == sorted(numbers) and numbers[-1] == 99_999 and len(numbers) < 100_000


def _fill(pipe: int) -> None:
    """Line feeds, until the pipe takes no more: whoever writes next waits, whatever its thread had time for before."""
    os.set_blocking(pipe, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(pipe, b"\n")
    os.set_blocking(pipe, True)


def test_a_stream_whose_reader_has_gone_ends_nothing():
    reading, writing = os.pipe()
    os.close(reading)
    writer = os.fdopen(writing, "w")  # closing it fails as well
    told: list[str] = []
    stream = PatientStream(writer, told.append)
    stream.write("x")
    assert stream.end(PATIENCE_S)
    assert stream.gone and told == ["Broken pipe"]
    stream.write("y")
    assert told == ["Broken pipe"]
    writer.close()  # nothing is left in it that would fail now


def test_a_full_disk_is_said_once_and_so_is_that_there_is_room_again(tmp_path: Path):
    full = Path("/dev/full").open("w")  # noqa: SIM115 - closed below
    told: list[str] = []
    stream = PatientStream(full, told.append)
    for _ in range(3):
        stream.write("x")
        assert stream.drain(PATIENCE_S)
    assert told == ["No space left on device"] and not stream.gone
    room = (tmp_path / "room").open("w")
    os.dup2(room.fileno(), full.fileno())
    stream.write("y")
    assert stream.end(PATIENCE_S)
    assert told[1:] == ["it takes text again"]
    assert (tmp_path / "room").read_text() == "y"
    room.close()
    full.close()


def test_a_reader_that_takes_nothing_is_said_to():
    reading, writing = os.pipe()
    told: list[str] = []
    with os.fdopen(reading, "rb") as reader, os.fdopen(writing, "w") as writer:
        stream = PatientStream(writer, told.append, slow_s=0.05)
        stream.write("x" * (1 << 17))
        deadline = time.monotonic() + PATIENCE_S
        while not told and time.monotonic() < deadline:
            stream.keeps_up()
        assert told == ["it takes nothing; what does not fit is left out"]
        reader.read(1 << 17)
        assert stream.end(PATIENCE_S)
    assert told[1:] == ["it takes text again"]


def test_a_pipe_that_others_have_made_non_blocking_gets_all():
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with os.fdopen(reading, "rb") as reader, os.fdopen(writing, "w") as writer:
        stream = PatientStream(writer)
        stream.write("x" * (1 << 18))
        assert reader.read(1 << 18) == b"x" * (1 << 18)
        assert stream.end(PATIENCE_S)


def test_a_stream_that_was_closed_before_takes_everything():
    told: list[str] = []
    stream = PatientStream(None, told.append)
    assert stream.write("x") == 1 and stream.end(0.0) and not stream.isatty() and told == ["it is closed"]


def test_standard_streams_are_as_before_when_the_command_is_over(capsys, monkeypatch):
    monkeypatch.setattr(terminal, "PRINT_S", PATIENCE_S)
    before = sys.stdout, sys.stderr
    notes = DriverLog()
    with terminal.patient(notes):
        sys.stdout.write("to standard output\n")
        sys.stderr.write("to standard error\n")
    assert (sys.stdout, sys.stderr) == before
    assert capsys.readouterr() == ("to standard output\n", "to standard error\n")
    assert notes.take() == []
