"""Campaigns of the real trainer: whatever happens to them, losses and weights are those of an undisturbed run."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import crc32c
import numpy as np
import pytest
from campaigns import EVERY, MODEL, OPTIMIZER, STEPS, TRAIN, Campaign, Training, holding, same, wait_for, weights
from shared import once
from soak import soaked

from checkpoint import manifest, sealed


@pytest.mark.soak
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_killed_workers_leave_no_trace_in_losses_and_weights(training: Training, reference_runs, precision: str, rounds: int):
    run = training(train={"precision": precision}, **holding(STEPS - 2, give_up_after_same_step=9)).start()
    chance = random.Random(rounds)
    moments = sorted(chance.sample(range(2, STEPS - 2), rounds))
    for kill, step in enumerate(moments):
        run.reach(step)
        wait_for(lambda kill=kill: len(run.events("recovered")) >= kill, "recovery from the kill before")
        pids = wait_for(lambda: len(found := run.workers()) == 2 and found, "two workers")
        os.kill(pids[chance.randrange(2)], signal.SIGKILL)
    run.go_on()
    assert run.wait() == 0, run.output + run.logs()
    faults = [event for event in run.events("fault") if event["kind"] != "storage"]  # as of a disk that stalls while all test
    assert [(fault["kind"], fault["detail"]) for fault in faults] == [("exit", "SIGKILL")] * rounds, faults
    same(run, reference_runs(precision))


@pytest.mark.soak
def test_stops_and_new_starts_leave_no_trace(training: Training, reference_runs, rounds: int):
    run = training(entrypoint="paced:train", args={"step_s": 0.3})  # so that none comes to the end before it is told to stop
    for step in sorted(random.Random(rounds).sample(range(1, STEPS - 20), rounds)):
        run.start()
        run.reach(max(step, run.step() + 1))
        run.signal(signal.SIGTERM)
        assert run.wait() == 75, run.output + run.logs()
    run.go_on()
    assert run.run() == 0, run.output + run.logs()
    assert len(run.metrics()) == STEPS
    same(run, reference_runs("bf16"))


@pytest.mark.soak
def test_a_killed_driver_and_a_new_start_leave_no_trace(training: Training, reference_runs):
    run = training(**holding(30)).start()
    run.reach(13)
    run.kill()
    wait_for(lambda: not run.processes(), "everything below the driver is gone")
    run.go_on()
    assert run.run() == 0, run.output + run.logs()
    same(run, reference_runs("bf16"))


def checkpoints(run: Campaign) -> list[Path]:
    return checkpoints_in(run.run_dir / "checkpoints")


def checkpoints_in(root: Path) -> list[Path]:
    return sorted(root.glob("step-????????"))


def largest(path: Path) -> Path:
    return max((file for file in path.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)


def flip(file: Path, at: float) -> None:
    data = bytearray(file.read_bytes())
    data[int(at * (len(data) - 1))] ^= 0x10
    file.write_bytes(data)


def array(path: Path, name: str) -> Path:
    """The shard file of an array."""
    return next(file for file in (path / name).rglob("*") if file.is_file() and file.name != "zarr.json")


def rewrite(file: Path, change: Callable[[bytes], bytes]) -> None:
    file.write_bytes(change(file.read_bytes()))


def forge(path: Path, name: str, data: bytes) -> None:
    """Put other contents into a file, and have the manifest say that they are right, as somebody does who has made it himself."""
    file = path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    said = sealed.unseal((path / manifest.NAME).read_bytes())
    said["files"][name] = {"size": len(data), "crc32c": f"{crc32c.crc32c(data):08x}"}
    (path / manifest.NAME).write_bytes(sealed.seal(said))


def huge(path: Path) -> None:
    """Its metadata says that an array has 10^18 numbers."""
    document = json.loads((path / "zarr.json").read_bytes())
    document["consolidated_metadata"]["metadata"][HEAD]["shape"] = [10**9, 10**9]
    forge(path, "zarr.json", json.dumps(document).encode())


HEAD, MOMENT = "model/head.weight", "optimizer/exp_avg/blocks.mlp.up.weight"

DAMAGE: dict[str, Callable[[Path], object]] = {
    "a byte of the weights": lambda path: flip(array(path, HEAD), 0.6),
    "a byte of the optimizer": lambda path: flip(array(path, MOMENT), 0.3),
    "the last byte of a shard": lambda path: flip(array(path, HEAD), 1.0),
    "a byte of an index": lambda path: flip(array(path, HEAD), 0.0),
    "a byte of the random numbers": lambda path: flip(array(path, "random/torch"), 0.5),
    "a byte of the manifest": lambda path: flip(path / "manifest.json", 0.5),
    "the first byte of the manifest": lambda path: flip(path / "manifest.json", 0.0),
    "a byte of the metadata": lambda path: flip(path / "zarr.json", 0.5),
    "a byte of an array's metadata": lambda path: flip(path / HEAD / "zarr.json", 0.5),
    "a shard cut to a page": lambda path: os.truncate(array(path, HEAD), 4096),
    "a shard cut by a byte": lambda path: rewrite(array(path, HEAD), lambda data: data[:-1]),
    "an empty shard": lambda path: os.truncate(array(path, HEAD), 0),
    "a shard with a byte too many": lambda path: rewrite(array(path, HEAD), lambda data: data + b"x"),
    "a manifest cut in half": lambda path: rewrite(path / "manifest.json", lambda data: data[: len(data) // 2]),
    "an empty manifest": lambda path: os.truncate(path / "manifest.json", 0),
    "an empty zarr.json": lambda path: os.truncate(path / "zarr.json", 0),
    "a missing shard": lambda path: array(path, HEAD).unlink(),
    "a chunk of zeros": lambda path: rewrite(array(path, HEAD), lambda data: data[:4096] + bytes(len(data) - 4096)),
    "a missing manifest": lambda path: (path / "manifest.json").unlink(),
    "missing metadata": lambda path: (path / "zarr.json").unlink(),
    "a missing array": lambda path: shutil.rmtree(path / HEAD),
    "shards exchanged": lambda path: shutil.copy(array(path, f"optimizer/exp_avg/{HEAD[6:]}"), array(path, HEAD)),
    "a manifest of another step": lambda path: shutil.copy(checkpoints_in(path.parent)[0] / "manifest.json", path),
    "a forged manifest that names a file elsewhere": lambda path: forge(path, "../elsewhere/zarr.json", b"{}"),
    "forged metadata of an array of 10^18 numbers": huge,
    "forged metadata that is nested deeply": lambda path: forge(path, "zarr.json", b"[" * 100_000 + b"]" * 100_000),
    "an empty directory": lambda path: (shutil.rmtree(path), path.mkdir()),
}


@pytest.fixture(scope="session")
def interrupted(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Campaign:
    """A campaign that ended at step 12 with checkpoints of steps 10 and 12, and was to go on."""
    config = {
        "cluster": {"procs_per_node": 2, "device": "cpu"},
        "model": MODEL,
        "data": {"path": str(dataset)},
        "train": {**TRAIN, "steps": 12},
        "optimizer": OPTIMIZER,
        "checkpoint": {"every_steps": EVERY},
    }

    def make(directory: Path) -> None:
        run = Campaign(directory, **config)
        assert run.run("train.steps=10") == 0, run.output + run.logs()  # the last step has a checkpoint however busy the disk is
        assert run.run() == 0, run.output + run.logs()
        assert [path.name[-2:] for path in checkpoints(run)][-2:] == ["10", "12"]

    return Campaign(once(tmp_path_factory, "interrupted", make), **config)


def copied(interrupted: Campaign, run: Campaign) -> Campaign:
    """With the run directory of the one that ended, for a test to do with as it likes."""
    shutil.copytree(interrupted.run_dir, run.run_dir)
    return run


def test_a_target_that_is_reached_is_said_and_nothing_is_done(training: Training, interrupted: Campaign):
    run = copied(interrupted, training(train={"steps": 12}))
    before = run.events()
    assert run.run() == 0
    assert "has reached its target" in run.output
    assert run.events() == before
    assert run.events("generation_started")[-1]["resumed_step"] == 10  # a further target than step 10 went on from there


OF_EACH_KIND = {
    "a byte of the weights",
    "a forged manifest that names a file elsewhere",
}


@pytest.mark.soak
@pytest.mark.parametrize("damage", [damage if damage in OF_EACH_KIND else soaked(damage) for damage in DAMAGE])
def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_used(
    training: Training, interrupted: Campaign, reference_runs, damage: str
):
    run = copied(interrupted, training())
    DAMAGE[damage](checkpoints(run)[-1])
    assert run.run("train.steps=14") == 0, run.output + run.logs()
    (rejected,) = run.events("checkpoint_rejected")
    assert rejected["step"] == 12
    assert rejected["reason"]
    assert run.events("generation_started")[-1]["resumed_step"] == 10
    assert "checkpoint of step 12 refused" in run.output
    assert "Traceback" not in run.output
    undisturbed = reference_runs("bf16").losses()
    assert run.losses() == {step: undisturbed[step] for step in range(1, 15)}


def test_with_no_good_checkpoint_left_the_run_ends_and_touches_nothing(training: Training, interrupted: Campaign):
    run = copied(interrupted, training(train={"steps": 12}))
    shutil.rmtree(checkpoints(run)[0])
    before = checkpoints(run)
    for path in before:
        flip(largest(path), 0.5)
    assert run.run("train.steps=20") == 70, run.output
    assert "Traceback" not in run.output
    assert "step 12:" in run.output
    assert str(run.run_dir / "checkpoints") in run.output
    assert checkpoints(run) == before


def test_a_layout_that_cannot_be_is_refused_with_its_line_before_anything_starts(training: Training):
    run = training(parallel={"tp": 3}, cluster={"procs_per_node": 3, "device": "cpu"})
    assert run.run() == 78
    assert "parallel.tp = 3: must divide model.heads = 4 and model.hidden = 64; nearest: 2, 4" in " ".join(run.output.split())
    assert "config.yaml:" in run.output
    assert "Traceback" not in run.output
    assert not (run.run_dir / "events.jsonl").exists()


THREE_D: dict[str, Any] = {
    "cluster": {"procs_per_node": 4, "device": "cpu"},
    "parallel": {"tp": 2, "pp": 2},
    "model": {**MODEL, "dropout": 0.1, "tie_embeddings": True, "kv_heads": 2},
}


def test_a_killed_worker_of_a_3d_layout_leaves_no_trace(training: Training, tmp_path: Path):
    short = {"train": {"steps": 12}}
    straight = training(tmp_path / "straight", **THREE_D, **short)
    assert straight.run() == 0, straight.output
    run = training(**THREE_D, **short, **holding(9)).start()
    run.reach(7)
    os.kill(run.workers()[2], signal.SIGKILL)
    run.go_on()
    assert run.wait() == 0, run.output + run.logs()
    assert [fault["kind"] for fault in run.events("fault")] == ["exit"]
    assert run.losses() == straight.losses()
    killed, undisturbed = weights(run, 12), weights(straight, 12)
    assert killed.keys() == undisturbed.keys()
    assert all(np.array_equal(killed[name], undisturbed[name]) for name in killed)


@pytest.mark.soak
def test_standbys_of_tensor_parallel_ranks_leave_no_trace(training: Training, tmp_path: Path):
    """What a standby has warmed up ahead, in a group that only pretends, must not be taken for the real one."""
    layout = {"parallel": {"tp": 2, "zero_stage": 3}, "train": {"steps": 80}}
    straight = training(tmp_path / "straight", **layout)
    assert straight.run() == 0, straight.output
    run = training(**layout, **holding(70)).start()
    for kill, step in enumerate((30, 60)):
        run.reach(step)
        wait_for(lambda kill=kill: len(run.events("recovered")) == kill, "recovery from the kill before")
        os.kill(run.workers()[1], signal.SIGKILL)
    run.go_on()
    assert run.wait() == 0, run.output + run.logs()
    assert len(run.events("recovered")) == 2
    assert run.losses() == straight.losses()
    killed, undisturbed = weights(run, 80), weights(straight, 80)
    assert all(np.array_equal(killed[name], undisturbed[name]) for name in undisturbed)


@pytest.mark.alone  # its first steps must be over before the duration is
def test_a_run_ends_with_its_state_saved_when_its_duration_is_over(training: Training):
    duration = {"steps": 100_000, "exit_duration_min": 0.1}
    run = training(entrypoint="paced:train", args={"step_s": 0.1}, train=duration)
    assert run.run() == 75, run.output
    (drain,) = run.events("drain")
    assert drain["signal"] == "exit_duration_min"
    assert max(checkpoints(run)).name == f"step-{drain['step']:08}"


@pytest.mark.soak
def test_a_dataset_that_is_cut_short_is_refused_with_its_line(training: Training, dataset: Path, tmp_path: Path):
    for suffix in (".bin", ".idx", ".tokenizer.json"):
        shutil.copy(f"{dataset}{suffix}", tmp_path / f"cut{suffix}")
    os.truncate(tmp_path / "cut.bin", 1001)
    run = training(data={"path": str(tmp_path / "cut")})
    assert run.run() == 78, run.output
    assert "cut.bin" in run.output
    assert "Traceback" not in run.output


def near(run: Campaign, other: Campaign, relative: float) -> None:
    ours, theirs = run.metrics(), other.metrics()
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for line, reference in zip(ours, theirs, strict=True):
        for name in ("loss", "grad_norm"):
            assert line[name] == pytest.approx(reference[name], rel=relative), (line["step"], name)


@pytest.mark.soak
def test_one_rank_and_two_ranks_and_accumulation_give_the_same_losses(training: Training, tmp_path: Path):
    one = training(tmp_path / "one", train={"precision": "fp32", "steps": 20}, cluster={"procs_per_node": 1, "device": "cpu"})
    two = training(tmp_path / "two", train={"precision": "fp32", "steps": 20})
    whole = training(tmp_path / "whole", train={"precision": "fp32", "steps": 20, "micro_batch_size": 4})
    for run in (one, two, whole):
        assert run.run() == 0, run.output + run.logs()
    near(one, two, 1e-5)
    near(whole, two, 1e-5)


@pytest.mark.soak
def test_a_checkpoint_of_two_ranks_goes_on_with_one(training: Training, tmp_path: Path):
    run = training(train={"precision": "fp32", "steps": 20})
    undisturbed = training(tmp_path / "undisturbed", train={"precision": "fp32", "steps": 30})
    assert run.run() == 0, run.output + run.logs()
    assert run.run("train.steps=30", "cluster.procs_per_node=1") == 0, run.output + run.logs()
    assert undisturbed.run() == 0
    assert run.events("generation_started")[-1]["resumed_step"] == 20
    near(run, undisturbed, 1e-5)


@pytest.mark.soak
def test_unsupervised_under_torchrun_the_weights_are_the_same(training: Training, reference_runs, tmp_path: Path):
    run = training(tmp_path / "torchrun")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "trainer"]
    environ = {**os.environ, "OMP_NUM_THREADS": threads(reference_runs("bf16")), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([*launcher, str(run.path)], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ours, theirs = weights(run), weights(reference_runs("bf16"))
    assert {name for name in theirs if ours[name].tobytes() != theirs[name].tobytes()} == set()


def threads(run: Campaign) -> str:
    """CPU threads of a rank in that run: sums are only equal to the last bit with as many."""
    return str(run.events("run_started")[0]["layout"]["threads_per_proc"])


def test_everything_that_workers_need_is_imported_ahead_and_starts_no_thread(reference_runs):
    log = (reference_runs("bf16").run_dir / "logs/agent0.log").read_text()
    assert "cannot import" not in log
    assert "started" not in log


def test_the_metrics_have_every_field_and_validation_is_told(training: Training, reference_runs):
    run = reference_runs("bf16")
    expected = {"step", "loss", "grad_norm", "lr", "samples", "tokens", "step_s", "tokens_per_s", "mfu", "generation", "t"}
    measured = {"batch_size", "memory_bytes", "data_s", "forward_backward_s", "reduce_s", "optimizer_s"}
    assert all(set(line) == expected | measured for line in run.metrics())
    last = run.metrics()[-1]
    assert (last["samples"], last["tokens"]) == (STEPS * 8, STEPS * 8 * 64)
    assert [event["step"] for event in run.events("validation")] == [0, 20, 40]
    losses = [event["val_loss"] for event in run.events("validation")]
    assert losses[2] < losses[1] < losses[0]
    committed = run.events("committed")
    assert all(event["bytes"] > 0 and event["files"] > 0 for event in committed)
    steps = [event["step"] for event in committed]  # one that is due while a slow disk still has both buffers is left out
    assert steps[-1] == STEPS and steps == sorted({*steps} & {*range(EVERY, STEPS + 1, EVERY)})
    assert [int(path.name[5:]) for path in checkpoints(run)] == steps[-3:]  # keep_last: 3


def test_tensorboard_shows_loss_and_validation(reference_runs):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    scalars = EventAccumulator(str(reference_runs("bf16").run_dir / "tensorboard")).Reload()
    losses = scalars.Scalars("train/loss")
    assert [entry.step for entry in losses] == list(range(1, STEPS + 1))
    assert losses[3].value == pytest.approx(reference_runs("bf16").metrics()[3]["loss"])
    assert [entry.step for entry in scalars.Scalars("validation/val_loss")] == [0, 20, 40]


@pytest.mark.soak
def test_each_checkpoint_is_evaluated_beside_the_campaign_until_its_last_step_has_been(training: Training):
    run = training(checkpoint={"every_steps": 20}, train={"eval_interval": 20}).start()
    wait_for(run.run_dir.is_dir, "the run directory")
    words = [sys.executable, "-m", "resilient", "trainer", "evaluate", str(run.run_dir), "--follow", "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as follower:
        assert run.wait() == 0, run.output + run.logs()
        printed, _ = follower.communicate(timeout=120)
    assert follower.returncode == 0
    found = {line["step"]: line["loss"] for line in map(json.loads, printed.splitlines())}
    told = {event["step"]: event["val_loss"] for event in run.events("validation")}
    assert found == {step: pytest.approx(told[step], rel=1e-3) for step in (20, 40)}
    kept = (run.run_dir / "evaluations.jsonl").read_text()
    assert printed == kept
    assert run.run() == 0, run.output


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "resilient", *map(str, arguments)], capture_output=True, text=True, check=False)


def test_plan_and_status_and_ckpt_say_what_there_is(reference_runs):
    run = reference_runs("bf16")
    planned = command("plan", run.path)
    assert planned.returncode == 0, planned.stderr
    assert "2 = tp 1 × pp 1 × dp 2" in planned.stdout
    shown = command("status", run.run_dir)
    assert "test: reached" in shown.stdout
    assert "40 of 40" in shown.stdout
    told = json.loads(command("status", run.run_dir, "--json").stdout)
    assert (told["state"], told["step"], told["checkpoint_step"], told["faults"]) == ("reached", 40, 40, 0)
    listed = command("ckpt", "ls", run.run_dir)
    committed = sorted({event["step"] for event in run.events("committed") if event["tier"] == "durable"})  # a slow disk has fewer
    assert [line.split()[:2] for line in listed.stdout.splitlines()[1:]] == [["durable", str(step)] for step in committed[-3:]]
    assert committed[-1] == 40
    verified = command("ckpt", "verify", run.run_dir / "checkpoints")
    assert verified.returncode == 0
    assert command("status", run.directory).returncode == 69
