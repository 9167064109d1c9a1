"""What workers say before they are killed: torch's flight recorder, and stacks of processes that are stopped."""

import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from resilient.agent import inspection, lastwords, recorder
from resilient.agent.lastwords import Witness
from resilient.driver.lease import LOCK
from resilient.recovery.faults import INCIDENTS

DONE = {
    "process_group": ("0", "default_pg"),
    "collective_seq_id": 6,
    "p2p_seq_id": 0,
    "is_p2p": False,
    "profiling_name": "nccl:all_reduce",
    "input_sizes": [[8]],
    "state": "completed",
    "retired": True,
}
STARTED = {**DONE, "collective_seq_id": 7, "state": "started", "retired": False}
SENT = {**STARTED, "is_p2p": True, "p2p_seq_id": 3, "profiling_name": "nccl:send 0->1", "process_group": ("2", "mesh_pp")}


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (
            [DONE, STARTED, SENT],
            "3 collectives remembered; 2 not finished, the first: number 7 of group 0 (default_pg), nccl:all_reduce [[8]]",
        ),
        ([DONE, SENT], "2 collectives remembered; 1 not finished, the first: number 3 of group 2 (mesh_pp), nccl:send 0->1 [[8]]"),
        ([DONE], "1 collectives remembered; all are finished, the last: number 6 of group 0 (default_pg), nccl:all_reduce [[8]]"),
        (
            [{**DONE, "state": "scheduled", "process_group": ("1", "undefined")}],
            "1 collectives remembered; all are finished, the last: number 6 of group 1, nccl:all_reduce [[8]]",
        ),
    ],
    ids=["waits", "pipeline", "waits for nobody", "gloo, which never says completed"],
)
def test_a_record_in_words(entries: list[dict[str, Any]], words: str):
    assert recorder.in_words({"entries": entries}) == words


def test_both_backends_of_a_process_are_asked_and_one_without_collectives_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Stands for a build of torch with NCCL, where gloo has remembered nothing."""

    def dump(*entries: dict[str, Any]) -> Callable[..., bytes]:
        return lambda **_: pickle.dumps({"version": "2.10", "entries": list(entries)} if entries else {})

    c10d = SimpleNamespace(_dump_nccl_trace=dump(DONE, STARTED), _dump_fr_trace=dump())
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(_C=SimpleNamespace(_distributed_c10d=c10d)))
    record = tmp_path / "region.record"
    recorder._leave(record)
    assert list(recorder.answers(record)) == ["nccl"]
    assert record.read_text().startswith("nccl: 2 collectives remembered; 1 not finished, the first: number 7 of group 0")
    recorder.forget(record)
    assert not recorder.answers(record) and not list(tmp_path.iterdir())


# A rank of a group of two, whose partner never comes; or with another `how`, something that is in no collective.
RANK = """
import os, re, sys, threading, time
from pathlib import Path
from resilient.agent.inspection import answer_with_stacks
from resilient.agent.recorder import answer_with_record
how, directory = sys.argv[1], Path(sys.argv[2])
answer_with_stacks(directory / "stacks")
answer_with_record(directory / "region.record")
def count():
    for number in range(10 ** 9):
        (directory / "count").write_text(str(number))
        if number == 3:
            print("ready", flush=True)
def collective():
    import torch
    import torch.distributed as dist
    rank = int(how[-1])
    dist.init_process_group("gloo", store=dist.FileStore(str(directory.parent / "store"), 2), rank=rank, world_size=2)
    dist.all_reduce(torch.ones(3))
    print("ready", flush=True)
    if rank:
        time.sleep(600)
    dist.all_reduce(torch.ones(5))
if how == "count":
    count()
elif how == "keeps the interpreter":
    print("ready", flush=True)
    re.match(r"(a+)+$", "a" * 60 + "b")
else:
    collective()
"""

Start = Callable[..., tuple[subprocess.Popen[str], Witness]]


@pytest.fixture
def incident(tmp_path: Path) -> Path:
    """The folder of an incident, which is not made yet, in a run directory that is in use."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / LOCK).touch()
    return run_dir / INCIDENTS / "g1-1"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    processes: list[subprocess.Popen[str]] = []

    def run(how: str) -> tuple[subprocess.Popen[str], Witness]:
        directory = tmp_path / f"rank{len(processes)}"
        directory.mkdir()
        processes.append(subprocess.Popen([sys.executable, "-c", RANK, how, str(directory)], stdout=subprocess.PIPE, text=True))
        return processes[-1], Witness(processes[-1].pid, directory / "region.record", directory / "stacks")

    yield run
    for process in processes:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None and process.stdout.readline() == "ready\n"


def stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGSTOP)
    assert stopped(process)


def stopped(process: subprocess.Popen[str]) -> bool:
    """Whether a process is stopped, as soon as it has got a core."""
    deadline = time.monotonic() + 60.0
    while inspection.state_of(process.pid) != "T" and time.monotonic() < deadline:
        time.sleep(0.001)
    assert inspection.state_of(process.pid) == "T", inspection.state_of(process.pid)
    return True


def test_the_record_of_ranks_that_wait_for_each_other_is_left_in_torchs_own_format(
    start: Start, incident: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lastwords, "WINDOW_S", 60.0)
    monkeypatch.setattr(lastwords, "RECORD_S", 60.0)
    ranks = [start("rank 0"), start("rank 1")]
    for process, _ in ranks:
        ready(process)
    while " in all_reduce\n" not in inspection.inspect({0: (ranks[0][0].pid, ranks[0][1].stacks or Path())})[0].stacks:
        pass  # until it is in the second one
    for _ in range(2):  # asked again, they say it again
        lastwords.take({rank: witness for rank, (_, witness) in enumerate(ranks)}, incident, 0, world=4)
    entries = [pickle.loads((incident / f"gloo_trace_rank_{rank}").read_bytes())["entries"] for rank in range(2)]
    assert [[entry["input_sizes"] for entry in each] for each in entries] == [[[[3]], [[5]]], [[[3]]]]
    said = (incident / "node0.txt").read_text().splitlines()
    assert said[0].startswith(
        "rank 0: flight recorder: gloo: 2 collectives remembered; 1 not finished, the first: number 2 of group 0"
    )
    assert said[1].startswith("rank 1: flight recorder: gloo: 1 collectives remembered; all are finished")


# A rank of a group of its own that spins in Python, and says what it has imported once its record is there.
SPINNING = """
import os, pickle, sys
from importlib.util import find_spec
from pathlib import Path
from resilient.agent.recorder import RECORDER_SIGNAL, answer_with_record
record = Path(sys.argv[1]) / "region.record"
answer_with_record(record)
import torch
import torch.distributed as dist
assert "torch._inductor" not in sys.modules
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
def calls(depth):
    calls(depth - 1) if depth else dist.all_reduce(torch.ones(1))
for _ in range(2000):
    calls(60)
os.kill(os.getpid(), RECORDER_SIGNAL)
while not record.exists():
    pass
found = pickle.loads(record.with_suffix(".gloo").read_bytes())["entries"]
assert len(found) == 2000 and sum(frame["name"] == "calls" for frame in found[0]["frames"]) > 55, found[0]
assert "torch._inductor" not in sys.modules, "the thread that answered has imported it"
assert find_spec("torch._inductor") is not None, "others can"
"""


