"""Values of a script that grow while it trains, on all ranks or on one of them: snapshots go on, with all of them."""

import logging
import os
from typing import Any

import pytest
import torch
from attempts import AT, ENTRY, LATE, TOTAL, Attempts, Growing, run, session_of_two
from checkpoint_processes import run_ranks
from lone_daemon import LoneDaemon

from checkpoint.protocol import Held, Skipped
from resilient.state import reviews
from resilient.state.reviews import Reviews


def test_a_value_that_grows_is_in_the_snapshots_to_the_end(attempts: Attempts, caplog: pytest.LogCaptureFixture):
    attempts.begin()
    first = Growing()
    snapshots = first.attach()
    for step in snapshots.steps(AT):
        assert step != LATE or snapshots.save()
        first.step()
    assert not caplog.text
    attempts.held(AT)
    attempts.begin(AT)
    second = Growing()
    assert run(second, second.attach()) == list(range(AT, TOTAL))
    assert [each.removesuffix(ENTRY) for each in second.extra["all"]] == [f"{step}" for step in range(TOTAL)]


# -- two ranks -----------------------------------------------------------------------------------------------------------


def train(rank: int, session: str, generation: int, total: int, how: dict[str, Any]) -> tuple[int, int, list[bool], list[str]]:
    """Rank 1 keeps more and more, and rank 0 nothing.

    Args (`how`): review_s: between reviews. saves: after each step. jumps: this step alone brings it all. spoils: from this step on
    rank 0 has what cannot be saved. breaks: in this step rank 0 does so. late: by rank, from when on the optimizer keeps states
    of a second layer. level: of what the log says.

    Returns how much of it was there at the start, the steps that are done, of which the rank has snapshots, and what the log said.
    """
    from resilient.state import announcement, attach

    os.environ.update(RANK=str(rank), WORLD_SIZE="2", RESILIENT_SESSION=session, RESILIENT_GENERATION=str(generation))
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("resilient").addHandler(handler)
    logging.getLogger("resilient").setLevel(how.get("level", logging.WARNING))
    reviews.REVIEW_S = how.get("review_s", 0.0)
    announcement.MEETING_S = 1.0
    announcement.READY_S = 60.0  # or a busy machine leaves the next snapshot out
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    model[0].register_buffer("mask", torch.ones(3))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    extra: dict[str, Any] = {"all": []}
    snapshots = attach.attach(model=model, optimizer=optimizer, extra=extra)
    there, saved = len(extra["all"]), []
    for step in snapshots.steps(total):
        if step and how.get("saves"):
            saved.append(snapshots.save())
        if rank == 1:
            extra["all"] += [ENTRY] * (20 if step == how["jumps"] else 0) if "jumps" in how else [ENTRY]
        if rank == 0 and step == how.get("spoils"):
            extra["spoilt"] = print
        if rank == 0 and "breaks" in how and step == how["breaks"][0]:
            how["breaks"][1](model[0], optimizer)
        model[1].requires_grad_(step >= how.get("late", (0, 0))[rank])
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        torch.distributed.barrier()
    return there, snapshots.step, saved, said


def goes_on(daemon: LoneDaemon, step: int) -> list[int]:
    """How many entries the ranks of a second generation have, which goes on from this step."""
    while daemon.wait_for(Held).shard.key.step != step:
        pass
    results = run_ranks(2, train, session_of_two(daemon, generation=2, step=step), 2, step, {})
    return [there for there, *_ in results]


@pytest.mark.parametrize("saves", [True, False], ids=["saves", "due"])
def test_a_value_that_grows_on_one_rank_alone_is_in_all_snapshots(daemon: LoneDaemon, saves: bool):
    session = session_of_two(daemon, ram_every=TOTAL if saves else 1)
    for _, done, saved, said in run_ranks(2, train, session, 1, TOTAL, {"saves": saves}):
        assert done == TOTAL and all(saved), (saved, said)
        assert not [each for each in said if "snapshot" in each], said
    assert goes_on(daemon, TOTAL) == [0, TOTAL]


def test_a_value_that_outgrows_its_room_between_two_reviews_costs_the_snapshots_until_the_next_one(daemon: LoneDaemon):
    session = session_of_two(daemon, ram_every=1)
    (_, done, _, calm), (_, others, _, said) = run_ranks(2, train, session, 1, TOTAL, {"review_s": 1e3, "jumps": 4})
    assert done == others == TOTAL
    assert not calm
    (warning,) = said
    assert "the snapshot of step 5 is left out" in warning and "the largest part is extra['all'] with 320" in warning, said
    assert goes_on(daemon, TOTAL) == [0, 20], "the last step is saved all the same"
    missed = [news for news in daemon.news if isinstance(news, Skipped) and "no buffer" not in news.reason]
    assert missed[0].step >= 5 and "rank 1 has left it out: " in missed[0].reason and "extra['all']" in missed[0].reason


