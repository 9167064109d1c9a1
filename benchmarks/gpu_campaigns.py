"""What the runtime does on a GPU: whole campaigns, killed ranks and what they wait for, snapshots, chaos, `doctor`."""

import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import psutil
import recovery
import yaml
from gpu_report import Figure
from gpu_setting import EXAMPLE, ROOT, Batch, Case, Setting
from launchers import Resilient, make

from resilient import ledger

QUICKSTART, ONE_GPU = ROOT / "examples/quickstart.yaml", ROOT / "experiments/one-gpu.yaml"
SMALL = ("model.layers=1", "model.hidden=32", "model.heads=2", "model.seq_len=32", "data.tokenizer.vocab_size=512")
LASTING = ("resilience.max_restarts_per_hour=100000", "resilience.give_up_after_same_step=100000", "resilience.backoff_s=0.1")
PATIENCE_S = 80.0  # for a step, a snapshot or the end of a short run
DRY_PATIENCE_S = 400.0  # likewise, on CPUs, which others may use
STEP = Batch(4, 2)
EVERY = 5  # steps between snapshots in RAM
CHECKS = ("GPUs", "matmul", "all-reduce")  # of `doctor`, which say whether a GPU is there and computes right
QUIET_S, STANDBY_S = 1.0, 20.0  # for which a standby that is ready computes nothing; for which it is waited for at the most
IDLE_S = 0.02  # of processor time in that while, which threads of CUDA may take


def doctor(setting: Setting) -> Iterator[Figure]:
    """All of its checks."""
    done = subprocess.run(_command("doctor", "--json", "--limit", "60"), cwd=setting.scratch, capture_output=True, check=False)
    found = json.loads(done.stdout)
    failed = [each["check"] for each in found["findings"] if each["verdict"] == "fail"]
    told = "; ".join(f"{each['check']}: {each['text']}" for each in found["findings"] if each["verdict"] == "warn")
    right = [each["check"] for each in found["findings"] if each["verdict"] == "ok" and each["check"].startswith(CHECKS)]
    yield setting.figure("checks", "", len(found["findings"]), f"warned of: {told}" if told else "")
    yield setting.figure("failed", "", len(failed), ", ".join(failed))
    yield setting.figure("right on the GPU", "", len(right), ", ".join(right))
    yield setting.figure("exit status", "", done.returncode)
    yield setting.figure("seconds", "s", found["took_s"])


def quickstart(setting: Setting) -> Iterator[Figure]:
    """The first thing that a user runs, from the command to its end."""
    small = (*SMALL, "train.steps=20", "train.eval_interval=10") if setting.dry else ()
    launcher = _campaign(setting, "quickstart", QUICKSTART, *small)
    began = time.monotonic()
    try:
        launcher.start()
        first_s, status, whole_s = time.monotonic() - began, _ended(launcher), time.monotonic() - began
        losses = [event["val_loss"] for event in launcher.events("validation")]
    finally:
        launcher.stop()
    yield setting.figure("seconds", "s", whole_s, "from the command to its end")
    yield setting.figure("first step", "s", first_s, "after the command")
    yield setting.figure("exit status", "", status)
    yield setting.figure("validation loss before", "nats", losses[0])
    yield setting.figure("validation loss after", "nats", losses[-1])
    yield setting.figure("drop", "nats", losses[0] - losses[-1])


