"""The order of timeouts: what a config comes to, and what is refused because it stands on the wrong side of something else."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient import plan
from resilient.config import Config, layout
from resilient.config.timeouts import INSPECTION_S, PING_S, STOPPED_S, nccl_heartbeat_s, out_of_order, timeouts
from resilient.driver.agents import agent_command

seconds = st.floats(2.0, 5000.0)


def config(*, nodes: int = 1, network: dict[str, Any] | None = None, **resilience: Any) -> Config:
    return Config.model_validate({"cluster": {"nodes": nodes}, "network": network or {}, "resilience": resilience})


@pytest.mark.parametrize(
    ("given", "key", "says"),
    [
        (config(hang_floor_s=1.0), "resilience.hang_floor_s", "at least 1.5"),
        (config(hang_floor_s=30.0, hang_ceiling_s=20.0), "resilience.hang_floor_s", "at most resilience.hang_ceiling_s = 20"),
        (
            config(network={"collective_timeout_s": 600.0}),
            "network.collective_timeout_s",
            "at least 620, which is resilience.hang_ceiling_s = 600",
        ),
        (
            config(network={"collective_timeout_s": 30.0}, hang_ceiling_s=20.0, link_grace_s=25.0),
            "network.collective_timeout_s",
            "at least 45, which is resilience.link_grace_s = 25",
        ),
        (config(fence_s=0.5), "resilience.fence_s", "at least 1"),
        (config(nodes=2, link_grace_s=40.0, fence_s=30.0), "resilience.link_grace_s", "at most resilience.fence_s = 30"),
        (config(network={"link_down_s": 61.0}), "network.link_down_s", "at most resilience.link_grace_s = 60"),
    ],
    ids=["floor", "soft and hard", "hard and collective", "grace and collective", "fence", "grace and fence", "NCCL and grace"],
)
def test_what_is_out_of_order_is_refused_with_the_reason(given: Config, key: str, says: str):
    (problem,) = out_of_order(given)
    assert problem.key == key and says in problem.message


@pytest.mark.parametrize(
    "given",
    [
        config(),
        config(nodes=2),
        config(link_grace_s=40.0, fence_s=30.0),
        config(network={"collective_timeout_s": 620.0}),
        config(network={"link_down_s": 60.0}),
        config(drain_s=2.0),
    ],
    ids=["defaults", "two nodes", "one node has no link to lose", "just above", "just within", "a drain waits for no rank"],
)
def test_what_is_in_order(given: Config):
    assert not list(out_of_order(given))


@given(floor_s=seconds, more_s=seconds, grace_s=seconds)
def test_the_watchdog_always_speaks_before_a_collective(floor_s: float, more_s: float, grace_s: float):
    asked = config(hang_floor_s=floor_s, hang_ceiling_s=floor_s + more_s, link_grace_s=grace_s)
    found = timeouts(asked)
    assert not list(out_of_order(asked))
    assert STOPPED_S < found.soft_s < found.hard_s < found.hard_s + INSPECTION_S <= found.collective_s
    assert found.link_grace_s + INSPECTION_S <= found.collective_s


@pytest.mark.parametrize("fence_s", ["auto", 5.0, 600.0])
def test_when_a_node_is_lost_has_nothing_to_do_with_when_an_agent_gives_its_driver_up(fence_s: Any):
    found = timeouts(config(nodes=2, fence_s=fence_s, link_grace_s=5.0))
    assert (found.lost_s, found.lost_with_spare_s) == (35.0, 8.0)
    asked = timeouts(config(fence_s=fence_s, lost_s=12.0))
    assert (asked.lost_s, asked.lost_with_spare_s) == (12.0, 12.0)


def test_an_agent_keeps_training_while_its_driver_is_away_for_two_minutes():
    assert timeouts(config()).fence_s > 120.0 + 2 * PING_S
    assert timeouts(config()).link_grace_s < timeouts(config()).fence_s


@pytest.mark.parametrize(("given", "seconds"), [("auto", 900.0), (60.0, 60.0)])
def test_how_long_a_run_directory_that_cannot_be_written_is_borne(given: Any, seconds: float):
    assert timeouts(config(run_dir_patience_s=given)).run_dir_patience_s == seconds


def test_the_plan_shows_the_ladder_from_the_shortest_to_the_longest():
    rungs = plan.ladder(config(drain_s=7.0, network={"collective_timeout_s": 1234.0}))
    shown = [float(re.match(r" *([\d.]+) s  ", str(text))[1]) for text in rungs.values()]  # type: ignore[index]
    assert shown == sorted(shown) and len(shown) == 12
    assert rungs["collective"].startswith("  1234.0 s") and rungs["drain on SIGTERM, Ctrl-C"].startswith("     7.0 s")


def test_torch_never_ends_a_process_with_a_stuck_nccl_before_its_collective_times_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", raising=False)
    found = config()
    assert nccl_heartbeat_s(found) > timeouts(found).collective_s > 480, "torch's own"
    command = agent_command(found, layout(found, cpu_count=2, gpu_count=0), None, "secret", "127.0.0.1:1")
    assert int(command.environ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"]) == nccl_heartbeat_s(found)
    (problem,) = out_of_order(config(network={"heartbeat_s": 480}))
    assert problem.key == "network.heartbeat_s" and "at least network.collective_timeout_s = 620" in problem.message
    assert nccl_heartbeat_s(config(network={"heartbeat_s": 700})) == 700
