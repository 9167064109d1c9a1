"""Who of ranks that all wait in collectives is not where the others are: what flight recorders say."""

from collections.abc import Sequence
from typing import Any

import pytest

from resilient.recovery.standing import Standing, astray, standing

STEP = ("all_gather [[8]]", "all_gather [[4]]", "reduce_scatter [[8]]", "all_reduce [[1]]")


def record(whats: Sequence[str], *, finished: int, group: str = "0", ranks: str = "") -> dict[str, Any]:
    """A flight recorder's, of which so many entries are finished."""
    entries = []
    for number, what in enumerate(whats):
        name, _, sizes = what.partition(" ")
        entries.append(
            {
                "process_group": (group, "default_pg"),
                "collective_seq_id": number + 1,
                "p2p_seq_id": 0,
                "profiling_name": name,
                "input_sizes": sizes,
                "retired": number < finished,
                "state": "scheduled",
                "is_p2p": False,
            }
        )
    return {"entries": entries, "pg_config": {group: {"name": group, "ranks": ranks}} if ranks else {"": {"ranks": "[]"}}}


def test_a_rank_stands_at_the_first_collective_that_is_not_finished():
    found = standing(record([*STEP, *STEP], finished=5, ranks="[0, 1]"))
    assert found == Standing("0 (default_pg) [0, 1]", 6, "all_gather [[4]]", True)
    assert str(found) == "all_gather [[4]] (number 6 of group 0 (default_pg) [0, 1])"
    assert standing(record(STEP, finished=4)) is None


@pytest.mark.parametrize(
    ("past", "what", "usual"),
    [
        ([*STEP, *STEP, *STEP], STEP[0], True),
        ([*STEP, *STEP, *STEP], "broadcast [[1]]", False),
        ([*STEP, *STEP, *STEP], STEP[1], False),  # the first one of a step was left out
        ([*STEP, *STEP, "barrier"], STEP[0], None),  # the first barrier that there was
        ([*STEP, "barrier", *STEP, "barrier"], STEP[0], True),
        ([*STEP, "barrier", *STEP, "barrier"], STEP[3], False),
        ([], STEP[0], None),
        (STEP[:1], STEP[0], None),
    ],
)
def test_what_comes_after_the_same_collectives_as_before_is_usual(past: Sequence[str], what: str, usual: bool | None):
    found = standing(record([*past, what], finished=len(past)))
    assert found is not None and found.usual is usual
    assert ("never followed" in str(found)) == (usual is False)


def at(number: int, what: str = "all_reduce", *, group: str = "0", usual: bool | None = True) -> Standing:
    return Standing(group, number, what, usual)


@pytest.mark.parametrize(
    ("standings", "ranks"),
    [
        ([at(9), at(8), at(9), at(9)], [1]),  # the others have left it
        ([at(9), at(9, "broadcast", usual=False)], [1]),
        ([at(9, "broadcast", usual=False), at(9), at(4, group="1"), at(4, group="1")], [0]),
        ([at(9, usual=None), at(9, usual=None), at(9, "broadcast", usual=None)], [2]),  # it is alone there
        ([at(9, usual=None), at(9, "broadcast", usual=None)], []),  # nobody can say
        ([at(9), at(9)], []),  # all have come: the way between them is broken
        ([at(9, usual=False), at(9, usual=False)], []),  # of both the first one
        ([at(9), at(7, group="1"), at(7, group="1")], []),
        ([], []),
    ],
)
def test_the_one_that_is_not_where_the_others_are(standings: Sequence[Standing], ranks: Sequence[int]):
    assert astray(dict(enumerate(standings))) == ranks
