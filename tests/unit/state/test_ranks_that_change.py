"""Ranks whose state changes while they train: at the same step, one after the other, or one of them alone."""

import logging
import os

import pytest
import torch
from attempts import LATE, TOTAL, session_of_two
from checkpoint_processes import run_ranks
from lone_daemon import LoneDaemon

from checkpoint.protocol import Held, Skipped

NEVER, NEVER_S = TOTAL, 1e4


def train(rank: int, session: str, late: tuple[int, int], meeting_s: float) -> tuple[int, list[bool], list[str]]:
    """Two layers, of which the second one is trained from a step on that each rank has for itself.

    Returns the steps that are done, of which of them this rank has a snapshot, and what the log said.
    """
    from resilient.state import announcement, attach

    os.environ.update(RANK=str(rank), WORLD_SIZE="2", RESILIENT_SESSION=session, RESILIENT_GENERATION="1")
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("resilient").addHandler(handler)
    announcement.MEETING_S = meeting_s
    attach.LAST_WAIT_S = NEVER_S  # a rank that waits for a buffer waits longer than the test does
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    snapshots = attach.attach(model=model, optimizer=optimizer)
    saved = []
    for step in snapshots.steps(TOTAL):
        model[1].requires_grad_(step >= late[rank])
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        torch.distributed.barrier()
        if step:
            saved.append(snapshots.save())
    return snapshots.step, saved, said


@pytest.mark.parametrize("late", [(LATE, LATE), (LATE, LATE + 1), (LATE + 2, LATE)])
def test_ranks_that_change_one_after_the_other_meet_at_the_step_at_which_all_have(daemon: LoneDaemon, late: tuple[int, int]):
    results = run_ranks(2, train, session_of_two(daemon), late, 1.0)
    for done, saved, said in results:
        assert done == TOTAL, said
        assert saved[-1], (saved, said)
        assert not [each for each in said if "no snapshots" in each]
    while daemon.wait_for(Held).shard.key.step != TOTAL:
        pass


def test_a_rank_that_changes_alone_costs_snapshots_and_no_training(daemon: LoneDaemon):
    (done, saved, said), (others, copied, _) = run_ranks(2, train, session_of_two(daemon), (LATE, NEVER), 0.3)
    assert done == others == TOTAL
    assert saved == [True] * (LATE - 1) + [False] * (TOTAL - LATE)
    assert copied[: LATE - 1] == saved[: LATE - 1]
    assert [each for each in said if "no snapshots from step 6 on" in each and "those of others do not" in each]
    daemon.sync(1)
    missed = {news.step: news.reason for news in daemon.news if isinstance(news, Skipped)}
    assert missed[LATE + 1] == "rank 0 has left it out"
    why = "the optimizers of some ranks keep states by now that those of others do not"
    assert missed[TOTAL - 1] == f"rank 0 has left it out: {why}"


def stages(rank: int, session: str) -> str:
    """What the stages of a pipeline that a script makes by itself, one on each rank, are told after their first step."""
    import resilient
    from resilient import worker

    os.environ.update(RANK=str(rank), WORLD_SIZE="2", RESILIENT_SESSION=session, RESILIENT_GENERATION="1")
    model = torch.nn.Sequential(torch.nn.Linear(4, 2) if rank == 0 else torch.nn.Linear(2, 1))
    snapshots = resilient.attach(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.01))
    try:
        snapshots.after_step()
    except worker.UnrecoverableError as error:
        return str(error)
    return ""


def test_ranks_with_different_models_are_told_so_in_a_sentence(daemon: LoneDaemon):
    first, second = run_ranks(2, stages, session_of_two(daemon))
    assert first == second
    assert "rank 0 has model/0.weight float32 (2, 4) where rank 1 has model/0.weight float32 (1, 2)" in first
