"""`resilient.attach`: scripts whose state is kept go on after faults as if nothing had happened, to the last bit."""

import os
import random
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from campaigns import HELD, ROOT, Campaign, loses_no_snapshot, wait_for, weights
from scripts import PACED, said, torchrun
from soak import soaked

ODD = Path(__file__).with_name("ends_oddly.py")
GROWS = Path(__file__).with_name("grows.py")
OWN_NAMES = Path(__file__).with_name("own_names") / "train.py"
UNFREEZES = Path(__file__).with_name("unfreezes.py")
EXAMPLES = ["ddp", "fsdp2", "tensor_parallel"]
STEPS = 100


Attached = Callable[..., Campaign]


@pytest.fixture
def attached(campaign: Callable[..., Campaign], tmp_path: Path) -> Iterator[Attached]:
    """Campaigns of attached scripts, with a tier in RAM: `words` of one, paced by `step_s`; each has a name of its own.

    From step `holds` on it stands still until it may go on.
    """
    ram = Path(f"/dev/shm/resilient-test-{os.getpid()}-{random.randrange(1 << 30)}")

    def make(
        words: str, *, step_s: float = 0.0, holds: int | None = None, name: str = "run", every_steps: int = 20, **config: Any
    ) -> Campaign:
        base = tmp_path / name
        tiers = [
            {"name": "ram", "path": str(ram / name), "keep_last": 2, "replicas": 1},
            {"name": "disk", "path": str(base / "run/checkpoints")},
        ]
        cluster = {"procs_per_node": 2, "threads_per_proc": 1, "device": "cpu", **config.pop("cluster", {})}
        pace = str(step_s) if holds is None else f"{step_s}:{holds}"
        script = words if words.startswith((str(ODD), str(OWN_NAMES))) else f"{PACED} {pace} {words}"
        # A snapshot after each step, also where a busy processor makes one dear.
        checkpoint = {"every_steps": every_steps, "tiers": tiers, "memory_cost": 0.9}
        resilience = {**(HELD if holds is not None else {}), **config.pop("resilience", {})}
        return campaign(base, entrypoint=script, cluster=cluster, checkpoint=checkpoint, resilience=resilience, **config)

    make.ram = ram  # type: ignore[attr-defined]
    yield make
    shutil.rmtree(ram, ignore_errors=True)


def kept(run: Campaign, step: int) -> None:
    """Wait until RAM has a snapshot of this step, or of a later one."""
    wait_for(
        lambda: any(event["tier"] == "ram" and event["step"] >= step for event in run.events("snapshot")),
        lambda: f"a snapshot of step {step}\n{run.logs()}",
    )


def is_killed_and_goes_on(run: Campaign, step: int) -> None:
    """A rank is killed once RAM has a snapshot of this step, and nothing before it is computed again."""
    run.start()
    kept(run, step)
    os.kill(run.workers()[1], signal.SIGKILL)
    run.go_on()
    assert run.wait() == 0, run.output + run.logs()
    (fault,) = run.events("fault")
    assert (fault["kind"], fault["ranks"]) == ("exit", [1])
    resumed = run.events("generation_started")[1]
    assert resumed["resumed_step"] >= step and resumed["tier"] == "ram"


@pytest.mark.parametrize("example", ["ddp", soaked("fsdp2"), soaked("tensor_parallel")])
def test_after_a_kill_losses_are_those_of_torchrun_to_the_last_bit(attached: Attached, example: str):
    script = ROOT / f"examples/{example}.py"
    run = attached(f"{script} 60", step_s=0.05, holds=50)
    is_killed_and_goes_on(run, 12)
    assert {step: {loss} for step, loss in torchrun(2, str(script), "60").items()} == run.losses()


@pytest.mark.soak
def test_after_a_kill_states_that_came_while_it_trained_are_those_of_torchrun_to_the_last_bit(attached: Attached):
    run = attached(f"{UNFREEZES} 40", step_s=0.05, holds=30)
    is_killed_and_goes_on(run, 14)
    assert {step: {loss} for step, loss in torchrun(2, str(UNFREEZES), "40").items()} == run.losses()


@pytest.mark.soak
def test_a_script_whose_modules_have_names_of_ours_gets_its_own_and_is_recovered(attached: Attached):
    """As `checkpoint.py` beside it; and on PYTHONPATH, too, where all processes of the runtime find them first."""
    run = attached(f"{OWN_NAMES} 40 30", cluster={"nodes": 2, "procs_per_node": 1})
    run.within = ["env", f"PYTHONPATH={os.pathsep.join(map(str, (OWN_NAMES.parent, OWN_NAMES.parents[1], ROOT)))}"]
    is_killed_and_goes_on(run, 14)
    assert {step: {loss} for step, loss in torchrun(2, str(OWN_NAMES), "40").items()} == run.losses()


