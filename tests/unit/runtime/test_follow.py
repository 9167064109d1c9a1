"""What is appended to a file is seen once and whole, also where the file is moved aside or begun later."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.exits import EnvironmentUnusable
from resilient.follow import Tail, _text, follow


def test_lines_are_seen_once_and_whole(tmp_path: Path):
    path = tmp_path / "file"
    path.write_text("before\n")
    tail = Tail(path)
    assert list(tail.lines()) == []
    with path.open("a") as file:
        file.write("one\ntw")
        file.flush()
        assert list(tail.lines()) == [b"one"]
        file.write("o\n")
    assert list(tail.lines()) == [b"two"]
    assert list(tail.lines()) == []
    tail.close()


def test_a_file_that_is_not_there_yet_is_read_from_its_beginning(tmp_path: Path):
    tail = Tail(tmp_path / "file")
    assert list(tail.lines()) == []
    (tmp_path / "file").write_text("one\n")
    assert list(tail.lines()) == [b"one"]
    tail.close()


def test_some_of_what_was_there_is_shown_by_whole_lines(tmp_path: Path):
    path = tmp_path / "file"
    path.write_text("".join(f"line {number}\n" for number in range(10)))
    for back_bytes, first in ((14, 8), (13, 9), (8, 9), (7, 9), (1000, 0)):
        tail = Tail(path, back_bytes)
        assert list(tail.lines()) == [b"line %d" % number for number in range(first, 10)], back_bytes
        tail.close()


def test_a_file_that_is_moved_aside_is_read_to_its_end_and_then_the_new_one(tmp_path: Path):
    path = tmp_path / "file"
    path.write_text("")
    tail = Tail(path)
    with path.open("a") as file:
        file.write("one\n")
    path.rename(tmp_path / "file.1")
    path.write_text("two\n")
    assert list(tail.lines()) == [b"one", b"two"]
    tail.close()


@given(st.lists(st.sampled_from(["write", "rest", "move", "look"]), max_size=40))
def test_whatever_the_order_nothing_is_missed_and_nothing_comes_twice(tmp_path_factory: pytest.TempPathFactory, acts: list[str]):
    path = tmp_path_factory.mktemp("tail") / "file"
    path.write_text("")
    tail, written, seen, open_ = Tail(path), [], [], ""
    for number, act in enumerate(acts):
        with path.open("a") as file:
            if act == "write" and not open_:
                file.write(f"{number}")
                open_ = f"{number}"
            elif act == "rest" and open_:
                file.write(f"-{number}\n")
                written.append(f"{open_}-{number}".encode())
                open_ = ""
        if act == "move" and not open_ and not path.with_name(f"old{number}").exists():
            list_now = list(tail.lines())  # one that looks at least once between two moves
            seen += list_now
            path.rename(path.with_name(f"old{number}"))
            path.write_text("")
        elif act == "look":
            seen += tail.lines()
    assert seen + list(tail.lines()) == written
    tail.close()


def test_what_a_terminal_would_act_upon_is_not_shown():
    assert _text(b"a\x1b[2Jb\x07c\xff") == "a\ufffd[2Jb\ufffdc\ufffd"


def test_a_directory_that_is_no_campaign_is_said_to_be_none(tmp_path: Path):
    with pytest.raises(EnvironmentUnusable, match="not a run directory"):
        follow(tmp_path)
