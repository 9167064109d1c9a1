"""What is printed reaches its stream; a stream that does not take it holds nobody up."""

import contextlib
import io
import os
import threading

from resilient.driver import terminal
from resilient.driver.terminal import PatientStream


def test_text_arrives_whole_and_in_order():
    behind = io.StringIO()
    stream = PatientStream(behind)
    for number in range(1000):
        stream.write(f"{number}\n")
    assert stream.end(20.0)
    assert behind.getvalue() == "".join(f"{number}\n" for number in range(1000))


def test_a_stream_that_does_not_take_it_holds_nobody_up_and_the_oldest_text_is_left_out(monkeypatch):
    monkeypatch.setattr(terminal, "KEPT_CHARACTERS", 1000)
    reading, writing = os.pipe()
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
        assert stream.end(20.0)
        thread.join()
    numbers = [int(line) for line in received.split()]
    assert numbers == sorted(numbers) and numbers[-1] == 99_999 and len(numbers) < 100_000


def test_a_stream_whose_reader_has_gone_ends_nothing():
    reading, writing = os.pipe()
    os.close(reading)
    writer = os.fdopen(writing, "w")  # closing it fails as well
    stream = PatientStream(writer)
    stream.write("x")
    assert stream.end(20.0)
    with contextlib.suppress(BrokenPipeError):
        writer.close()