@pytest.mark.soak
def test_after_a_kill_a_value_that_has_outgrown_its_first_room_goes_on_whole(attached: Attached):
    run = attached(f"{GROWS} 40", step_s=0.05, holds=30, every_steps=5)
    is_killed_and_goes_on(run, 26)
    loses_no_snapshot(run)
    assert {step: {loss} for step, loss in torchrun(2, str(GROWS), "40").items()} == run.losses()


@pytest.mark.soak
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_rank_that_dies_while_more_room_is_announced_is_recovered(attached: Attached, when: str):
    run = attached(f"{GROWS} 40 {when}", step_s=0.05, every_steps=5)
    assert run.run() == 0, run.output + run.logs()
    (fault,) = run.events("fault")
    assert (fault["kind"], fault["ranks"]) == ("exit", [1])
    assert [event["fault_id"] for event in run.events("recovered")] == [fault["fault_id"]]
    assert run.events("generation_started")[1]["resumed_step"] > 0
    assert run.events("committed")[-1]["step"] == 40
    assert {step: {loss} for step, loss in torchrun(2, str(GROWS), "40").items()} == run.losses()


@pytest.mark.soak
def test_with_three_ranks_ddp_adds_in_the_same_order_if_it_leaves_its_buckets(attached: Attached, tmp_path: Path):
    script = tmp_path / "ddp.py"
    text = (ROOT / "examples/ddp.py").read_text()
    left = text.replace("torch.nn.Linear(64, 1)\n        )\n", "torch.nn.Linear(64, 1)\n        ), find_unused_parameters=True\n")
    assert left != text
    script.write_text(left)
    run = attached(f"{script} 30", step_s=0.05, holds=25, cluster={"procs_per_node": 3})
    is_killed_and_goes_on(run, 12)
    assert {step: {loss} for step, loss in torchrun(3, str(script), "30").items()} == run.losses()


@pytest.mark.soak
@pytest.mark.parametrize("example", ["fsdp2", "tensor_parallel"])
def test_a_script_goes_on_with_more_ranks_and_with_fewer(attached: Attached, example: str):
    script = ROOT / f"examples/{example}.py"
    run = attached(f"{script} 4")
    for total, ranks in ((4, 2), (8, 4), (12, 1)):
        words = f"entrypoint={PACED} 0.0 {script} {total}"
        assert run.run(words, f"cluster.procs_per_node={ranks}") == 0, run.output + run.logs()
    assert [event["resumed_step"] for event in run.events("generation_started")] == [0, 4, 8]
    alone = said([sys.executable, str(script), "12"])
    found = {line["step"]: line["loss"] for line in run.metrics()}
    assert len(run.metrics()) == 12 and found == pytest.approx({step: float(loss) for step, loss in alone.items()}, rel=1e-4)


@pytest.mark.soak
def test_a_snapshot_daemon_that_is_stopped_at_the_end_is_replaced_and_what_it_held_is_durable(attached: Attached):
    run = attached(f"{ODD} waits 6").start()
    wait_for(lambda: [event for event in run.events("snapshot") if event["step"] == 6], "the last snapshot", 60.0)
    (daemon,) = [process for process in run.processes() if "checkpoint.daemon" in process.cmdline()]
    daemon.suspend()
    (run.directory / "go").touch()
    assert run.wait(200) == 0, run.output + run.logs()
    (fault,) = run.events("fault")
    assert fault["kind"] == "storage" and "the snapshot daemon of node 0 has not answered for 30 s" in fault["detail"]
    assert [event["fault_id"] for event in run.events("recovered")] == [fault["fault_id"]]
    assert run.events("committed")[-1]["step"] == 6
    assert run.metrics()[-1]["step"] == 6  # told by its beats: it reports nothing


@pytest.mark.soak
def test_a_rank_that_ends_within_its_snapshot_holds_up_nobody(attached: Attached):
    run = attached(f"{ODD} leaves 6")
    assert run.run() == 0, run.output + run.logs()
    assert not run.events("fault")
    assert run.events("committed")[-1]["step"] == 5


