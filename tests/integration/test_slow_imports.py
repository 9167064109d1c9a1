"""Agents whose imports take longer than an agent may be silent."""

from collections.abc import Callable

from campaigns import Campaign


def test_an_agent_that_imports_for_longer_than_the_fence_is_not_taken_for_lost(campaign: Callable[..., Campaign]):
    run = campaign(
        entrypoint="slow_toys:count",
        cluster={"procs_per_node": 2, "device": "cpu"},
        train={"steps": 20},
        checkpoint={"every_steps": 10},
        resilience={"fence_s": 1, "link_grace_s": 1},
    )
    assert run.run() == 0, run.output + run.logs()
    assert not run.events("fault")
    assert len(run.events("generation_started")) == 1
