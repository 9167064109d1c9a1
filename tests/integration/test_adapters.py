"""Adapters: a script of a framework that has one loses no step that had a snapshot, and its numbers are those of a calm run."""

import os
import random
import signal
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from campaigns import HELD, ROOT, Campaign, loses_no_snapshot, wait_for
from soak import soaked

EXAMPLES = ROOT / "examples"
ENDLESS = 100_000
# Steps of a millisecond are over before the last one's snapshot is sealed, and some are left out.
PACED = f"{Path(__file__).with_name('paced_script.py')} 0.05"

Adapted = Callable[..., Campaign]


def late(steps: int) -> int:
    """A step from which a run goes on once all has been done to it."""
    return steps - 4


def stands(steps: int) -> str:
    """How a paced script is told so; one without end stands nowhere."""
    return f":{late(steps)}" if steps < ENDLESS else ""


def kill(run: Campaign, steps: int, rank: int, further: int) -> None:
    """A rank is killed so many steps further, or where the run stands; RAM has a snapshot to go on from."""
    run.reach(min(run.step() + further, late(steps)))
    wait_for(lambda: [event for event in run.events("snapshot") if event["tier"] == "ram"], lambda: f"a snapshot\n{run.logs()}")
    os.kill(run.workers()[rank], signal.SIGKILL)


@pytest.fixture
def adapted(campaign: Callable[..., Campaign], tmp_path: Path) -> Iterator[Adapted]:
    """A campaign of an example, with a tier in RAM of its own."""

    def make(script: str, steps: int, name: str = "run", words: str = "", **config: Any) -> Campaign:
        tiers = [{"name": "ram", "path": f"/dev/shm/adapters-{os.getpid()}-{tmp_path.name}-{name}", "keep_last": 2}]
        tiers += [{"name": "disk", "path": "${run_dir}/checkpoints"}]
        example = f"{PACED}{stands(steps)} {EXAMPLES}/{script}.py --steps {steps} --out ${{run_dir}}/out {words}"
        return campaign(
            tmp_path / name,
            entrypoint=config.pop("entrypoint", example),
            cluster=config.pop("cluster", {"procs_per_node": 2, "threads_per_proc": 1, "device": "cpu"}),
            checkpoint={"every_steps": 1000, "tiers": tiers},
            resilience=HELD,
            **config,
        )

    yield make
    for left in Path("/dev/shm").glob(f"adapters-{os.getpid()}-{tmp_path.name}-*"):
        for path in sorted(left.rglob("*"), reverse=True):
            path.unlink() if not path.is_dir() else path.rmdir()
        left.rmdir()


def recovered(run: Campaign, count: int) -> None:
    wait_for(lambda: len(run.events("recovered")) >= count, lambda: f"recovery {count}\n{run.logs()}")


def weights(run: Campaign) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run.run_dir / "out").glob("model*.safetensors")}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("script", ["transformers_snapshots", soaked("accelerate_snapshots"), soaked("lightning_snapshots")])
def test_kills_in_the_middle_of_an_epoch_lose_no_step_and_change_no_number(adapted: Adapted, script: str, rounds: int):
    chance = random.Random(rounds)
    steps = 40 + 20 * rounds
    run = adapted(script, steps).start()
    for number in range(1, 2 * rounds + 1):
        further = chance.randrange(4, 9)
        kill(run, steps, chance.randrange(2), further)
        recovered(run, number)
    run.go_on()
    assert run.wait(400) == 0, run.output + run.logs()
    assert {fault["kind"] for fault in run.events("fault")} == {"exit"}
    assert {event["tier"] for event in run.events("generation_started")[1:]} == {"ram"}
    loses_no_snapshot(run)
    calm = adapted(script, steps, "calm")
    calm.go_on()
    assert calm.run() == 0, calm.output + calm.logs()
    assert run.losses() == calm.losses() and len(calm.losses()) == steps
    assert weights(run) == weights(calm) and weights(calm)


