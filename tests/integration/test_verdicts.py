"""The verdict on a real campaign that was really broken: green as it is, and red for every trace that should not be there."""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from campaigns import MOUNTS, Campaign, wait_for
from injectors import injector

from chaos.injectors.context import Target
from chaos.verdict import gathering, leftovers, machine, page
from chaos.verdict.observation import Observation
from chaos.verdict.record import Injection, append
from chaos.verdict.verdict import OF_EACH, OF_THE_RUN, JobRun, Verdict, judge
from checkpoint.naming import step_path, steps
from resilient.agent.memory import region_directory
from resilient.config import load

STEPS = 300
EVERY = 25


@dataclass
class Broken:
    """A campaign that was broken, its reference run, and what is needed to look at both."""

    run: Campaign
    reference: Campaign
    jobs: list[JobRun]
    before: dict[str, machine.State]

    def seen(self) -> Observation:
        run_dir = self.run.run_dir
        return gathering.observe(run_dir, self.jobs, self.before, experiment="test", seed=1, reference=self.reference.run_dir)

    def verdict(self) -> Verdict:
        return judge(self.seen())

    @property
    def run_dir(self) -> Path:
        return self.run.run_dir


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broken]:
    """Two ranks that keep real checkpoints; one is killed, the other one raises."""

    def made(name: str, **args: Any) -> Campaign:
        return Campaign(
            tmp_path_factory.mktemp(name),
            entrypoint="keeping:train",
            args=args,
            cluster={"procs_per_node": 2, "device": "cpu"},
            train={"steps": STEPS},
            checkpoint={"every_steps": EVERY},
            chaos={"allow": True},
        )

    reference, run = made("twin", step_s=0.0), made("broken", step_s=0.03, holds=60)
    assert reference.run() == 0, reference.output + reference.logs()
    before = gathering.inspect(gathering.places(load(run.path, [])))
    began_t = time.time()
    run.start()
    try:
        wait_for((run.run_dir / "config.yaml").exists, "the run directory")
        struck = {"worker_kill": (1, 50), "worker_raise": (0, 200)}
        with contextlib.ExitStack() as injectors:
            sent = {
                name: injectors.enter_context(injector(run, name, rank=rank, step=step)) for name, (rank, step) in struck.items()
            }
            wait_for(lambda: any((run.run_dir / "chaos").glob("*.order")), "the order for the rank that raises")
            for name, each in sent.items():  # as the runner does it: by an injector, and then into the record
                injected, undone = each.answer("injected", 300.0), each.answer("undone")
                run.go_on()
                target = Target(struck[name][0], 0)
                append(run.run_dir, Injection(name, name, {}, target, began_t, injected["t"], undone["t"], injected["evidence"]))
        code = run.wait()
    finally:
        run.kill()
    yield Broken(run, reference, [JobRun(began_t, time.time(), code)], before)


def test_a_campaign_that_recovered_is_green(broken: Broken, tmp_path: Path):
    seen = broken.seen()
    verdict = judge(seen)
    assert verdict.broken == [], [asdict(check) for check in verdict.checks if not check.ok]
    assert {check.name for check in verdict.checks} == {*OF_EACH, *OF_THE_RUN}
    assert [(each.kinds, each.culprit, each.taken) for each in verdict.outcomes] == [
        (["exit"], "right", ["restart_workers"]),
        (["exception"], "right", ["restart_workers"]),
    ]
    # None of these was green for want of anything to look at.
    assert seen.weights is not None
    assert [each.step for each in seen.checkpoints][-1] == STEPS
    assert {line["generation"] for line in seen.metrics} == {1, 2, 3}
    assert verdict.goodput is not None
    assert 0 < verdict.goodput < 1
    assert "worker_raise" in page.save(seen, verdict, tmp_path).read_text()


def test_a_loss_that_was_altered_is_seen(broken: Broken):
    path = broken.run_dir / "metrics.jsonl"
    text = path.read_text()
    lines = text.splitlines()
    altered: dict[str, Any] = json.loads(lines[40])
    altered["loss"] *= 1 + 2**-52
    path.write_text("\n".join([*lines[:40], json.dumps(altered), *lines[41:]]))
    try:
        assert broken.verdict().broken == ["losses"]
    finally:
        path.write_text(text)


