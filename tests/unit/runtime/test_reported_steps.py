"""Time of steps whose metrics the script reports: its lines say as much of it as the runtime's own would."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from resilient import worker
from resilient.account import account
from resilient.heartbeat.agent_side import AgentRegion
from resilient.heartbeat.layout import NOT_BEATEN
from resilient.heartbeat.worker_side import WorkerRegion
from resilient.script.progress import Progress

STEP_S, STEPS = 0.5, 40


class Rank:
    """One that trains by a clock that its steps advance, and the lines of metrics that it has told."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.began = 1000.0
        monkeypatch.setattr("resilient.clock.now", lambda: self.now)
        self.agent = AgentRegion(path)
        region = WorkerRegion(path)
        self.progress = Progress(region, first_rank=True, on_stop="raise")
        monkeypatch.setattr(worker, "_region", region)
        monkeypatch.setattr(worker, "_progress", self.progress)
        model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(model.parameters())
        self.optimizer.register_step_post_hook(self.progress.after_step)

    def trains(self, *, attached: bool, every: int | None) -> None:
        """Args: attached: it beats after its step, as `attach` does; every: so many steps it reports metrics, within the step."""
        if attached:
            worker.init()
            worker.loop_comes()
        for step in range(1, STEPS + 1):
            self.now += STEP_S
            self.optimizer.step()
            if every is not None and step % every == 0:
                worker.report({"step": step, "loss": 0.0})
            if attached:
                worker.beat(step)
        self.progress.ends()

    def lines(self) -> list[dict[str, Any]]:
        return [{"t": record.t, "generation": 1, **record.fields} for record in self.agent.drain() if record.event is None]


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    made = Rank(tmp_path / "region", monkeypatch)
    yield made
    made.agent.close()


@pytest.mark.parametrize("every", [None, 1, 10], ids=["reports_nothing", "reports_each_step", "reports_each_tenth"])
@pytest.mark.parametrize("attached", [False, True], ids=["unmodified", "attached"])
def test_steps_are_productive_whether_a_script_attaches_reports_both_or_neither(rank: Rank, attached: bool, every: int | None):
    rank.trains(attached=attached, every=every)
    lines = rank.lines()
    assert [line["step"] for line in lines if "loss" in line] == ([] if every is None else list(range(every, STEPS + 1, every)))
    assert all(line["step_s"] == pytest.approx(STEP_S) for line in lines if line.get("step_s"))
    events: list[dict[str, Any]] = [
        {"t": rank.began, "event": "run_started", "generation": 1},
        {"t": rank.began, "event": "generation_started", "generation": 1, "world_size": 1, "resumed_step": 0},
        {"t": rank.now, "event": "run_finished", "generation": 1, "exit_code": 0},
    ]
    seconds = account(events, lines).seconds
    assert seconds["productive"] >= (STEPS - 2) * STEP_S, "nobody knows when the first began; the second may end after its report"
    assert seconds["idle"] == pytest.approx(0.0)


def test_lines_that_cover_several_steps_say_so_beside_a_time_of_the_scripts_own_and_a_second_line_of_a_step_covers_none(rank: Rank):
    worker.init()
    for step in range(1, 13):
        rank.now += STEP_S
        worker.beat(step)
        if step % 4 == 0:
            worker.report({"step": step, "step_s": 0.4})
            rank.now += 5.0
            worker.report({"step": step, "val": 1.0})
    lines = rank.lines()
    assert [line["steps"] for line in lines if line.get("step_s") == 0.4][1:] == [4, 4]
    assert [line.get("step_s") for line in lines if "val" in line] == [None] * 3


def test_what_a_script_says_of_time_by_itself_is_kept(rank: Rank):
    worker.init()
    for step in range(1, 6):
        rank.now += STEP_S
        worker.report({"step": step, "step_s": 0.25} if step < 4 else {"step": step, "steps": 7})
        worker.beat(step)
    lines = rank.lines()
    assert [(line["step_s"], line.get("steps")) for line in lines[:3]] == [(0.25, None)] * 3
    assert [(line["step_s"], line["steps"]) for line in lines[3:]] == [(pytest.approx(STEP_S), 7)] * 2


def test_however_many_steps_optimizers_take_the_first_step_of_an_attached_script_is_its_loop_s(rank: Rank):
    """As in PPO, or with a discriminator: the optimizer's state has three times as many steps."""
    for _ in range(3):  # as one that looks for a learning rate does
        rank.optimizer.step()
    worker.init()
    worker.loop_comes()
    for step, before in ((43, NOT_BEATEN), (44, 43)):
        for _ in range(3):
            rank.now += STEP_S
            rank.optimizer.step()
            assert rank.agent.activity().step == before
        worker.beat(step)
        assert rank.agent.activity().step == step