LOADERS = ["plain", "generator", "workers", "stateful", "unsized"]


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("loader", "procs"), [("ema", 2), ("swa", 2), *product(LOADERS, [1, 2])])
def test_what_lightning_does_between_steps_is_not_done_twice_after_kills(adapted: Adapted, loader: str, procs: int):
    """Ends of epochs, validations that draw random numbers, a schedule that follows them, averages, hooks; loaders of each kind."""
    chance, steps = random.Random(loader), 60
    script = Path(__file__).with_name("lightning_loaders.py")
    loaders = f"{PACED}{stands(steps)} {script} {loader} --steps {steps} --out ${{run_dir}}/out"
    cluster = {"procs_per_node": procs, "threads_per_proc": 1, "device": "cpu"}
    run = adapted("lightning_snapshots", steps, entrypoint=loaders, cluster=cluster).start()
    for number in (1, 2, 3):
        further = chance.randrange(6, 14)
        kill(run, steps, chance.randrange(procs), further)
        recovered(run, number)
    run.go_on()
    assert run.wait(400) == 0, run.output + run.logs()
    assert {event["tier"] for event in run.events("generation_started")[1:]} == {"ram"}
    calm = adapted("lightning_snapshots", steps, "calm", entrypoint=loaders, cluster=cluster)
    calm.go_on()
    assert calm.run() == 0, calm.output + calm.logs()
    assert run.losses() == calm.losses() and len(calm.losses()) == steps
    assert weights(run) == weights(calm) and weights(calm)


@pytest.mark.timeout(300)
@pytest.mark.soak
@pytest.mark.parametrize("dispatch", ["", "--dispatch"])
def test_what_a_script_has_registered_with_accelerate_goes_on_after_kills(adapted: Adapted, dispatch: str):
    steps, script = 40, Path(__file__).with_name("accelerate_registered.py")
    words = f"{PACED}{stands(steps)} {script} --steps {steps} --out ${{run_dir}}/out {dispatch}"
    run = adapted("", steps, entrypoint=words).start()
    for number, further in ((1, 7), (2, 12)):
        kill(run, steps, number % 2, further)
        recovered(run, number)
    run.go_on()
    assert run.wait(400) == 0, run.output + run.logs()
    calm = adapted("", steps, "calm", entrypoint=words)
    calm.go_on()
    assert calm.run() == 0, calm.output + calm.logs()
    assert run.losses() == calm.losses() and len(calm.losses()) == steps
    assert weights(run) == weights(calm) and weights(calm)


def stopped(run: Campaign) -> int:
    """The step at which a campaign ends that is asked to."""
    run.start()
    run.reach(8)
    run.signal(signal.SIGTERM)
    assert run.wait() == 75, run.output + run.logs()
    (drain,) = run.events("drain")
    return int(drain["step"])


def goes_on(run: Campaign, script: str, step: int) -> None:
    """From this step on, for five more."""
    words = f"{EXAMPLES}/{script}.py --steps {step + 5} --out {run.run_dir}/out"
    assert run.run(f"entrypoint={words}") == 0, run.output + run.logs()
    assert run.events("generation_started")[-1]["resumed_step"] == step
    assert set(run.losses()) == set(range(1, step + 6))


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_lightning_that_is_asked_to_stop_saves_the_step_by_its_own_checkpoint_too(adapted: Adapted):
    run = adapted("lightning_snapshots", ENDLESS)
    step = stopped(run)
    assert torch.load(run.run_dir / "out/last.ckpt", weights_only=False)["global_step"] == step
    goes_on(run, "lightning_snapshots", step)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_loop_with_accelerate_that_is_asked_to_stop_goes_on_where_it_was(adapted: Adapted):
    run = adapted("accelerate_snapshots", ENDLESS)
    goes_on(run, "accelerate_snapshots", stopped(run))


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_trainer_that_is_asked_to_stop_saves_the_step_by_its_own_checkpoint_too(adapted: Adapted):
    run = adapted("transformers_snapshots", ENDLESS)
    step = stopped(run)
    assert (run.run_dir / f"out/checkpoint-{step}/trainer_state.json").exists()
    goes_on(run, "transformers_snapshots", step)
