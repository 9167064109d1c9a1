"""Training scripts that know nothing of resilient: each fault is detected, named, recovered, told and accounted for."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from campaigns import Campaign, wait_for
from soak import soaked

from resilient.status import inspect

SCRIPT = Path(__file__).with_name("plain_ddp.py")
ON_CPU = {"procs_per_node": 2, "threads_per_proc": 1, "device": "cpu"}
SOON = {"hang_floor_s": 5.0}  # sooner than by default, and later than a busy machine lets a rank wait


def scripted(campaign: Callable[..., Campaign], words: str, **config: Any) -> Campaign:
    return campaign(entrypoint=f"{SCRIPT} {words}", cluster=ON_CPU, **config)


def told(run: Campaign) -> list[tuple[str, list[int]]]:
    return [(fault["kind"], fault["ranks"]) for fault in run.events("fault")]


def steps_told(run: Campaign) -> set[int]:
    return {step for line in run.metrics() for step in range(line["step"] - line.get("steps", 1) + 1, line["step"] + 1)}


def test_hangs_and_ends_of_a_plain_ddp_script_are_named_recovered_and_accounted_for(campaign: Callable[..., Campaign]):
    faults, steps = "--fault hang:16:1 --fault data:31:0 --fault exit:36:1", 280
    run = scripted(campaign, f"--steps {steps} --step-s 0.05 {faults}", resilience=SOON)
    run.start()
    run.reach(42)
    os.kill(run.workers()[0], signal.SIGSTOP)
    # Not before: it is continued for a moment, for its stack, and without a pause its steps would be over then.
    wait_for(lambda: len(run.events("fault")) == 4, "the stopped rank is not found")
    run.go_on()
    assert run.wait(400) == 0, run.output + run.logs()
    assert told(run) == [("hang", [1]), ("hang", [0]), ("exit", [1]), ("stopped", [0])], run.output
    hang, reading, *_ = run.events("fault")
    assert (hang["step"], hang["phase"], reading["phase"]) == (16, "step", "data")
    stacks = (run.run_dir / "incidents" / hang["fault_id"] / "rank1.txt").read_text()
    assert SCRIPT.name in stacks
    assert [event["fault_id"] for event in run.events("recovered")] == [fault["fault_id"] for fault in run.events("fault")]
    resumed = [event["resumed_step"] for event in run.events("generation_started")]
    assert resumed[:4] == [0, 10, 30, 30] and resumed[4] % 10 == 0, (
        "the step from which the script goes on is that of its optimizer"
    )
    assert steps_told(run) == set(range(1, steps + 1)), "those between the last line of a worker that is killed and its end, too"
    assert run.events("script_checkpoint")[-1]["path"] == str(run.directory / "out/checkpoint.pt")
    summary = inspect(run.run_dir)
    assert (summary.state, summary.step, summary.target_step, summary.recovered) == ("reached", steps, None, 4)
    assert summary.goodput is not None and summary.rank_seconds["productive"] > 0 and summary.rank_seconds["rework"] > 0
    assert "300" not in run.output and "tp 1" not in run.output


AT_ITS_OWN_ADDRESS = """
import os, pathlib, sys
import torch
import torch.distributed as dist

rank, world_size, once = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), pathlib.Path(sys.argv[1])
os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "12355"
for number in range(3):
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    dist.all_reduce(ranks := torch.ones(1))
    if rank == 0:
        print(f"group {number} of {ranks.item():.0f} ranks")
    dist.destroy_process_group()
    if number == 1 and rank == 1 and not once.exists():
        once.touch()
        os._exit(3)
"""


@pytest.mark.soak
def test_a_script_with_an_address_of_its_own_trains_and_is_restarted(campaign: Callable[..., Campaign], tmp_path: Path):
    script = tmp_path / "at_its_own_address.py"
    script.write_text(AT_ITS_OWN_ADDRESS)
    run = campaign(entrypoint=f"{script} {tmp_path / 'ended'}", cluster=ON_CPU)
    assert run.run() == 0, run.output + run.logs()
    assert told(run) == [("exit", [1])], run.output
    assert run.printed(0) == "group 0 of 2 ranks\ngroup 1 of 2 ranks"
    assert run.printed(0, generation=2).endswith("group 2 of 2 ranks")


OVERWRITES = """
import collections, os, pathlib, sys, time
import torch

