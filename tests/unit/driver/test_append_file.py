"""Appending lines to a file that takes only a part of them: whole, once, in order."""

import subprocess
import sys
from collections import Counter, deque
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from resilient.ledger import AppendFile, missing

LIMITED = """
import random, resource, signal, sys
from collections import deque
from pathlib import Path
from resilient.ledger import AppendFile

path, chance = Path(sys.argv[1]), random.Random(sys.argv[2])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
file, number, lines, failures = AppendFile(path), 0, deque(), 0
while number < 400 or lines:
    for _ in range(chance.randrange(1, 20)):
        if number < 400:
            lines.append(f"line {number} {'x' * chance.randrange(200)}\\n".encode())
            number += 1
    limit = path.stat().st_size + chance.choice([0, 1, 7, 100, 5000]) if chance.random() < 0.7 else 1 << 20
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        file.append(lines)
    except OSError:
        failures += 1
        text = path.read_bytes()
        assert not text or text.endswith(b"\\n"), text[-50:]
    if chance.random() < 0.1:
        file.close()
        file = AppendFile(path)
print(failures)
"""


def test_a_file_that_takes_only_a_part_keeps_whole_lines_in_order(tmp_path: Path):
    for seed in range(5):
        path = tmp_path / f"{seed}.jsonl"
        done = subprocess.run(
            [sys.executable, "-c", LIMITED, str(path), str(seed)], check=True, capture_output=True, text=True, timeout=300
        )
        assert int(done.stdout) > 10
        assert [int(line.split()[1]) for line in path.read_text().splitlines()] == list(range(400))


def test_what_is_in_the_file_already_is_not_written_again_by_the_next_writer(tmp_path: Path):
    path = tmp_path / "x.jsonl"
    lines = [f"{number}\n".encode() * 1 for number in range(100, 150)]
    data = b"".join(lines)
    for cut in (0, 1, 4, 5, 37, len(data) - 1, len(data)):
        path.write_bytes(b"earlier\n" + data[:cut])
        file = AppendFile(path)
        file.append(deque(lines))
        file.close()
        assert path.read_bytes() == b"earlier\n" + data


def test_a_file_that_is_missing_is_an_error_where_it_must_not_be_made(tmp_path: Path):
    path = tmp_path / "x.jsonl"
    file = AppendFile(path)
    file.append(deque([b"1\n"]))
    path.unlink()
    file.unsettle()
    pending = deque([b"2\n"])
    try:
        file.append(pending)
        raise AssertionError("it was made anew")
    except FileNotFoundError:
        assert list(pending) == [b"2\n"] and not path.exists()
    path.write_bytes(b"1\n")
    file.append(pending)
    assert path.read_bytes() == b"1\n2\n"


def test_lines_that_others_append_meanwhile_are_left_alone(tmp_path: Path):
    path = tmp_path / "x.jsonl"
    file = AppendFile(path)
    file.append(deque([b"1\n"]))
    with path.open("ab") as other:
        other.write(b"theirs\n")
    file.append(deque([b"2\n"]))
    file.unsettle()
    with path.open("ab") as other:
        other.write(b"their other\n")
    file.append(deque([b"3\n"]))
    assert path.read_bytes() == b"1\ntheirs\n2\ntheir other\n3\n"


@given(
    earlier=st.lists(st.integers(0, 9)),
    lines=st.lists(st.integers(0, 9), max_size=8),
    written=st.integers(0, 8),
    cut=st.integers(0, 3),
)
def test_of_the_lines_those_are_missing_that_are_not_in_the_tail(earlier: list[int], lines: list[int], written: int, cut: int):
    pending = [f"{number}{number}x{index}\n".encode() for index, number in enumerate(lines)]
    before = b"".join(f"{number}\n".encode() for number in earlier)
    tail = before + b"".join(pending[:written])
    if written < len(pending):
        tail += pending[written][:cut]
    keep, left, cut_short = missing(tail, pending)
    assert left == pending[written:] and not cut_short
    assert tail[:keep] == before + b"".join(pending[:written])
    assert Counter(left) + Counter(pending[:written]) == Counter(pending)
