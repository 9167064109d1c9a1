"""The snapshot core against all that nodes, daemons and the network do to it."""

import pytest
from mutation import SEED, run
from snapshots_machine import Campaign, HybridCampaign


@pytest.mark.parametrize("machine", [Campaign, HybridCampaign])
def test_whatever_happens_what_is_promised_is_there_and_the_newest_snapshot_becomes_durable(machine: type[Campaign]) -> None:
    run(machine, 60, seed=SEED)


@pytest.mark.soak
@pytest.mark.parametrize("machine", [Campaign, HybridCampaign])
def test_whatever_happens_for_long_what_is_promised_is_there_and_the_newest_snapshot_becomes_durable(
    machine: type[Campaign],
) -> None:
    run(machine, 1500, 150)
