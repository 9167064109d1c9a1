"""Ranks that train alike at first, and later each for itself, as local SGD has it: no snapshot is put together from several."""

import json
import logging
import os
from typing import Any

import pytest
import torch
from attempts import ENTRY, session_of_two
from checkpoint_processes import run_ranks
from lone_daemon import LoneDaemon

from checkpoint.protocol import Held
from resilient.state import reviews
from resilient.state.fingerprint import Fingerprint, samples

EVERY = 3  # steps between two snapshots; before the first two of them the ranks compare what they have
ALIKE, LAST = 2 * EVERY, 3 * EVERY
LONG = 5 * ENTRY  # more than there is room for at first

Weights = dict[int, tuple[list[float], float]]


def train(
    rank: int, session: str, generation: int, ranks: int, parts: int, saves: bool, meets: bool = False
) -> tuple[Weights, list[str]]:
    """From step `parts` on each rank trains for itself; a buffer is each rank's own at all times.

    Args:
        saves: the last step.
        meets: by then weights are the same again, and what is saved beside them is announced anew.

    Returns weights and buffer after each step that it has seen, the one that it went on from first, and what the log said.
    """
    from resilient.state import announcement, attach

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), RESILIENT_SESSION=session, RESILIENT_GENERATION=str(generation))
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("resilient").addHandler(handler)
    reviews.REVIEW_S = 1e9
    announcement.READY_S = 60.0  # or a busy machine leaves the next snapshot out
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(40, 40) for _ in range(4)))
    model.register_buffer("seen", torch.zeros(()))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    extra = {"all": ""}
    snapshots = attach.attach(model=model, optimizer=optimizer, extra=extra)
    found: Weights = {}

    def see() -> None:
        weights = [weight for each in model.parameters() for weight in each.flatten().tolist()]
        found[snapshots.step] = weights, model.seen.item()

    see()
    while snapshots.step < LAST:
        snapshots.begin()
        noise = torch.Generator().manual_seed(100 * snapshots.step + (rank if snapshots.step >= parts else 0))
        for each in model.parameters():
            each.grad = torch.randn(each.shape, generator=noise)
        optimizer.step()
        model.seen += rank + 1
        torch.distributed.barrier()
        snapshots.after_step()
        see()
    if meets:
        extra["all"] = LONG
        with torch.no_grad():
            for each in (*model.parameters(), *(state["momentum_buffer"] for state in optimizer.state.values())):
                each.zero_()
    if saves:
        snapshots.step += meets
        assert snapshots.save()
    snapshots.leave()
    return found, said


def trained(daemon: LoneDaemon, parts: int, *, saves: bool = False, meets: bool = False) -> list[tuple[Weights, list[str]]]:
    """What a first generation of two ranks came to, once its last snapshot is held."""
    results = run_ranks(2, train, session_of_two(daemon, ram_every=EVERY), 1, 2, parts, saves, meets)
    while daemon.wait_for(Held).shard.key.step != LAST + meets:
        pass
    return results


@pytest.mark.parametrize("parts", [EVERY, ALIKE], ids=["due", "saved"])
def test_ranks_that_come_to_differ_go_on_each_with_its_own_from_the_next_time_that_they_compare(daemon: LoneDaemon, parts: int):
    results = trained(daemon, parts, saves=parts == ALIKE)
    (before, said), (others, _) = results
    assert before[LAST] != others[LAST]
    (warning,) = said
    assert "differ from rank to rank by now, and are saved for each from this step on" in warning
    again = run_ranks(2, train, session_of_two(daemon, generation=2, step=LAST), 2, 2, parts, False)
    assert [found for found, _ in again] == [{LAST: before[LAST]}, {LAST: others[LAST]}]


def test_ranks_that_have_differed_are_saved_each_also_where_they_are_the_same_when_more_is_announced(daemon: LoneDaemon):
    trained(daemon, EVERY, saves=True, meets=True)
    state = json.loads((daemon.held_path(LAST + 1) / "zarr.json").read_text())["attributes"]["resilient"]["state"]["attached"]
    assert state["document_bytes"] > len(LONG) and state["own_parameters"]


def test_a_snapshot_of_ranks_that_differed_unnoticed_is_passed_over_for_an_older_one(daemon: LoneDaemon):
    (before, said), (others, _) = trained(daemon, ALIKE)
    assert not said
    assert before[ALIKE][0] == others[ALIKE][0] and before[LAST][0] != others[LAST][0]
    again = run_ranks(2, train, session_of_two(daemon, generation=2, step=LAST, older=ALIKE), 2, 2, ALIKE, False)
    assert [found[ALIKE] for found, _ in again] == [before[ALIKE], others[ALIKE]]


@pytest.mark.parametrize("ranks", [1, 2])
def test_where_it_is_the_only_one_the_attempt_ends_with_the_reason(daemon: LoneDaemon, ranks: int):
    trained(daemon, ALIKE)
    for error in run_ranks(ranks, train, session_of_two(daemon, generation=2, step=LAST, ranks=ranks), 2, ranks, ALIKE, False):
        assert type(error).__name__ == "UnrecoverableError" and "it is no rank's state" in str(error), error


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_that_are_alike_go_on_on_any_number_of_ranks(daemon: LoneDaemon, ranks: int):
    (before, said), (others, _) = trained(daemon, LAST, saves=True)
    assert not said
    session = session_of_two(daemon, generation=2, step=LAST, ranks=ranks)
    again: list[Any] = run_ranks(ranks, train, session, 2, ranks, LAST, False)
    assert [found for found, _ in again] == [{LAST: each[LAST]} for each in (before, others)[:ranks]]


# -- the fingerprint -----------------------------------------------------------------------------------------------------


def made() -> list[torch.Tensor]:
    torch.manual_seed(3)
    numbers = [torch.randn(shape) for shape in [(), (5,), (2, 3), (64, 64), (70, 3, 3, 3), (0, 4)]]
    others = [torch.randn(40).bfloat16(), torch.randn(40, dtype=torch.complex64), torch.ones(40, dtype=torch.bool)]
    return [*numbers, *others]


def test_a_fingerprint_is_that_of_the_same_elements_however_they_lie():
    mine, theirs = made(), made()
    theirs[3] = theirs[3].t().contiguous().t()
    theirs[4] = theirs[4].to(memory_format=torch.channels_last)
    first, second = (Fingerprint([lambda each=each: each for each in tensors]) for tensors in (mine, theirs))
    assert first.read() == second.read() == first.read() != 0


@pytest.mark.parametrize("place", [place for place, each in enumerate(made()) if each.numel()])
@pytest.mark.parametrize("replaced", [False, True])
def test_a_fingerprint_changes_with_any_tensor_in_place_or_replaced(place: int, replaced: bool):
    tensors = made()
    fingerprint = Fingerprint([lambda place=place: tensors[place] for place in range(len(tensors))])
    before = fingerprint.read()
    if replaced:
        tensors[place] = torch.zeros_like(tensors[place])
    else:
        tensors[place].zero_()
    after = fingerprint.read()
    assert after != before
    assert fingerprint.local_shard(1, 2).data.tolist() == [[after]]


@pytest.mark.parametrize("shape", [(100,), (3, 100), (100, 3), (64, 64), (30, 20, 10)])
def test_samples_are_from_everywhere_in_a_tensor(shape: tuple[int, ...]):
    length = max(shape)
    along = [-1 if place == shape.index(length) else 1 for place in range(len(shape))]
    found = samples(torch.arange(length).view(along).expand(shape)).tolist()
    assert len(set(found)) == 16 and found[0] < length / 4 and found[-1] >= length * 0.7