events, checkpoint, rank = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), int(os.environ["RANK"])
began = checkpoint.with_suffix(".began")

class Slow:
    def __reduce__(self):  # while it is written the other rank fails, and a rank that computes would be killed at once
        began.touch()
        while '"event": "action"' not in events.read_text():
            time.sleep(0.01)
        time.sleep(1.0)
        return collections.OrderedDict, ()

first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
done = 0 if first else torch.load(checkpoint)["step"]
print(f"goes on from step {done}")
optimizer = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())
optimizer.step()
if first and rank == 0:
    torch.save({"step": 1, "weights": torch.zeros(1 << 16), "last": Slow()}, checkpoint)
    time.sleep(600)
while first and not began.exists():
    time.sleep(0.01)
os._exit(3 if first else 0)
"""


def test_a_checkpoint_that_is_overwritten_while_another_rank_fails_is_finished(campaign: Callable[..., Campaign], tmp_path: Path):
    script = tmp_path / "overwrites.py"
    script.write_text(OVERWRITES)
    run = campaign(cluster=ON_CPU, entrypoint=f"{script} ${{run_dir}}/events.jsonl {tmp_path / 'own.pt'}")
    assert run.run() == 0, run.output + run.logs()
    assert told(run) == [("exit", [1])], run.output
    assert run.printed(0, generation=2) == "goes on from step 1"


BEGINS_LATE = """
import pathlib, sys, time
import torch

print("waits to begin", flush=True)
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.05)
optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters())
for _ in range(5):
    optimizer.step()
"""


def test_a_rank_that_is_stopped_before_its_first_step_is_found_and_replaced(campaign: Callable[..., Campaign], tmp_path: Path):
    script, go = tmp_path / "begins_late.py", tmp_path / "go"
    script.write_text(BEGINS_LATE)
    run = campaign(entrypoint=f"{script} {go}", cluster=ON_CPU).start()
    wait_for(lambda: run.logs().count("waits to begin") == 2, "ranks that have begun")
    os.kill(run.workers()[1], signal.SIGSTOP)
    wait_for(lambda: run.events("action"), f"a restart\n{run.logs()}")
    go.touch()
    assert run.wait() == 0, run.output + run.logs()
    assert told(run) == [("stopped", [1])], run.output


@pytest.mark.soak  # a minute of waiting
def test_what_ranks_do_that_finish_no_first_step_is_told_and_nothing_is_done(campaign: Callable[..., Campaign], tmp_path: Path):
    script, go = tmp_path / "begins_late.py", tmp_path / "go"
    script.write_text(BEGINS_LATE)
    run = campaign(entrypoint=f"{script} {go}", cluster=ON_CPU).start()
    wait_for(lambda: run.events("no_step_yet"), "word of ranks that wait", 180)
    go.touch()
    assert run.wait() == 0, run.output + run.logs()
    line = BEGINS_LATE.splitlines().index("    time.sleep(0.05)") + 1
    (event,) = run.events("no_step_yet")
    assert f"at {script}:{line} in <module>" in event["detail"] or f"at {script}:{line - 1} in <module>" in event["detail"]
    assert "no step was finished yet, 1:0" in run.output
    assert not told(run), run.output


WITHOUT_OPTIMIZER = """
import pathlib, sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
weights, once = torch.zeros(64), pathlib.Path(sys.argv[1])
for step in range(1600):
    gradient = torch.randn(64)
    dist.all_reduce(gradient)
    weights -= 0.1 * gradient
    if step == 1500 and dist.get_rank() == 1 and not once.exists():
        once.touch()
        while True:
            time.sleep(1)
    time.sleep(0.05)