def test_a_rank_that_can_save_nothing_holds_up_no_review(daemon: LoneDaemon):
    session = session_of_two(daemon, ram_every=1)
    results = run_ranks(2, train, session, 1, TOTAL, {"spoils": 2, "saves": True})
    assert [done for _, done, _, _ in results] == [TOTAL, TOTAL]
    assert any("extra['spoilt'] is a builtins.builtin_function_or_method" in each for each in results[0][3])


def sparse(layer: torch.nn.Module, _: torch.optim.Optimizer) -> None:
    layer.mask = torch.eye(3).to_sparse()


def on_meta(layer: torch.nn.Module, _: torch.optim.Optimizer) -> None:
    layer.mask = torch.ones(3, device="meta")


def longer(layer: torch.nn.Module, _: torch.optim.Optimizer) -> None:
    layer.mask = torch.ones(4)


def gone(layer: torch.nn.Module, _: torch.optim.Optimizer) -> None:
    del layer.mask


def set_to_none(layer: torch.nn.Module, _: torch.optim.Optimizer) -> None:
    layer.mask = None


def option(_: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["note"] = print


BREAKS = [
    (sparse, "model/0.mask is a sparse_coo tensor"),
    (on_meta, "model/0.mask is on the meta device"),
    (longer, "model/0.mask was float32 (2, 3), and is float32 (2, 4)"),
    (gone, "'mask' is gone"),
    (set_to_none, "a tensor is a NoneType now"),
    (option, "optimizer 0.param_groups[0]['note'] is a builtins.builtin_function_or_method"),
]


@pytest.mark.parametrize(("breaks", "why"), BREAKS)
@pytest.mark.parametrize("step", [2, LATE], ids=["before", "at_once"])
def test_a_rank_that_gives_up_holds_up_no_other_whose_value_outgrows_its_room(daemon: LoneDaemon, breaks: Any, why: str, step: int):
    how = {"breaks": (step, breaks), "jumps": LATE, "saves": True}
    results = run_ranks(2, train, session_of_two(daemon), 1, TOTAL, how)
    assert [done for _, done, _, _ in results] == [TOTAL, TOTAL]
    (_, _, saved, said), (_, _, _, others) = results
    assert saved == [True] * step + [False] * (TOTAL - 1 - step), said
    (given_up,) = [each for each in said if "no snapshots" in each]
    assert f"from step {step + 1} on" in given_up and why in given_up
    assert not [each for each in others if "no snapshots" in each]


def test_once_a_rank_has_given_up_no_room_is_made(daemon: LoneDaemon):
    how = {"breaks": (2, option), "jumps": LATE, "saves": True, "level": logging.INFO}
    for *_, said in run_ranks(2, train, session_of_two(daemon), 1, TOTAL, how):
        assert not [each for each in said if "gets more room" in each]


@pytest.mark.parametrize(("breaks", "why"), BREAKS[:2] + BREAKS[3:5])
def test_what_one_rank_cannot_save_when_all_keep_other_states_costs_all_their_snapshots(daemon: LoneDaemon, breaks: Any, why: str):
    how = {"breaks": (LATE, breaks), "late": (LATE, LATE), "saves": True}
    for _, done, saved, said in run_ranks(2, train, session_of_two(daemon), 1, TOTAL, how):
        assert done == TOTAL and saved == [True] * LATE + [False] * (TOTAL - 1 - LATE)
        (given_up,) = [each for each in said if "no snapshots" in each]
        assert f"from step {LATE + 1} on" in given_up and why in given_up


@pytest.mark.parametrize("late", [(4, 4), (4, 6), (5, 4)])
def test_a_value_grows_while_optimizers_come_to_keep_other_states_on_one_rank_after_the_other(
    daemon: LoneDaemon, late: tuple[int, int]
):
    results = run_ranks(2, train, session_of_two(daemon), 1, TOTAL, {"saves": True, "late": late})
    for _, done, saved, said in results:
        assert done == TOTAL and saved[-1], (saved, said)
        assert not [each for each in said if "no snapshots" in each], said
    assert goes_on(daemon, TOTAL) == [0, TOTAL]


def test_reviews_come_once_in_a_while_at_a_step_that_is_agreed_on():
    ours, theirs = Reviews(), Reviews()
    assert ours.due(1)
    proposals = [ours.proposal(1, 0.0), theirs.proposal(1, 0.0)]
    assert proposals == [1, 1], "nothing is known of how long a step takes"
    for each in (ours, theirs):
        each.settle(1, 0.0, proposals)
    assert not ours.due(1) and ours.due(2)
    proposals = [ours.proposal(11, 1.0), theirs.proposal(11, 2.0)]
    assert proposals == [100, 50]
    for each in (ours, theirs):
        each.settle(11, 1.0, proposals)
        assert not each.due(60) and each.due(61), "the most careful rank decides"
    assert ours.proposal(12, 1.0 + 60.0) == 1
