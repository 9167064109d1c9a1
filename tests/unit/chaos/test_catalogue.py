"""What of docs/chaos.md is made from the code is up to date."""

import re
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from chaos import faults
from chaos.catalogue import renewed
from chaos.experiment import Experiment
from chaos.verdict.verdict import OF_EACH, OF_THE_RUN

DOCUMENT = (Path(__file__).parents[3] / "docs/chaos.md").read_text()


def test_the_catalogue_is_up_to_date():
    assert renewed(DOCUMENT) == DOCUMENT, "run `python -m chaos.catalogue docs/chaos.md`"


def test_every_fault_key_and_invariant_is_described():
    for name in (*faults.names(), *Experiment.model_fields):
        assert f"| `{name}` |" in DOCUMENT
    for name in (*OF_EACH, *OF_THE_RUN):
        assert f"\n| {name} |" in DOCUMENT


def test_every_row_has_as_many_cells_as_its_table():
    lines = DOCUMENT.splitlines()
    for above, line in pairwise(lines):
        if line.startswith("|") and above.startswith("|"):
            assert above.replace("\\|", "").count("|") == line.replace("\\|", "").count("|"), line


def test_the_example_is_an_experiment():
    (text,) = re.findall(r"```yaml\n(.*?)```", DOCUMENT, re.DOTALL)
    assert len(Experiment.model_validate(yaml.safe_load(text)).faults) == 3


def test_a_document_without_markers_is_refused():
    with pytest.raises(ValueError, match="markers `<!-- faults"):
        renewed("# Chaos\n")
