"""The control core's machine finds mistakes that are put into the core by hand, and nothing in the core as it is."""

from pathlib import Path

import pytest
from control_mutants import MUTANTS
from mutation import Mutant, TextNotThere, outcome
from soak import soaked

MACHINE, EXAMPLES = Path(__file__).with_name("control_machine.py"), 60
CHEAP = MUTANTS[0]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_text_that_a_mutant_replaces_is_there(mutant: Mutant) -> None:
    assert mutant.applied(mutant.path.read_text()) != mutant.path.read_text()


def test_a_mutant_whose_text_is_gone_is_an_error() -> None:
    with pytest.raises(TextNotThere, match="has 0 times instead of once"):
        Mutant("none", CHEAP.module, "text that stands nowhere", "").applied(CHEAP.path.read_text())


@pytest.mark.soak
def test_the_core_as_it_is_holds() -> None:
    found = outcome(MACHINE, "JobMachine", EXAMPLES, None)
    assert not found.falsified, found.said


@pytest.mark.parametrize("mutant", [CHEAP, *map(soaked, MUTANTS[1:])], ids=lambda mutant: mutant.name)
def test_a_mistake_is_found(mutant: Mutant) -> None:
    assert outcome(MACHINE, "JobMachine", mutant.examples, mutant).falsified, f"survived: {mutant.name}"