@pytest.mark.soak
@pytest.mark.parametrize("example", ["tensor_parallel", "ddp", "fsdp2"])
def test_python_torchrun_and_resilient_run_give_the_same_losses(attached: Attached, example: str):
    script = ROOT / f"examples/{example}.py"
    run = attached(f"{script} 8", cluster={"procs_per_node": 1})
    assert run.run() == 0, run.output + run.logs()
    alone = said([sys.executable, str(script), "8"])
    assert sorted(alone) == list(range(1, 9)) and alone == torchrun(1, str(script), "8")
    assert {step: {loss} for step, loss in alone.items()} == run.losses()


@pytest.mark.soak
@pytest.mark.parametrize("example", EXAMPLES)
def test_ten_kills_at_random_steps_leave_no_trace_in_losses_and_weights(attached: Attached, example: str):
    words = f"{ROOT / f'examples/{example}.py'} {STEPS}"
    calm = attached(words, name="calm")
    assert calm.run() == 0, calm.output + calm.logs()
    patience = {"give_up_after_same_step": 9, "max_restarts_per_hour": 99}
    run = attached(words, step_s=0.05, holds=STEPS - 3, name="killed", resilience=patience).start()
    chance = random.Random(example)
    for kill, step in enumerate(sorted(chance.sample(range(3, STEPS - 3), 10))):
        run.reach(step)
        wait_for(lambda kill=kill: len(run.events("recovered")) >= kill, "recovery from the kill before")
        pids = wait_for(lambda: len(found := run.workers()) == 2 and found, "two workers")
        os.kill(pids[chance.randrange(2)], signal.SIGKILL)
    run.go_on()
    assert run.wait() == 0, run.output + run.logs()
    loses_no_snapshot(run)
    assert len(run.events("fault")) == 10
    same_bits(run, calm, STEPS)


@pytest.mark.soak
def test_a_node_that_is_gone_is_restored_from_its_buddy(attached: Attached):
    words, nodes = f"{ROOT / 'examples/fsdp2.py'} 40", {"nodes": 2, "procs_per_node": 1}
    calm = attached(words, name="calm", cluster=nodes)
    assert calm.run() == 0, calm.output + calm.logs()
    run = attached(words, step_s=0.1, holds=35, name="lost", cluster=nodes, every_steps=1000).start()
    run.reach(15)
    ram = attached.ram / "lost"  # type: ignore[attr-defined]
    wait_for(lambda: any(ram.glob("*/node0/replica-*/step-????????/part.json")), "a copy of what node 1 holds")
    victim = wait_for(lambda: run.agents().get(1), "the agent")
    assert victim is not None
    victim.suspend()  # so that nothing is started anew before everything is gone
    for process in victim.children(recursive=True):
        process.kill()
    for root in ram.glob("*/node1"):
        shutil.rmtree(root)
    victim.kill()
    run.go_on()
    assert run.wait() == 0, run.output + run.logs()
    (lost,) = [event for event in run.events("fault") if event["kind"] == "node_lost"]
    assert lost["nodes"] == [1] and not [event for event in run.events("committed") if event["t"] < lost["t"]]
    assert run.events("generation_started")[1]["resumed_step"] > 0
    same_bits(run, calm, 40)


def same_bits(run: Campaign, calm: Campaign, step: int) -> None:
    """One loss for each step, and every array of the last checkpoint, as without faults."""
    assert run.losses() == calm.losses()
    ours, theirs = weights(run, step), weights(calm, step)
    assert ours.keys() == theirs.keys() and len(ours) > 5
    for name, array in theirs.items():
        if not name.startswith("ranks/state"):  # in which the script's own text is
            assert array.tobytes() == ours[name].tobytes(), name


VALIDATES = Path(__file__).with_name("validates.py")


@pytest.mark.soak
@pytest.mark.parametrize(("how", "faults"), [("sleeps", [("hang", [0])]), ("spins", [])])
def test_a_validation_in_a_step_is_taken_for_a_hang_once_at_the_most_and_none_behind_the_loop_is(
    campaign: Callable[..., Campaign], how: str, faults: list[Any]
):
    """Snapshots are far apart, so that the attempt after the kill comes to the same validation after many steps."""
    run = campaign(
        entrypoint=f"{VALIDATES} {how} 8.0",
        cluster={"procs_per_node": 2, "threads_per_proc": 1, "device": "cpu"},
        checkpoint={"every_steps": 15, "memory_cost": 0.0},
        resilience={"hang_floor_s": 3.0},
    )
    assert run.run() == 0, run.output + run.logs()
    found = [(fault["kind"], fault["ranks"]) for fault in run.events("fault")]
    assert found in (faults, []), run.output  # on a busy machine with slow steps it may be none
    assert {fault["phase"] for fault in run.events("fault")} <= {"step"}
    assert run.metrics()[-1]["step"] == 100
