"""A rank whose script says nothing, from the agent's side and from its own; a clock that a test moves."""

import time
from pathlib import Path
from typing import Any

import torch

from resilient.heartbeat.agent_side import AgentRegion
from resilient.heartbeat.worker_side import WorkerRegion
from resilient.script.progress import LINES_S, Progress


class Watched:
    """A rank that is watched, from the agent's side and from its own."""

    def __init__(self, path: Path, **more: Any) -> None:
        self.agent = AgentRegion(path)
        self.region = WorkerRegion(path)
        self.progress = Progress(self.region, **{"first_rank": True, "on_stop": "raise", **more})
        self.model = torch.nn.Linear(4, 4)

    def optimizer(self, kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> torch.optim.Optimizer:
        made = kind(self.model.parameters(), lr=0.1)  # type: ignore[call-arg]
        made.register_step_post_hook(self.progress.after_step)
        return made

    def step(self, *optimizers: torch.optim.Optimizer) -> None:
        for optimizer in optimizers:
            self.model(torch.ones(4)).sum().backward()
            optimizer.step()

    def told(self, event: str | None) -> list[dict[str, Any]]:
        return [dict(record.fields) for record in self.agent.drain() if record.event == event]


class Time:
    """A clock that goes on when it is told to."""

    def __init__(self) -> None:
        self.now = time.time()

    def passes(self) -> None:
        """So much that the next step has a line of its own."""
        self.now += LINES_S + 0.1