@pytest.mark.parametrize(("which", "red"), [(-1, {"checkpoints", "weights"}), (-2, {"checkpoints"})])
def test_a_flipped_byte_of_a_checkpoint_is_seen(broken: Broken, which: int, red: set[str]):
    root = broken.run_dir / "checkpoints"
    checkpoint = step_path(root, steps(root)[which])
    path = max((each for each in (checkpoint / "numbers").rglob("*") if each.is_file()), key=lambda each: each.stat().st_size)
    content = path.read_bytes()
    path.write_bytes(content[:1000] + bytes([content[1000] ^ 1]) + content[1001:])
    try:
        assert set(broken.verdict().broken) == red
    finally:
        path.write_bytes(content)


@pytest.mark.parametrize("how", ["names it", "has it in its environment", "works there", "writes there"])
def test_a_process_that_is_left_is_seen(broken: Broken, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(leftovers, "PATIENCE_S", 0.0)
    words = ["sleep", "600"]
    run_dir = str(broken.run_dir)
    with (broken.run_dir / "out").open("w") as out:
        left = subprocess.Popen(
            ["sh", "-c", "sleep 600; :", run_dir] if how == "names it" else words,
            env={"OF": run_dir} if how == "has it in its environment" else {},
            cwd=run_dir if how == "works there" else tmp_path,
            stdout=out if how == "writes there" else subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        verdict = broken.verdict()
        assert verdict.broken == ["processes"]
        assert f"process {left.pid} (" in next(check.detail for check in verdict.checks if not check.ok)
    finally:
        subprocess.run(["pkill", "-KILL", "-s", str(left.pid)], check=True)
        left.wait()
        (broken.run_dir / "out").unlink()


def test_files_that_are_left_are_seen(broken: Broken):
    tier = Path(json.loads((broken.run_dir / "storage.json").read_text())["tiers"][0]["roots"][0])
    unfinished = broken.run_dir / "checkpoints" / "step-00000275.g2.tmp"
    for path in (region_directory(broken.run_dir, 0), tier / "buffer-0", unfinished):
        path.mkdir(parents=True)
        try:
            assert broken.verdict().broken == ["files"], path
        finally:
            path.rmdir()
    tier.rmdir()
    tier.parent.rmdir()
    assert broken.verdict().broken == []


def test_the_reference_run_of_another_campaign_with_almost_the_same_name_is_not_taken_for_it(
    broken: Broken, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(leftovers, "PATIENCE_S", 0.0)
    other = subprocess.Popen(["sh", "-c", "sleep 600; :", f"{broken.run_dir}-2"], start_new_session=True)
    try:
        assert broken.verdict().broken == []
    finally:
        subprocess.run(["pkill", "-KILL", "-s", str(other.pid)], check=True)
        other.wait()


@MOUNTS
def test_a_mount_that_is_left_is_seen(broken: Broken):
    place = broken.run_dir / "mounted"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", str(place)], check=True)
    try:
        assert broken.verdict().broken == ["machine"]
    finally:
        subprocess.run(["umount", str(place)], check=True)
        place.rmdir()


def test_a_host_is_looked_at_by_a_command_and_one_that_does_not_answer_is_red(broken: Broken):
    hosts = {"n1": [sys.executable, "-c", "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"], "n2": ["false"]}
    where = gathering.places(load(broken.run_dir / "config.yaml", []))
    before = gathering.inspect(where, {"n1": hosts["n1"]})
    assert any(line.split()[0] == "/" for line in before["n1"]["mount"])
    regions = region_directory(broken.run_dir, 0)
    regions.mkdir()
    try:
        assert gathering.left(broken.run_dir, where, before, hosts)["machine"] == [], "of n2 nothing was known before"
        found = gathering.left(broken.run_dir, where, {**before, "n2": {}}, hosts)
    finally:
        regions.rmdir()
    assert found["files"] == [f"n1: {regions}"]
    assert found["processes"] == []
    assert len(found["machine"]) == 1
    assert found["machine"][0].startswith("n2: cannot be inspected")