dist.destroy_process_group()
"""


@pytest.mark.soak
def test_a_hang_in_a_script_without_an_optimizer_is_found_by_its_collectives(campaign: Callable[..., Campaign], tmp_path: Path):
    script = tmp_path / "without_optimizer.py"
    script.write_text(WITHOUT_OPTIMIZER)
    run = campaign(entrypoint=f"{script} {tmp_path / 'hung'}", cluster=ON_CPU, resilience=SOON)
    assert run.run() == 0, run.output + run.logs()
    assert told(run) == [("hang", [1])], run.output
    (fault,) = run.events("fault")
    assert fault["detect_s"] < 20 and script.name in fault["evidence"], fault


VALIDATES = """
import time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(1, 121):
    model(torch.ones(8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.05)
    if step % 40 == 0:  # one rank validates, and others wait for it
        if dist.get_rank() == 0:
            time.sleep(15.0)
        dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.soak
def test_a_validation_by_one_rank_is_taken_for_a_hang_once_at_the_most(campaign: Callable[..., Campaign], tmp_path: Path):
    script = tmp_path / "validates.py"
    script.write_text(VALIDATES)
    run = campaign(entrypoint=str(script), cluster=ON_CPU, resilience=SOON)
    assert run.run() == 0, run.output + run.logs()
    assert told(run) == [("hang", [0])]
    assert steps_told(run) == set(range(1, 121))


LEAVES_WORK = """
import atexit, os, threading, time
import torch

optimizer = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())
for _ in range(60):
    optimizer.step()
    time.sleep(0.05)
if os.environ["RANK"] == "0":
    threading.Thread(target=time.sleep, args=(25.0,)).start()
else:
    atexit.register(time.sleep, 25.0)
"""


@pytest.mark.soak
def test_what_a_script_leaves_to_a_thread_and_to_atexit_is_no_hang(campaign: Callable[..., Campaign], tmp_path: Path):
    script = tmp_path / "leaves_work.py"
    script.write_text(LEAVES_WORK)
    run = campaign(entrypoint=str(script), cluster=ON_CPU, resilience=SOON)
    assert run.run() == 0, run.output + run.logs()
    assert not told(run), run.output


@pytest.mark.soak
@pytest.mark.parametrize("optimizer", ["adamw", soaked("sgd")])
def test_an_exception_every_few_steps_is_never_given_up_on(campaign: Callable[..., Campaign], optimizer: str):
    run = scripted(campaign, f"--steps 29 --save-every 5 --raise-after 7 --optimizer {optimizer}", resilience={"backoff_s": 0.5})
    assert run.run() == 0, run.output + run.logs()
    assert {fault["detail"] for fault in run.events("fault")} == {
        f"RuntimeError: no luck with step {step}" for step in (8, 13, 18, 23, 28)
    }
    assert {action["name"] for action in run.events("action")} == {"restart_workers"}
    assert steps_told(run) == set(range(1, 30))


def test_with_momentum_alone_a_script_goes_on_from_the_step_of_its_checkpoint_also_with_other_arguments(
    campaign: Callable[..., Campaign],
):
    run = scripted(campaign, "--steps 1000 --step-s 0.05 --save-every 20 --optimizer momentum").start()
    run.reach(24)
    os.kill(run.workers()[1], signal.SIGKILL)
    wait_for(lambda: run.events("recovered"), run.logs)
    run.signal(signal.SIGTERM)
    assert run.wait() == 75, run.output + run.logs()
    last = max(event["step"] for event in run.events("script_checkpoint"))
    assert run.run(f"entrypoint={SCRIPT} --steps {last + 15} --optimizer momentum") == 0, run.output + run.logs()
    saved, resumed, expected = 0, [], []
    for event in run.events():
        if event["event"] == "script_checkpoint":
            saved = event["step"]
        elif event["event"] == "generation_started":
            resumed.append(event["resumed_step"])
            expected.append(saved)
    assert resumed == expected and len(resumed) == 3 and resumed[1] >= 20
    assert run.metrics()[-1]["step"] == last + 15
    # Other arguments of the script are told.
    (told,) = (line for line in run.output.splitlines() if "changed: entrypoint: " in line)
    assert "plain_ddp.py --steps 1000 " in told and f"plain_ddp.py --steps {last + 15} " in told
    assert [each["key"] for each in run.events("config_changed")] == ["entrypoint"]


def test_a_script_is_stopped_after_the_same_step_on_all_ranks_and_its_finally_runs(campaign: Callable[..., Campaign]):
    run = scripted(campaign, "--steps 100000 --step-s 0.05").start()
    run.reach(12)
    run.signal(signal.SIGTERM)
    assert run.wait() == 75, run.output + run.logs()
    (drain,) = run.events("drain")
    assert f"leaving after step {drain['step']}" in run.printed(0)
    assert not run.events("fault")
    assert "the newest checkpoint that the script wrote is" in run.output


@pytest.mark.soak
@pytest.mark.parametrize(("on_stop", "word"), [("signal", "--handle-sigterm"), soaked("callback", "--ask")])
def test_a_script_that_stops_by_itself_saves_the_step_after_which_all_ranks_stop(
    campaign: Callable[..., Campaign], on_stop: str, word: str
):
    run = scripted(campaign, f"--steps 100000 --step-s 0.05 {word}", resilience={"on_stop": on_stop}).start()
    run.reach(12)
    run.signal(signal.SIGTERM)
    assert run.wait() == 75, run.output + run.logs()
    (drain,) = run.events("drain")
    assert f"leaving after step {drain['step']}" in run.printed(0)
    assert torch.load(run.directory / "out/checkpoint.pt")["step"] == drain["step"], "it has lost nothing"
    assert not run.events("fault")


SCRIPT_WORDS, MODULE_WORDS = ["show.py"], ["-m", "package.show"]


@pytest.mark.parametrize(
    ("words", "nodes"),
    [(SCRIPT_WORDS, 2), soaked(MODULE_WORDS, 1), soaked(SCRIPT_WORDS, 1), soaked(MODULE_WORDS, 2)],
    ids=["script-2", "module-1", "script-1", "module-2"],
)
def test_the_command_stands_in_for_torchrun(tmp_path: Path, words: list[str], nodes: int):
    (tmp_path / "package").mkdir()
    show = tmp_path / (words[0] if len(words) == 1 else "package/show.py")
    show.write_text(SHOW)
    (tmp_path / "beside.py").write_text(BESIDE)
    command = [sys.executable, "-m", "resilient", "run", "--procs", str(2 // nodes), "--nodes", str(nodes)]
    command += [*words, "--lr", "3e-4", "a b"]
    environ = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"} | {"CUDA_VISIBLE_DEVICES": ""}
    environ["PYTHONPATH"] = str(SCRIPT.parents[2])
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    drawn = []
    for rank in range(2):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        name = words[0] if len(words) == 1 else str(show)
        assert (found["argv"], found["path0"]) == ([name, "--lr", "3e-4", "a b"], str(tmp_path))
        assert (found["cwd"], found["main"]) == (str(tmp_path), str(show))
        assert found["beside"] == [str(rank), found["argv"], found["pid"]], "what it imports sees a rank"
        assert found["terminated"] == -signal.SIGTERM, "what it starts does not ignore it"
        drawn.append(found["drawn"])
        environ = found["environ"]
        local, group = (rank, 0) if nodes == 1 else (0, rank)
        assert (environ["RANK"], environ["LOCAL_RANK"], environ["WORLD_SIZE"]) == (str(rank), str(local), "2")
        assert (environ["LOCAL_WORLD_SIZE"], environ["GROUP_RANK"]) == (str(2 // nodes), str(group))
        assert environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        assert {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS"} <= environ.keys()
        assert (tmp_path / f"left{rank}").read_bytes(), "atexit finds the names of the program"
        assert (tmp_path / f"log{rank}").read_text() == "its own: begins\n", "logging is the script's to set up"
    assert all(one != other for one, other in zip(*drawn, strict=True)), "of NumPy's and torch's, which nobody has seeded"
    assert "300" not in done.stdout


SHOW = """
import atexit, json, logging, os, pickle, subprocess, sys
from pathlib import Path

import beside
import numpy
import torch


class State:
    pass


rank = os.environ["RANK"]
atexit.register(lambda: Path(f"left{rank}").write_bytes(pickle.dumps(State())))
logging.basicConfig(filename=f"log{rank}", level=logging.DEBUG, format="its own: %(message)s")
logging.getLogger("show").debug("begins")
main = sys.modules["__main__"].__file__
told = {"argv": sys.argv, "path0": sys.path[0], "cwd": os.getcwd(), "main": main, "environ": dict(os.environ)}
helper = subprocess.Popen(["sleep", "600"])
helper.terminate()
told |= {"beside": beside.SEEN, "pid": os.getpid(), "terminated": helper.wait(60.0)}
told["drawn"] = [numpy.random.rand(), torch.rand(1).item()]
Path(f"rank{rank}.json").write_text(json.dumps(told))
"""

BESIDE = """
import os, sys

SEEN = [os.environ.get("RANK"), list(sys.argv), os.getpid()]
"""
