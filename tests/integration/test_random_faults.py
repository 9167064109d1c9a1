"""A random mix of faults: the campaign ends as one without faults does."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from campaigns import ROOT

from experiments import Chaos, commands


@pytest.fixture
def chaos(tmp_path: Path) -> Iterator[Chaos]:
    yield from commands(tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_a_campaign_under_random_faults_is_that_of_its_reference_run(chaos: Chaos, rounds: int):
    """Ten faults for each round; the seed is the number of rounds, so that more rounds are other faults."""
    experiment = yaml.safe_load((ROOT / "experiments/soak.yaml").read_text())
    del experiment["random"]["minutes"]
    experiment["random"] |= {"count": 10 * rounds, "seed": rounds}
    code = chaos.run(experiment, patience_s=2700.0)
    assert code == 0, chaos.printed + chaos.said()
    verdict = chaos.verdict()
    assert verdict["ok"]
    assert rounds < 3 or len({each["fault"] for each in verdict["injections"] if each["t"] is not None}) >= 20
    assert not chaos.all_of_it()
