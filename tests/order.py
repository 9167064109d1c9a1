"""The order of tests that run in several processes, so that some wait for jobs or campaigns while others compute.

`--dist worksteal` gives each process a stretch of the list, and lets one that is through with its own take from the end of others'.
In the order of folders one process would begin with all campaigns. Here every other stretch begins with jobs of the lab, those
between with campaigns, each file in one of them; the rest fills the stretches up.
"""

import os
from collections.abc import Sequence
from itertools import groupby
from typing import TypeVar

import pytest

T = TypeVar("T")

JOBS, CAMPAIGNS = "tests/lab/", "tests/integration/"


def stretches(jobs: Sequence[Sequence[T]], campaigns: Sequence[Sequence[T]], others: Sequence[T], count: int) -> list[list[T]]:
    """All tests in `count` lists, as long as each other as far as can be. Args: jobs, campaigns: by file; count: at least 2."""
    found: list[list[T]] = [[] for _ in range(count)]
    for files, own in ((jobs, found[::2]), (campaigns, found[1::2])):
        for file in files:
            min(own, key=len).extend(file)
    length = -(-(len(others) + sum(map(len, found))) // count)
    left = list(others)
    for stretch in found:
        room = max(0, length - len(stretch))
        stretch += left[:room]
        del left[:room]
    return found


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if count > 1:
        jobs, campaigns = (
            [list(own) for _, own in groupby((item for item in items if item.nodeid.startswith(folder)), lambda item: item.path)]
            for folder in (JOBS, CAMPAIGNS)
        )
        others = [item for item in items if not item.nodeid.startswith((JOBS, CAMPAIGNS))]
        items[:] = [item for stretch in stretches(jobs, campaigns, others, count) for item in stretch]
