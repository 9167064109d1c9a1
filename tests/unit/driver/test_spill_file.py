"""The spill file by real files: what is read again after a rewind, and what is left of lines that were cut short."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from volumes import MOUNTS, command

from resilient.driver.spill_file import SpillFile, directories_of, new_directory, take_in
from resilient.protocol.disk import Item

EVENTS = "events.jsonl"


def items(first: int, last: int, size_bytes: int = 0) -> list[Item]:
    return [Item(number, EVENTS, f'{{"step": {number}, "note": "{"x" * size_bytes}"}}\n') for number in range(first, last + 1)]


def numbers(found: list[Item]) -> list[int]:
    return [item.number for item in found]


def read_all(spill: SpillFile, limit_bytes: int = 100) -> list[int]:
    found: list[int] = []
    while more := spill.read(limit_bytes):
        found += numbers(more)
        assert len(found) < 10_000, "it never comes to the end"
    return found


@pytest.fixture
def spill(tmp_path: Path) -> SpillFile:
    return SpillFile(tmp_path / "spill")


def lines_of(run_dir: Path) -> list[int]:

    return [json.loads(line)["step"] for line in (run_dir / EVENTS).read_text().splitlines()]


@pytest.mark.parametrize("limit_bytes", [1, 70, 1 << 20])
def test_after_a_rewind_all_is_read_again_in_order(spill: SpillFile, limit_bytes: int) -> None:
    spill.append(items(1, 5))
    assert numbers(spill.read(70)) == [1]
    spill.rewind()
    assert read_all(spill, limit_bytes) == [1, 2, 3, 4, 5]
    spill.rewind()
    assert read_all(spill, limit_bytes) == [1, 2, 3, 4, 5]


def test_what_is_added_after_a_rewind_comes_after_what_is_read_again(spill: SpillFile) -> None:
    spill.append(items(1, 2))
    assert read_all(spill) == [1, 2]
    spill.rewind()
    spill.append(items(3, 4))
    assert read_all(spill) == [1, 2, 3, 4] and spill.last == 4


def test_a_rewind_of_nothing_reads_nothing_and_a_file_that_was_removed_begins_anew(spill: SpillFile) -> None:
    spill.rewind()
    assert spill.read() == []
    spill.append(items(1, 2))
    spill.remove()
    spill.rewind()
    assert spill.empty and spill.read() == []
    spill.append(items(3, 3))
    assert read_all(spill) == [3]


def test_what_a_driver_leaves_that_is_killed_at_any_byte_is_taken_in_up_to_its_last_whole_line(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from resilient.driver.spill_file import SpillFile\n"
        "from resilient.protocol.disk import Item\n"
        "spill = SpillFile(Path(sys.argv[1]))\n"
        "for number in (1, 2, 3):\n"
        "    spill.append([Item(number, 'events.jsonl', f'{{\"step\": {number}}}\\n')])\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    spilled = tmp_path / "spill"
    subprocess.run([sys.executable, "-c", code, str(spilled)], check=False)
    (left,) = spilled.iterdir()
    data = left.read_bytes()
    begins = data.rfind(b"\n", 0, len(data) - 1) + 1  # of the last line
    for end in range(begins, len(data)):
        run_dir = tmp_path / f"run{end}"
        run_dir.mkdir()
        spilled.mkdir(mode=0o700, exist_ok=True)
        left.write_bytes(data[:end])
        take_in(run_dir, spilled)
        assert lines_of(run_dir) == ([1, 2] if end < len(data) - 1 else [1, 2, 3])
        assert not spilled.exists()


def test_what_a_campaign_has_spilled_is_not_that_of_one_that_is_begun_anew_in_its_place(tmp_path: Path) -> None:
    run_dir, ram = tmp_path / "run", tmp_path / "ram"
    ram.mkdir()
    places = [new_directory(run_dir, identity, ram) for identity in ("0123456789ab", "")]
    for place in places:
        place.mkdir(mode=0o700)
    assert set(directories_of(run_dir, "0123456789ab", ram)) == set(places)
    assert directories_of(run_dir, "ba9876543210", ram) == places[1:]  # of an earlier version, which named no campaign
    assert directories_of(tmp_path / "other", "0123456789ab", ram) == []


def test_a_driver_that_is_killed_while_it_takes_a_spill_in_doubles_no_line(tmp_path: Path) -> None:
    run_dir, spill = tmp_path / "run", SpillFile(tmp_path / "spill")
    run_dir.mkdir()
    spill.append([*items(1, 3), Item(4, "metrics.jsonl", '{"step": 4}\n')])
    spill.close()
    (run_dir / "metrics.jsonl").mkdir()  # so it fails when the events are written and the metrics are not
    with pytest.raises(OSError):
        take_in(run_dir, tmp_path / "spill")
    assert lines_of(run_dir) == [1, 2, 3] and spill.path.exists()
    (run_dir / "metrics.jsonl").rmdir()
    assert take_in(run_dir, tmp_path / "spill") == 4
    assert lines_of(run_dir) == [1, 2, 3] and (run_dir / "metrics.jsonl").read_text() == '{"step": 4}\n'
    assert not spill.path.exists()


@contextmanager
def small(path: Path) -> Iterator[Path]:
    """A file system in RAM of sixteen pages."""
    path.mkdir()
    command("mount", "-t", "tmpfs", "-o", f"size={16 * os.sysconf('SC_PAGE_SIZE')}", "tmpfs", path)
    try:
        yield path
    finally:
        command("umount", path)


@MOUNTS
@pytest.mark.parametrize("limit_bytes", [16, 100, 1 << 20])
def test_what_did_not_fit_is_not_read_and_is_there_once_when_there_is_room_again(tmp_path: Path, limit_bytes: int) -> None:
    with small(tmp_path / "ram") as ram:
        filling = ram / "filling"
        filling.write_bytes(b"x" * (8 * os.sysconf("SC_PAGE_SIZE")))
        spill = SpillFile(ram / "spill")
        spill.append([*items(1, 2), *items(3, 3, size_bytes=150)])
        with pytest.raises(OSError, match="No space left"):
            spill.append(items(4, 4000))  # cut short somewhere between two of them
        assert spill.last == 3
        assert spill.path.stat().st_size > spill.path.read_bytes().find(b'"step\\": 4')
        assert read_all(spill, limit_bytes) == [1, 2, 3]
        spill.rewind()
        assert read_all(spill, limit_bytes) == [1, 2, 3]
        filling.unlink()
        spill.append(items(4, 20))
        assert read_all(spill, limit_bytes) == list(range(4, 21))
        spill.rewind()
        assert read_all(spill, limit_bytes) == list(range(1, 21))
        spill.close()
        run_dir = tmp_path / "run"
        run_dir.mkdir()
        assert take_in(run_dir, ram / "spill") == 20
        assert lines_of(run_dir) == list(range(1, 21))


def test_a_whole_file_is_utf8_whatever_the_locale_is(tmp_path: Path) -> None:
    program = "import sys; from pathlib import Path; from resilient.driver import spill_file; "
    program += "spill_file.replace_text(Path(sys.argv[1]), 'gr\\u00f6\\u00dfe')"
    environ = {**os.environ, "LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", program, tmp_path / "page"], env=environ, check=True)
    assert (tmp_path / "page").read_text(encoding="utf-8") == "größe"


def test_however_much_of_a_spill_file_was_written_before_a_driver_was_killed_each_line_is_written_once(tmp_path: Path) -> None:
    """More than a file that is opened is looked through for what a writer before may have left."""
    run_dir, directory = tmp_path / "run", tmp_path / "spill"
    run_dir.mkdir()
    spilled, others = items(11, 24, 1 << 20), items(1, 10)  # 14 MiB
    written = "".join(item.text for item in [*others, *spilled])
    (run_dir / EVENTS).write_text(written[: -(3 << 20)])  # in the middle of a line
    SpillFile(directory).append(spilled)
    assert take_in(run_dir, directory) == 14
    assert lines_of(run_dir) == list(range(1, 25))
    assert (run_dir / EVENTS).read_text() == written
