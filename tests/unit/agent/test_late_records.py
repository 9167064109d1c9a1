"""An inspection waits for the flight recorder of a rank whose machine is busy: without it nobody can say who has gone astray."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from resilient import worker
from resilient.agent import inspection
from resilient.agent import workers as workers_module
from resilient.agent.bootstrap import WorkerSpec
from resilient.agent.workers import Workers
from resilient.recovery.standing import Standing

# A rank in a collective of its own, whose recorder answers a good while after it was asked.
RANK = """
import pickle, sys, threading, time
from pathlib import Path
from resilient.agent import recorder
from resilient.agent.inspection import answer_with_stacks
from resilient.heartbeat.worker_side import WorkerRegion
region, stacks, record = map(Path, sys.argv[1:])
entry = dict(process_group=("0", ""), collective_seq_id=3, is_p2p=False, profiling_name="gloo:broadcast", input_sizes=[[1]],
             state="started", retired=False)
def late(stacks):
    time.sleep(0.8)
    yield "gloo", pickle.dumps({"entries": [entry]})
recorder._dumps = late
answer_with_stacks(stacks)
recorder.answer_with_record(record)
def elsewhere():
    time.sleep(600)
threading.Thread(target=elsewhere, daemon=True).start()
WorkerRegion(region).beat(5)
print("ready", flush=True)
time.sleep(600)
"""


class Started:
    """Stands where standbys do: starts the process above."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str]

    def start(self, spec: WorkerSpec) -> SimpleNamespace:
        paths = [spec.environ[worker.REGION_VARIABLE], str(spec.stacks), str(spec.record)]
        self.process = subprocess.Popen([sys.executable, "-c", RANK, *paths], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None and self.process.stdout.readline() == "ready\n"
        return SimpleNamespace(pid=self.process.pid, exitcode=None, sentinel=-1)


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    started = Started()
    environ = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", worker.GENERATION_VARIABLE: "1"}
    yield Workers(
        0,
        [environ],
        regions=tmp_path,
        output=SimpleNamespace(open=lambda *_: SimpleNamespace(pipe=tmp_path / "pipe")),  # type: ignore[arg-type]
        log_file=tmp_path / "log",
        config=tmp_path / "config",
        entrypoint="toys:count",
        standbys=started,  # type: ignore[arg-type]
    )
    started.process.kill()
    started.process.communicate()


def test_a_rank_that_answers_late_still_says_in_which_collective_it_waits(workers: Workers, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workers_module, "RECORDS_S", 60.0)
    monkeypatch.setattr(inspection, "ANSWER_S", 60.0)
    found = workers.inspect()[0]
    assert found.standing == Standing("0", 3, "gloo:broadcast [[1]]", None)
    *_, other, main = found.stacks.split("most recent call first")
    assert " in elsewhere\n" in other and " in <module>\n" in main
