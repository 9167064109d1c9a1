"""The files of a run directory that a job appends to, when somebody deletes them or all of them are away."""

import errno
import os
import shutil
import subprocess
import sys
from collections import deque
from pathlib import Path

import pytest
from failing_calls import NUMBERS

from resilient.driver.lease import LOCK
from resilient.driver.rundir import RunDirFiles
from resilient.ledger import EVENTS, METRICS
from resilient.protocol.disk import Item


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK).touch()
    return tmp_path / "run"


def line(number: int) -> deque[Item]:
    return deque([Item(number, EVENTS, f'{{"n": {number}}}\n', False)])


def test_a_ledger_that_was_deleted_is_made_anew_with_what_comes(run_dir: Path):
    files = RunDirFiles(run_dir, None)
    files.write(line(1))
    (run_dir / EVENTS).unlink()
    files.write(line(2))
    files.write(line(3))
    assert (run_dir / EVENTS).read_text() == '{"n": 2}\n{"n": 3}\n'


def test_a_ledger_that_was_deleted_while_nothing_could_be_written_is_made_anew(run_dir: Path):
    files = RunDirFiles(run_dir, None)
    files.write(line(1))
    (run_dir / EVENTS).rename(run_dir / "moved")
    files.unsettle()
    waiting = line(2)
    with pytest.raises(FileNotFoundError):
        files.write(waiting)
    assert waiting == line(2)
    files.write(waiting)
    assert (run_dir / EVENTS).read_text() == '{"n": 2}\n'


def test_nothing_is_made_where_the_whole_directory_is_away(run_dir: Path, tmp_path: Path):
    files = RunDirFiles(run_dir, None)
    files.write(line(1))
    shutil.move(run_dir, tmp_path / "away")
    run_dir.mkdir()  # as where a file system is to be mounted
    files.unsettle()
    waiting = line(2)
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            files.write(waiting)
    assert list(run_dir.iterdir()) == []
    run_dir.rmdir()
    shutil.move(tmp_path / "away", run_dir)
    files.write(waiting)
    assert (run_dir / EVENTS).read_text() == '{"n": 1}\n{"n": 2}\n'


def test_nothing_is_written_where_another_run_directory_is_in_the_place(run_dir: Path, tmp_path: Path):
    with (run_dir / LOCK).open() as lock:
        files = RunDirFiles(run_dir, None, lock.fileno())
        files.write(line(1))
        shutil.move(run_dir, tmp_path / "away")
        run_dir.mkdir()
        (run_dir / LOCK).touch()
        (run_dir / EVENTS).write_text('{"n": "of another"}\n')
        files.unsettle()
        for waiting in (line(2), deque([Item(3, METRICS, "{}\n", False)]), deque([Item(4, "whole", "text", True)])):
            with pytest.raises(FileNotFoundError, match="another directory"):
                files.write(waiting)
        assert (run_dir / EVENTS).read_text() == '{"n": "of another"}\n'
        assert {path.name for path in run_dir.iterdir()} == {LOCK, EVENTS}
        shutil.rmtree(run_dir)
        shutil.move(tmp_path / "away", run_dir)
        files.write(line(2))
    assert (run_dir / EVENTS).read_text() == '{"n": 1}\n{"n": 2}\n'


WRITE = """
import sys
from collections import deque
from pathlib import Path
from failing_calls import fail
from resilient.driver.rundir import RunDirFiles
from resilient.logs.paths import DRIVER_LOG
from resilient.protocol.disk import Item

run_dir, call, error = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
files = RunDirFiles(run_dir, None)
files.write(deque([Item(1, DRIVER_LOG, "said\\n")]))
fail(call, error, files._files[DRIVER_LOG]._fd if call == "write" else None)
waiting = deque([Item(2, DRIVER_LOG, "said then\\n") if call == "write" else Item(2, "incidents/1/stacks.txt", "why", whole=True)])
try:
    files.write(waiting)
except OSError as failed:
    print(failed.errno, len(waiting))
else:
    print("given up" if not waiting else "not told")
"""


@pytest.mark.skipif(not NUMBERS, reason="NOT TESTED HERE: the numbers of this machine's system calls are not known")
@pytest.mark.parametrize("call", ["write", "rename"])
@pytest.mark.parametrize("error", ["EIO", "ESTALE", "ETIMEDOUT", "ESHUTDOWN", "EHOSTDOWN", "EHOSTUNREACH"])
def test_what_a_file_system_that_has_lost_its_servers_refuses_is_written_later(run_dir: Path, call: str, error: str):
    number = getattr(errno, error)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", WRITE, run_dir, call, str(number)], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{number} 1\n", done.stderr
