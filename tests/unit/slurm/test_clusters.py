"""Which cluster a chain is for, and whether it is this machine's."""

from collections.abc import Mapping

import pytest

from resilient.slurm import clusters


@pytest.mark.parametrize(
    ("lines", "environ", "wanted"),
    [
        ("", {}, None),
        ("", {"SBATCH_CLUSTERS": ""}, None),
        ("", {"SLURM_CLUSTERS": "b"}, ("SLURM_CLUSTERS", "b")),
        ("", {"SLURM_CLUSTERS": "b", "SBATCH_CLUSTERS": "a"}, ("SBATCH_CLUSTERS", "a")),
        ("#SBATCH --clusters=c\n", {"SBATCH_CLUSTERS": "a"}, ("clusters", "c")),
    ],
)
def test_the_script_comes_before_the_variables_of_sbatch_and_those_before_the_ones_of_all_commands(
    lines: str, environ: Mapping[str, str], wanted: tuple[str, str] | None
):
    assert clusters.wanted(f"#!/bin/sh\n{lines}true\n", environ) == wanted


@pytest.mark.parametrize("own", ["here", "HERE", ""])
def test_the_cluster_of_this_machine_in_any_case_is_no_other_and_one_that_is_not_known_is_not_refused(own: str):
    assert clusters.elsewhere(("clusters", "Here"), own) is None


@pytest.mark.parametrize(("name", "key"), [("clusters", "slurm.extra"), ("SBATCH_CLUSTERS", "SBATCH_CLUSTERS")])
def test_another_cluster_is_refused_by_the_key_or_the_variable_that_names_it(name: str, key: str):
    found = clusters.elsewhere((name, "there"), "here")
    assert found is not None and found.key == key and "submit on a machine of there" in str(found)