def kills(setting: Setting) -> Iterator[Figure]:
    """The quickstart with deterministic kernels, without faults and, at the same time, with its rank killed now and then."""
    steps, count = (60, 1) if setting.dry else (600, 5)
    # Two runs that time attention's kernels may take different ones, and compute other bits.
    same = ("train.deterministic=true", "model.attention=sdpa_flash", f"train.steps={steps}", "train.eval_interval=0", *LASTING)
    small = SMALL if setting.dry else ()
    calm, hurt = (_campaign(setting, name, QUICKSTART, *same, *small) for name in ("calm", "killed"))
    try:
        calm.start()
        hurt.start()
        for number in range(1, count + 1):
            hurt.wait(lambda line, least=number * steps // (count + 1): line["step"] >= least)  # type: ignore[misc]
            generation = hurt.newest()["generation"]
            _kill(hurt)
            hurt.wait(lambda line, last=generation: line["generation"] > last)  # type: ignore[misc]
        ends = [_ended(each) for each in (hurt, calm)]
        hits = [event for event in hurt.events("fault") if event["kind"] == "exit"]
        right, told = ([line for line in _metrics(each) if "loss" in line] for each in (calm, hurt))
    finally:
        calm.stop()
        hurt.stop()
    if ends != [0, 0]:
        raise RuntimeError(f"the runs ended with {ends}")
    yield setting.figure("kills that hit", "", len(hits), f"of {count}")
    again = len(told) - len({line["step"] for line in told})
    note = f"of {len(right)}, to the last bit; {again} of them were computed again"
    yield setting.figure("steps whose loss differs", "", len(different(right, told)), note)


def different(right: Sequence[Mapping[str, Any]], told: Sequence[Mapping[str, Any]]) -> set[int]:
    """Steps of which a run tells another loss than one without faults does, or none."""
    losses = {line["step"]: repr(line["loss"]) for line in right}
    wrong = {line["step"] for line in told if repr(line["loss"]) != losses.get(line["step"])}
    return wrong | (losses.keys() - {line["step"] for line in told})


def chaos(setting: Setting) -> Iterator[Figure]:
    """`experiments/one-gpu.yaml`, on the GPU."""
    experiment = yaml.safe_load(ONE_GPU.read_text())
    experiment["campaign"]["config"]["cluster"]["device"] = setting.kind
    if setting.dry:
        del experiment["faults"][2:]
    file, out = setting.scratch / ONE_GPU.name, setting.scratch / "chaos"
    file.write_text(yaml.safe_dump(experiment))
    shutil.rmtree(out, ignore_errors=True)
    began = time.monotonic()
    command = _command("chaos", "run", str(file), "--out", str(out), "--json")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout:
        raise RuntimeError(done.stderr[-1500:])
    verdict = json.loads(done.stdout)
    broken = [f"{each['name']} ({each['detail']})" for each in verdict["checks"] if not each["ok"]]
    yield setting.figure("faults", "", len(verdict["injections"]), f"of {verdict['kinds']} kinds")
    yield setting.figure("invariants that hold", "", len(verdict["checks"]) - len(broken))
    yield setting.figure("invariants that do not", "", len(broken), "; ".join(broken)[:500])
    downs = [each["downtime_s"] for each in verdict["injections"] if each["downtime_s"] is not None]
    yield setting.figure("down", "s", downs, "from a fault to the next step, or of a job that ended, to the next job's first")
    yield setting.figure("seconds", "s", time.monotonic() - began, "with the reference run")


def campaign(*, compiled: bool, standby: bool, count: int) -> Case:
    """A run of the example: what training waits for snapshots in RAM, and what a killed rank costs, by phases.

    Args:
        standby: processes that stand by hold the GPU ready.
        count: of kills.
    """

    def case(setting: Setting) -> Iterator[Figure]:
        run_dir = setting.scratch / "campaign"  # the same for all, so that what one leaves behind goes with the next
        durable = f"{{name: d, path: {run_dir}/checkpoints, every_steps: 1000000}}"
        tiers = f"checkpoint.tiers=[{{name: ram, path: /dev/shm, every_steps: {EVERY}}}, {durable}]"
        more = (f"train.compile={str(compiled).lower()}", f"resilience.gpu_standby={str(standby).lower()}", *LASTING, tiers)
        overrides = [each for each in setting.overrides("campaign", STEP) if not each.startswith("run_dir=")]
        launcher = _campaign(setting, "campaign", EXAMPLE, *overrides, *more)
        times, chance, waits, taken = recovery.Times(), random.Random(0), [], 0
        try:
            launcher.start()
            for _ in range(1 if setting.dry else count):
                stand_by = _wait_for_standby(launcher)
                recovery.hurt(launcher, "kill", chance, times)
                if stand_by is not None:
                    waits.append(stand_by.ready_s)
                    taken += stand_by.pid in launcher.ranks().values()
            _wait_for_snapshot(launcher)
            snapshots = [event for event in launcher.events("snapshot") if event["tier"] == "ram"]
            steps = Steps.of(_metrics(launcher), {(event["generation"], event["step"]) for event in snapshots})
        finally:
            launcher.stop()
        done = times.seconds["kill"]
        yield setting.figure("kill to next step", "s", done)
        for phase, seconds in times.phases.items():
            if seconds:
                yield setting.figure(f"kill: {phase}", "s", seconds)
        ready = "a context, cuBLAS, kernels" if standby else "nothing"
        yield setting.figure(
            "kills after which the standby went on", "", taken, f"of {len(done)}; it holds {ready} ready on the GPU"
        )
        if waits:
            yield setting.figure("standby ready", "s", waits, "after the first step of its generation")
        yield from _snapshots(setting, snapshots, steps)
        yield setting.figure("a step", "s", steps.calm)
        yield setting.figure("pause after the first step", "s", steps.pauses[0], "of the run, until the second one begins")
        if steps.pauses[1:]:
            yield setting.figure("pause after the first step of a restart", "s", steps.pauses[1:])

    return case


@dataclass(frozen=True)
class Steps:
    """Seconds, by lines of metrics.

    Attributes:
        calm: from the end of a step after which no snapshot is taken to the end of the next one.
        with_snapshot: the same, after a step with one.
        pauses: of each generation, from the end of its first step to the beginning of its second one.
    """

    calm: list[float]
    with_snapshot: list[float]
    pauses: list[float]

    @classmethod
    def of(cls, lines: Sequence[Mapping[str, Any]], snapshots: set[tuple[int, int]]) -> "Steps":
        """Args: lines: of metrics.jsonl; snapshots: generation and step after which one was taken."""
        found = cls([], [], [])
        for generation, group in groupby(lines, lambda line: line["generation"]):
            for number, (before, line) in enumerate(pairwise(group)):
                seconds = line["t"] - before["t"]
                if number == 0:
                    found.pauses.append(max(0.0, seconds - line["step_s"]))
                elif (generation, before["step"]) in snapshots:
                    found.with_snapshot.append(seconds)
                else:
                    found.calm.append(seconds)
        return found


def _snapshots(setting: Setting, snapshots: Sequence[Mapping[str, Any]], steps: Steps) -> Iterator[Figure]:
    """What they cost, beside one copy of as many bytes to page-locked memory."""
    size = statistics.median(event["bytes"] for event in snapshots)
    yield setting.figure("snapshot", "GB", size / 1e9)
    rate = setting.known.get("copies/to the host")
    beside: dict[str, Any] = (
        {} if rate is None else {"peer": "a page-locked copy of as many bytes", "peer_value": size / 1e9 / rate}
    )
    yield setting.figure("stall", "s", [event["stall_s"] for event in snapshots], "for which the rank stands still", **beside)
    if steps.with_snapshot:
        usual = statistics.median(steps.calm)
        longer = [max(0.0, each - usual) for each in steps.with_snapshot]
        yield setting.figure("a step with a snapshot longer", "s", longer, "the stall, and what the GPU is held back", **beside)


# -- processes -----------------------------------------------------------------------------------------------------------


def _command(*words: str) -> list[str]:
    return [sys.executable, "-m", "resilient", *words]


def _campaign(setting: Setting, name: str, config: Path, *overrides: str) -> Resilient:
    """Of one rank, in a run directory that is new; nothing is left of a benchmark that was cut off."""
    os.environ.update(SCRATCH=str(setting.scratch), PROJECT=str(setting.scratch), PYTHONPATH=_first(ROOT))
    here = ("cluster.procs_per_node=1", f"cluster.device={setting.kind}")
    launcher = make("resilient", config, setting.scratch / name, 1, None, *here, *overrides)
    assert isinstance(launcher, Resilient)
    launcher.patience_s = DRY_PATIENCE_S if setting.dry else PATIENCE_S
    _end_leftovers(launcher)
    return launcher


def _first(folder: Path) -> str:
    """PYTHONPATH with a folder before what is there, which may be where packages are installed."""
    others = (each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each not in ("", str(folder)))
    return os.pathsep.join([str(folder), *others])


def _end_leftovers(launcher: Resilient) -> None:
    """A campaign that still runs, its memory and its run directory."""
    for process in psutil.process_iter(["cmdline"]):
        if f"run_dir={launcher.run_dir}" in (process.info["cmdline"] or ()):
            for each in (process, *process.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    each.kill()
            psutil.wait_procs([process], timeout=30)
    if launcher.run_dir.exists():
        launcher.process = subprocess.Popen(["true"])
        launcher.stop()
        shutil.rmtree(launcher.run_dir)


def _ended(launcher: Resilient) -> int:
    """Its exit status, once it is there."""
    assert launcher.process is not None
    return launcher.process.wait(timeout=launcher.patience_s)


def _metrics(launcher: Resilient) -> list[dict[str, Any]]:
    return [dict(line) for line in ledger.read(launcher.run_dir / ledger.METRICS)]


def _kill(launcher: Resilient) -> None:
    """The rank, once there is one."""
    deadline = time.monotonic() + launcher.patience_s
    while time.monotonic() < deadline:
        with suppress(LookupError, ProcessLookupError):
            os.kill(launcher.ranks()[0], signal.SIGKILL)
            return
        time.sleep(0.01)  # between two looks
    raise TimeoutError("no rank to kill")


def _wait_for_snapshot(launcher: Resilient) -> None:
    """Until this generation has one in RAM: training goes on, and the pause after its first step is over."""

    def taken(line: dict[str, Any]) -> bool:
        return any(event["generation"] == line["generation"] for event in launcher.events("snapshot"))

    launcher.wait(taken)


@dataclass(frozen=True)
class Standby:
    """One that is ready. Attributes: ready_s: after the first step of its generation."""

    pid: int
    ready_s: float


def _wait_for_standby(launcher: Resilient) -> Standby | None:
    """Until this generation has a snapshot, and the process that will be the next rank is ready; None: it was not in time.

    Nothing tells that but the process itself, which the table of processes has by its name: it works, and then waits for its
    order, so that its processor time, and that of compilers below it, stands still. A kill that it was not ready for shows: the
    next rank is another process.
    """
    _wait_for_snapshot(launcher)
    generation = launcher.newest()["generation"]
    first_t = next(line["t"] for line in _metrics(launcher) if line["generation"] == generation)
    deadline = time.monotonic() + STANDBY_S
    since, before = time.time(), (0, 0.0)
    while time.monotonic() < deadline:
        now = _standby(launcher)
        if now is None or now[0] != before[0] or now[1] - before[1] > IDLE_S:
            since, before = time.time(), now or (0, 0.0)
        elif time.time() - since >= QUIET_S:
            return Standby(now[0], max(0.0, since - first_t))
        time.sleep(0.1)  # between two looks
    return None


def _standby(launcher: Resilient) -> tuple[int, float] | None:
    """Process id, and processor time with that of processes below."""
    for process in launcher.family():
        with suppress(psutil.NoSuchProcess):
            if process.name().startswith("standby"):
                spent = [each.cpu_times() for each in (process, *process.children(recursive=True))]
                return process.pid, sum(each.user + each.system for each in spent)
    return None
