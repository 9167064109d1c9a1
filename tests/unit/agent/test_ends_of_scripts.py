"""What a script leaves at its end in a rank is what it leaves under `python`."""

import gzip
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from soak import soaked

from resilient.heartbeat.agent_side import AgentRegion
from resilient.worker import REGION_VARIABLE

PATIENCE_S = 120.0

SCRIPT = """
import csv, gzip, sys, zipfile


def hook(kind, error, traceback):
    with open("hook.txt", "w") as file:
        print(kind.__name__, error, traceback.tb_frame.f_code.co_name != "", file=file)


def main():
    table = csv.writer(within := open("within.csv", "w"))
    for step in range(50):
        table.writerow([step, 0.5])
        outside.write(f"{step}\\n")
        if step == 20 and sys.argv[1] == "fail":
            raise RuntimeError("no")
        if step == 20 and sys.argv[1] == "leave":
            sys.exit(3)


sys.excepthook = hook
outside = open("outside.txt", "w")
packed = gzip.open("packed.gz", "wt")
packed.write("packed")
archive = zipfile.ZipFile("archive.zip", "w")
archive.writestr("member", "archived")
main()
"""

RANK = """
import sys
from pathlib import Path
from resilient.agent.bootstrap import WorkerSpec, run_rank

here = Path.cwd()
(here / "out.txt").write_text("")
paths = [here / name for name in ("out.txt", "stacks", "record", "config.yaml")]
run_rank(WorkerSpec({"RANK": "0", "WORLD_SIZE": "1"}, *paths, entrypoint=sys.argv[1]), *sys.argv[2:])
"""


def ended(folder: Path, *command: str) -> int:
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPT)
    return subprocess.run([sys.executable, *command], cwd=folder, check=False, capture_output=True, timeout=120).returncode


@pytest.mark.parametrize(("how", "status"), [("end", 0), ("leave", 3), ("fail", 1)])
def test_files_that_a_script_has_not_closed_are_whole_and_its_hook_is_told(tmp_path: Path, how: str, status: int):
    python, rank = tmp_path / "python", tmp_path / "rank"
    assert ended(python, "script.py", how) == status
    assert ended(rank, "-c", RANK, f"script.py {how}") == status
    for name in ("within.csv", "outside.txt", "hook.txt"):
        assert (rank / name).exists() == (python / name).exists(), name
        assert not (rank / name).exists() or (rank / name).read_text() == (python / name).read_text(), name
    assert len((rank / "outside.txt").read_text().split()) == (50 if how == "end" else 21)
    with gzip.open(rank / "packed.gz", "rt") as packed:
        assert packed.read() == "packed"
    with zipfile.ZipFile(rank / "archive.zip") as archive:
        assert archive.read("member") == b"archived"


MODULE = """
import codecs, io, sys


class Tee:
    def __init__(self, stream):
        self.stream = stream

    def write(self, text):
        return self.stream.write(text)

    def flush(self):
        self.stream.flush()


sys.stdout = {replaced}


def main(config):
    print("trained")
    sys.stderr.write(f"{{sys.__stdout__.line_buffering}}\\n")
"""


@pytest.mark.parametrize(
    ("replaced", "told"),
    [
        ("Tee(sys.stdout)", {"trained", "True"}),
        ('codecs.getwriter("utf-8")(sys.stdout.buffer)', {"trained", "True"}),
        ("io.TextIOWrapper(sys.stdout.detach())", {"trained", "False"}),
        ("None", {"True"}),
    ],
)
def test_a_module_may_put_another_stream_in_the_place_of_its_output_when_it_is_imported(
    tmp_path: Path, replaced: str, told: set[str]
):
    (tmp_path / "module.py").write_text(MODULE.format(replaced=replaced))
    command = [sys.executable, "-c", f"import module\n{RANK}", "module:main", "the config"]
    done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, timeout=120)
    said = (tmp_path / "out.txt").read_text()
    assert (done.returncode, set(said.split())) == (0, told), said


TRAINED = """
import atexit, sys, threading, time
from pathlib import Path
import torch
from resilient import worker


def work():
    Path("at work").touch()
    while not Path("go").exists():
        time.sleep(0.01)


optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
for _ in range(3):
    optimizer.step()
if sys.argv[1] == "thread":
    threading.Thread(target=work).start()
if sys.argv[1] == "fails":
    raise RuntimeError("no")
if sys.argv[1] == "told":
    worker.phase("eval").__enter__()
atexit.register(work)
if sys.argv[1] == "leaves":
    with worker.phase("step"):
        sys.exit()
"""


@pytest.mark.parametrize(
    ("how", "phase"),
    [("ends", "start"), soaked("thread", "start"), ("leaves", "start"), soaked("told", "eval"), soaked("fails", "step")],
)
def test_what_a_script_leaves_to_its_end_is_no_step_unless_it_says_so_or_has_failed(tmp_path: Path, how: str, phase: str):
    (tmp_path / "script.py").write_text(TRAINED)
    environ = f"import os, torch\nos.environ['{REGION_VARIABLE}'] = 'region'\n"
    with closing(AgentRegion(tmp_path / "region")) as region:
        rank = subprocess.Popen([sys.executable, "-c", environ + RANK, f"script.py {how}"], cwd=tmp_path)
        try:
            wait_for(lambda: rank.poll() is not None or (tmp_path / "at work").exists())
            assert (region.activity().step, region.activity().phase) == (3, phase)
        finally:
            (tmp_path / "go").touch()
            status = rank.wait(PATIENCE_S)
    assert status == (how == "fails"), (tmp_path / "out.txt").read_text()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
