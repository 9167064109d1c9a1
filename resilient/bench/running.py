"""Running cells: each as `resilient run` in a process of its own, so that one that dies is a row that says why."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from resilient import clock, ledger
from resilient.bench.energy import Meter
from resilient.bench.grid import Cell, Grid
from resilient.bench.rows import Row, State, looked_into, measured, window
from resilient.campaign import machine_layout
from resilient.config import Config, ConfigError, Layout, load
from resilient.decided import decided
from resilient.driver.display import describe
from resilient.driver.lease import PATIENCE_S, holder
from resilient.exits import EnvironmentUnusable, Exit
from resilient.imports import shadowing
from resilient.processes import driver_pid, out_of_reach
from resilient.slurm.allocation import JOB
from resilient.steptime.asking import asked, crowding
from resilient.steptime.work import of_step
from resilient.throughput import bubble

RUN = "run"
STOP_S = 20.0  # for a campaign to end once it was told to; then it is killed
POLL_S = 0.05
WHY = 300  # characters


def run_cell(cell: Cell, grid: Grid, directory: Path) -> Row:
    """Run a cell and measure it. What is in its directory from before goes.

    Args:
        directory: of this cell; keeps the campaign's config, output and run directory.

    Raises:
        EnvironmentUnusable: an earlier campaign there does not end.
    """
    began = time.monotonic()
    end_leftover(directory / RUN)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    path = directory / "config.yaml"
    own = {"name": f"{grid.name}-{cell.number}", "run_dir": str(directory.absolute() / RUN)}
    path.write_text(yaml.safe_dump({**cell.config, **own}, sort_keys=False))
    try:
        config, _ = decided(load(path))
        layout = machine_layout(config)
        predicted = _predicted(config, layout)
    except ConfigError as error:
        words = "; ".join(f"{problem.key}: {problem.message}" for problem in error.problems)
        return Row(cell.mark, cell.keys, "refused", words[:WHY], took_s=time.monotonic() - began)
    apart = layout.nodes > 1 and JOB in os.environ  # what other hosts take is not measured here
    with Meter([] if apart else None) as meter:
        code = _campaign(path, directory / "output.txt", grid.limit_s)
        meter.sample(clock.now())
    row = _row(cell, grid, directory, code, meter)
    shutil.rmtree(directory / RUN / "checkpoints", ignore_errors=True)
    return Row(**{**row, **predicted, "world_size": layout.world_size, "took_s": time.monotonic() - began})


def _predicted(config: Config, layout: Layout) -> dict[str, Any]:
    """What the entry point's module says of the first rank's memory and of the step's work, where it can; fields of a row."""
    ranks = asked(config, layout)
    if not ranks:
        return {}
    return {
        "predicted_bytes": ranks[0].peak_bytes,
        "predicted_state_bytes": ranks[0].state_bytes,
        "bubble": bubble(config, layout),
        "work": of_step(config, layout, ranks, crowding(config, layout)),
    }


def _campaign(config: Path, output: Path, limit_s: float) -> int | None:
    """The exit code of a campaign; None if it was ended at the limit."""
    with output.open("wb") as file:
        process = subprocess.Popen(
            [*shadowing.running("resilient"), "run", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **clock.environment()},
            start_new_session=True,
        )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        _end(process.pid)
        return Exit.OK if process.wait() == Exit.OK else None  # it may have been at its end
    finally:
        if process.poll() is None:
            _end(process.pid)
            process.wait()


def _end(pid: int) -> None:
    """Tell a driver to stop, and kill it if it does not; its agents go with it."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_S
        while time.monotonic() < deadline and _there(pid):
            time.sleep(POLL_S)
        os.kill(pid, signal.SIGKILL)


def _there(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def end_leftover(run_dir: Path) -> None:
    """End a campaign that a command which was killed has left behind. Raises EnvironmentUnusable."""
    owner = holder(run_dir, PATIENCE_S)
    if owner is None:
        return
    pid = driver_pid(owner)
    if pid is None:
        raise EnvironmentUnusable(f"{run_dir} is in use by {out_of_reach(owner)}")
    _end(pid)
    deadline = time.monotonic() + STOP_S
    while holder(run_dir) is not None:
        if time.monotonic() > deadline:
            raise EnvironmentUnusable(f"{run_dir} is in use by {owner}, which does not end")
        time.sleep(POLL_S)


def _row(cell: Cell, grid: Grid, directory: Path, code: int | None, meter: Meter) -> dict[str, Any]:
    """The fields of a row."""
    run_dir = directory / RUN
    metrics = list(ledger.read_metrics(run_dir / ledger.METRICS))
    faults = [line for line in ledger.read_events(run_dir / ledger.EVENTS) if line["event"] == "fault"]
    fields: dict[str, Any] = {"mark": cell.mark, "keys": dict(cell.keys), "faults": len(faults)}
    found = measured(metrics, grid.warmup_steps) | looked_into(metrics)
    if code != Exit.OK or "step_s" not in found:
        state: State = "timed_out" if code is None else "failed"
        return {**fields, "state": state, "why": _why(code, faults, directory / "output.txt", grid)}
    fields |= {"state": "measured", **found}
    seen = window(metrics, grid.warmup_steps)
    if seen is not None and (joules := meter.joules(seen[0], seen[1])) is not None:
        fields |= {"joules": joules, "joules_per_token": joules / seen[2] if seen[2] else None, "energy_from": meter.source}
    return fields


def _why(code: int | None, faults: Sequence[Mapping[str, Any]], output: Path, grid: Grid) -> str:
    """In a line: the last fault, else the last that was printed."""
    if faults:
        words = describe(faults[-1]) or ""
    else:
        lines = output.read_text(errors="replace").strip().splitlines()
        words = lines[-1] if lines else "it has printed nothing"
    ended = f"not done after {grid.limit_s:g} s" if code is None else f"exit code {code}"
    return f"{ended}: {' '.join(words.split())}"[:WHY]