def test_a_record_has_its_stacks_without_an_import_of_the_compiler(tmp_path: Path):
    program = [sys.executable, "-c", SPINNING, str(tmp_path)]
    done = subprocess.run(program, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


# A rank of 2,000 collectives, whose stacks torch names for a good while.
LARGE = """
import pickle, sys, time
from pathlib import Path
from resilient.agent import recorder
record, go_on = map(Path, sys.argv[1:])
entry = dict(process_group=("0", ""), collective_seq_id=3, is_p2p=False, profiling_name="nccl:all_reduce", input_sizes=[[1]],
             state="scheduled", retired=False)
asked = 0
def large(stacks):
    global asked
    asked += 1
    while stacks and not go_on.exists():
        time.sleep(0.01)
    yield "nccl", pickle.dumps({"entries": [dict(entry, collective_seq_id=number, asked=asked) for number in range(2000)]})
recorder._dumps = large
recorder.answer_with_record(record)
print("ready", flush=True)
time.sleep(600)
"""


def test_a_record_of_many_collectives_is_waited_for_and_made_once(incident: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lastwords, "RECORD_S", 60.0)
    record, go_on = tmp_path / "region.record", tmp_path / "go on"
    process = subprocess.Popen([sys.executable, "-c", LARGE, str(record), str(go_on)], stdout=subprocess.PIPE, text=True)
    try:
        ready(process)
        recorder.ask(process.pid, record)  # the inspection
        recorder.wait_for_standings([record], time.monotonic() + 60.0)
        standing = recorder.standing_of(record)
        assert standing is not None and standing.number == 0, "it says so before its record is there"
        assert not recorder.answers(record)
        naming = threading.Timer(1.5, go_on.touch)
        naming.start()
        lastwords.take({0: Witness(process.pid, record, None)}, incident, 0, world=4)
        naming.join()
        entries = pickle.loads((incident / "nccl_trace_rank_0").read_bytes())["entries"]
        assert len(entries) == 2000 and entries[0]["asked"] == 2
    finally:
        process.kill()
        process.communicate()


def test_a_rank_without_a_record_is_said_to_be_that(start: Start, incident: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lastwords, "WINDOW_S", 60.0)
    monkeypatch.setattr(lastwords, "RECORD_S", 60.0)
    process, witness = start("count")
    ready(process)
    lastwords.take({0: witness}, incident, 0, world=4)
    assert (incident / "node0.txt").read_text() == "rank 0: flight recorder: torch has none here\n"
    assert process.poll() is None


def test_a_rank_that_does_not_answer_is_not_waited_for(start: Start, incident: Path):
    process, witness = start("keeps the interpreter")
    ready(process)
    computing, began_s = psutil.Process(process.pid), psutil.Process(process.pid).cpu_times().user
    while computing.cpu_times().user < began_s + 0.1:  # what it says before that it may still answer
        time.sleep(0.01)
    lastwords.take({1: witness}, incident, 0, world=4)
    said = (incident / "node0.txt").read_text()
    assert said == f"rank 1: flight recorder: none, it did not answer within {lastwords.WINDOW_S:g} s\n"
    assert process.poll() is None


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, stacks are waited for."""
    monkeypatch.setattr(inspection, "ANSWER_S", 60.0)
    monkeypatch.setattr(inspection, "STOPS_S", 60.0)


@pytest.mark.usefixtures("patient")
def test_a_stopped_process_says_where_it_was_and_does_not_go_on(start: Start, incident: Path):
    process, witness = start("count")
    ready(process)
    stop(process)
    assert witness.stacks is not None
    count, went_on = witness.stacks.parent / "count", []
    for number in range(20):
        before = int(count.read_text() or 0)
        lastwords.take({3: witness}, incident.with_name(f"g1-{number}"), 0, world=4)
        assert stopped(process)
        assert " in count\n" in (incident.with_name(f"g1-{number}") / "rank3.stopped.txt").read_text()
        said = (incident.with_name(f"g1-{number}") / "node0.txt").read_text()
        assert said == "rank 3: where it was stopped: rank3.stopped.txt; flight recorder: not asked, the process is stopped\n"
        went_on.append(int(count.read_text() or before) - before)
    assert min(went_on) < 1000  # some writes of 10 µs, no more, but where this process got no core to stop it


@pytest.mark.usefixtures("patient")
def test_an_inspection_leaves_a_stopped_process_stopped(start: Start):
    (process, witness), (other, its_witness) = start("count"), start("count")
    for each in (process, other):
        ready(each)
    stop(process)
    assert witness.stacks is not None and its_witness.stacks is not None
    found = inspection.inspect({0: (process.pid, witness.stacks), 1: (other.pid, its_witness.stacks)})
    assert found[0].state == "T" and " in count\n" in found[0].stacks
    assert stopped(process)


def test_what_was_known_of_a_stopped_process_is_not_asked_again(start: Start, incident: Path):
    process, witness = start("count")
    ready(process)
    stop(process)
    lastwords.take({3: Witness(witness.pid, witness.record, None)}, incident, 0, world=4)
    assert sorted(path.name for path in incident.iterdir()) == ["node0.txt"]


def test_what_a_worker_has_left_is_removed(tmp_path: Path):
    names = ["g1-rank0.record", "g1-rank0.nccl", "g1-rank0.gloo", "g1-rank0.record.new"]
    for name in [*names, "g1-rank0"]:
        (tmp_path / name).touch()
    recorder.forget(tmp_path / "g1-rank0.record")
    assert [path.name for path in tmp_path.iterdir()] == ["g1-rank0"]


@pytest.mark.parametrize("gone", ["moved", "unmounted"])
@pytest.mark.parametrize("world", [1, lastwords.APART + 1], ids=["apart", "one file"])
def test_a_run_directory_that_is_gone_is_not_made_anew_for_last_words(incident: Path, tmp_path: Path, gone: str, world: int):
    run_dir = incident.parents[1]
    run_dir.rename(tmp_path / "elsewhere")
    if gone == "unmounted":
        run_dir.mkdir()  # the mount point
    with pytest.raises(FileNotFoundError):
        lastwords.take({}, incident, 0, world=world)
    assert run_dir.exists() is (gone == "unmounted") and not incident.parent.exists()
