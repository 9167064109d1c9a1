"""Ledgers and metrics of campaigns that have never run, as long as one likes: lines as a driver writes them.

python tests/long_campaign.py RUN_DIR [--steps 1000000] [--faults 10000] [--jobs 200]
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STEP_S = 0.4
BEGAN_T = 1_780_000_000.0

Written = tuple[str, dict[str, Any]]
"""The name of the file, and the line."""


def campaign(steps: int, faults: int, jobs: int, seed: int = 0, *, ends: bool = False) -> Iterator[Written]:
    """The lines in the order in which they are written; a snapshot in RAM at each step. Args: ends: its last job has finished."""
    chance = random.Random(seed)
    breaks = sorted(chance.sample(range(2, steps), faults))
    stops = set(range(steps // jobs, steps, max(1, steps // jobs)))
    t, generation, step = BEGAN_T, 0, 0

    def event(name: str, /, **fields: Any) -> Written:
        return "events.jsonl", {"t": t, "event": name, "generation": generation, "host": "n1", **fields}

    def job() -> Iterator[Written]:
        nonlocal t
        yield event("run_started", name="long", run_dir="/runs/long", pid=77, target_step=steps, layout={"tp": 1, "dp": 2})
        t += 3.0
        yield from started()

    def started() -> Iterator[Written]:
        nonlocal generation
        generation += 1
        yield event("generation_started", nodes=["n1"], world_size=2, layout={"tp": 1, "dp": 2}, resumed_step=step, tier="ram")

    yield from job()
    at = 0
    while step < steps:
        step += 1
        t = round(t + STEP_S, 6)
        numbers = {
            "step": step,
            "loss": 3.0 + chance.random(),
            "grad_norm": 0.7,
            "lr": 3e-4,
            "samples": step * 16,
            "tokens": step * 4096,
        }
        pace = {"step_s": STEP_S - 0.001, "data_s": 0.002, "tokens_per_s": 10240.0, "mfu": 0.31}
        yield "metrics.jsonl", {**numbers, **pace, "generation": generation, "t": t}
        t = round(t + 0.001, 6)
        yield event("snapshot", step=step, tier="ram", bytes=76_000_000, stall_s=0.0004, write_s=0.031)
        if step % 500 == 0:
            yield event("committed", step=step, tier="durable", bytes=76_000_000, files=12)
        if at < len(breaks) and step >= breaks[at]:
            at += 1
            t += 0.3
            where = {"ranks": [1], "nodes": [0], "step": step, "phase": "forward"}
            about = {"detail": "rank 1 ended by SIGKILL", "evidence": "Killed", "detect_s": 0.3, "class": None}
            fault_id = f"g{generation}-{at}"
            yield event("fault", fault_id=fault_id, kind=chance.choice(["exit", "hang", "exception"]), **where, **about)
            yield event("action", fault_id=fault_id, name="restart_workers", reason="from the newest snapshot in RAM")
            t += 0.5
            step -= 1
            yield from started()
            yield event("recovered", fault_id=fault_id, step=step + 1, downtime_s=0.9, lost_steps=1)
        elif step in stops:
            stops.discard(step)
            yield event("run_finished", exit_code=75, step=step)
            t += 60.0
            yield from job()
    if ends:
        yield event("run_finished", exit_code=0, step=step)


def write(run_dir: Path, lines: Iterator[Written]) -> None:
    """Write them as a driver does."""
    run_dir.mkdir(parents=True, exist_ok=True)
    files = {name: (run_dir / name).open("a") for name in ("events.jsonl", "metrics.jsonl")}
    for name, line in lines:
        files[name].write(json.dumps(line) + "\n")
    for file in files.values():
        file.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--faults", type=int, default=10_000)
    parser.add_argument("--jobs", type=int, default=200)
    args = parser.parse_args()
    write(args.run_dir, campaign(args.steps, args.faults, args.jobs))


if __name__ == "__main__":
    main()
