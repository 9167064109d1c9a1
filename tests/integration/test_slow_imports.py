"""Agents whose imports take longer than an agent may be silent."""

from collections.abc import Callable

import pytest
from campaigns import Campaign


@pytest.mark.soak
def test_an_agent_that_imports_for_longer_than_the_fence_is_not_taken_for_lost(campaign: Callable[..., Campaign]):
    run = campaign(
        entrypoint="slow_toys:count",
        cluster={"procs_per_node": 2, "device": "cpu"},
        train={"steps": 20},
        checkpoint={"every_steps": 10},
        resilience={"fence_s": 3, "link_grace_s": 3},  # less than the import takes, more than a busy machine lets an agent wait
    )
    assert run.run() == 0, run.output + run.logs()
    assert not run.events("fault")
    assert len(run.events("generation_started")) == 1
