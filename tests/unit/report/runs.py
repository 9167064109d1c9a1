"""Run directories as a campaign would have left them, of any length, made in a moment."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

KINDS = ("exit", "hang", "node_lost", "storage")
HOSTS = [f"n{number}" for number in range(8)]
LAYOUT = {"nodes": 8, "world_size": 32, "tp": 4, "pp": 2, "dp": 4}
BEGAN_T = 1.7e9
PAUSE_S = 3600.0  # between two jobs
STEP_S = 0.9
DOWN_S = 1.9


def made(directory: Path, *, steps: int, faults: int, jobs: int, snapshot_every: int = 50) -> Path:
    """A campaign that has reached its target: jobs one after the other, faults at even distances."""
    directory.mkdir(parents=True, exist_ok=True)
    events: list[str] = []
    metrics: list[str] = []
    t, generation, happened, job = BEGAN_T, 0, 0, 0

    def event(what: str, at: float, /, **fields: object) -> None:
        events.append(json.dumps({"t": at, "event": what, "generation": generation, "host": "n0", **fields}))

    def generation_started(at: float, step: int) -> None:
        members = list(range(len(HOSTS)))
        fields: Mapping[str, object] = {"nodes": HOSTS, "members": members, "world_size": 32, "layout": LAYOUT, "tier": "memory"}
        event("generation_started", at, **fields, resumed_step=step)

    for step in range(1, steps + 1):
        if (step - 1) % math.ceil(steps / jobs) == 0:
            if job:
                event("run_finished", t, exit_code=75, step=step - 1)
                t += PAUSE_S
            job += 1
            event("run_started", t, name="made", target_step=steps, layout=LAYOUT)
            if job > 1:
                event("config_changed", t, key="optimizer.lr", **{"from": job, "to": job + 1, "accepted": False})
            generation += 1
            generation_started(t + 1, step - 1)
            t += 5
        t += STEP_S
        loss = 2 + 8 * math.exp(-5 * step / steps) + 0.1 * math.sin(step)
        speed = 4551 + 50 * math.sin(step / 100)
        metrics.append(
            f'{{"step": {step}, "loss": {loss!r}, "lr": 0.0001, "samples": {16 * step}, "tokens": {4096 * step}, '
            f'"step_s": {STEP_S}, "tokens_per_s": {speed!r}, "data_s": 0.0016, "generation": {generation}, "t": {t!r}}}'
        )
        if step % snapshot_every == 0:
            event("snapshot", t, step=step, tier="memory", bytes=1 << 24, stall_s=0.004, write_s=0.01)
        if step % 1000 == 0:
            event("committed", t, step=step, tier="durable", bytes=1 << 24, files=81)
        if faults and step % max(1, steps // faults) == 0 and happened < faults:
            node, kind = happened * 7 % 8, KINDS[happened % 4]
            happened += 1
            name = f"g{generation}-1"
            said = {
                "detail": "SIGKILL",
                "evidence": "process 28609 ended by SIGKILL",
                "detect_s": 0.2,
                "class": None,
                "phase": "step",
            }
            event("fault", t, fault_id=name, kind=kind, ranks=[4 * node], nodes=[node], step=step + 1, **said)
            event("action", t, fault_id=name, name="restart_workers", reason="all ranks start again")
            generation += 1
            generation_started(t + 0.5, step)
            t += 1.0
            event("recovered", t + STEP_S, fault_id=name, step=step + 1, downtime_s=DOWN_S, lost_steps=1)
    event("run_finished", t, exit_code=0, step=steps)
    (directory / "events.jsonl").write_text("\n".join(events) + "\n")
    (directory / "metrics.jsonl").write_text("\n".join(metrics) + "\n")
    return directory
