"""What Slurm's environment tells of a job, without Slurm."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.campaign import allocation_of, fitted, machine_layout
from resilient.config import Config
from resilient.exits import EnvironmentUnusable
from resilient.protocol.connection import parse_addresses
from resilient.slurm.allocation import Allocation, own_job
from resilient.slurm.hosts import counts, expand, fold
from resilient.slurm.launch import addresses

ENVIRON = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "n[1-3,7]", "SLURM_JOB_CPUS_PER_NODE": "48(x3),24", "SLURMD_NODENAME": "n2"}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n1,n2", ["n1", "n2"]),
        ("jwb[0009-0011]", ["jwb0009", "jwb0010", "jwb0011"]),
        ("a[1,3-4],b", ["a1", "a3", "a4", "b"]),
        ("r[1-2]n[08-09]", ["r1n08", "r1n09", "r2n08", "r2n09"]),
        ("n[1-2].site.eu,x[5]", ["n1.site.eu", "n2.site.eu", "x5"]),
        ("", []),
    ],
)
def test_a_host_list_is_written_out_in_its_order(text, names):
    assert expand(text) == names


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["n1"], "n1"),
        (["n2", "n1", "n3", "n4"], "n[2,1,3-4]"),
        (["jwb0009", "jwb0010", "jwb0011"], "jwb[0009-0011]"),
        (["n8", "n9", "n10", "n11"], "n[8-9,10-11]"),
        (["r1n08", "r1n09", "r2n08"], "r1n[08-09],r2n08"),
        (["a.site.eu", "b.site.eu"], "a.site.eu,b.site.eu"),
        ([], ""),
    ],
)
def test_names_are_folded_as_slurm_writes_them(names, text):
    assert fold(names) == text


@given(st.lists(st.from_regex(r"[a-z]{1,3}[0-9]{0,4}(\.eu)?", fullmatch=True)))
def test_a_folded_list_is_the_same_names_in_the_same_order(names):
    assert expand(fold(names)) == names


@pytest.mark.parametrize(
    "text", ["n[1-2", "n1]", "n[a-b]", "n[[1]]", "a,,b", "n[2-1]", "a[0-999999999][1-2]b[21-12]", 300 * "n", "n[1-2]" + 300 * "9"]
)
def test_what_is_no_host_list_is_refused(text):
    with pytest.raises(ValueError, match="host list"):
        expand(text)


def test_counts_of_cpus_are_written_out():
    assert counts("48(x2),24,1(x1)") == [48, 48, 24, 1]
    with pytest.raises(ValueError, match="no count"):
        counts("many")


def test_the_batch_host_comes_first_with_its_own_cpus():
    found = Allocation.of({**ENVIRON, "SLURMD_NODENAME": "n7"}, "elsewhere")
    assert found.hosts == ("n7", "n1", "n2", "n3")
    assert found.cpus == (24, 48, 48, 48)
    assert found.task == 0


def test_a_step_that_srun_has_started_knows_its_number():
    assert Allocation.of({**ENVIRON, "SLURM_STEP_ID": "0", "SLURM_PROCID": "3"}, "n2").task == 3
    assert Allocation.of({**ENVIRON, "SLURM_PROCID": "0"}, "n2").task == 0  # of the batch script


@pytest.mark.parametrize(
    "change", [{"SLURM_JOB_NODELIST": "n["}, {"SLURM_JOB_CPUS_PER_NODE": "48(x9)"}, {"SLURM_JOB_NODELIST": ""}]
)
def test_an_environment_that_does_not_fit_is_told(change):
    with pytest.raises(EnvironmentUnusable, match="Slurm"):
        Allocation.of({**ENVIRON, **change}, "n1")


def config(**cluster: object) -> Config:
    return Config.model_validate({"cluster": cluster, "run_dir": "run"})


def test_agents_are_steps_where_there_is_a_job_unless_told_otherwise(monkeypatch):
    for name, value in ENVIRON.items():
        monkeypatch.setenv(name, value)
    found = allocation_of(config())
    assert found is not None
    assert found.job_id == "77"
    assert allocation_of(config(launcher="local")) is None
    with pytest.raises(EnvironmentUnusable, match=r"4 nodes \(n2, n1, n3, n7\), and cluster.nodes is 5"):
        allocation_of(config(nodes=5))


HET = {
    "SLURM_JOB_ID": "77",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_NODELIST": "n1",
    "SLURM_JOB_ID_HET_GROUP_0": "77",
    "SLURM_JOB_ID_HET_GROUP_1": "78",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "n1",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "g[1-2]",
    "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_0": "8",
    "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_1": "48(x2)",
    "SLURMD_NODENAME": "n1",
}


def test_all_components_of_a_heterogeneous_job_are_its_nodes():
    found = Allocation.of(HET, "n1")
    assert (found.job_id, found.hosts, found.cpus, found.components) == ("77", ("n1", "g1", "g2"), (8, 48, 48), (0, 1, 1))
    assert Allocation.of({**HET, "SLURM_JOB_ID": "78"}, "n1").job_id == "77"  # in a step of the other component
    assert own_job({**HET, "SLURM_JOB_ID": "78"}) == "77"
    assert Allocation.of(ENVIRON, "n2").components == ()
    with pytest.raises(EnvironmentUnusable, match="SLURM_JOB_NODELIST_HET_GROUP_2"):
        Allocation.of({**HET, "SLURM_HET_SIZE": "3"}, "n1")


def test_a_job_that_has_lost_nodes_goes_on_with_those_that_make_a_layout():
    found = Allocation.of(HET, "n1").within({"n1", "g2", "new"})
    assert (found.hosts, found.cpus, found.components, found.gone) == (("n1", "g2"), (8, 48), (0, 1), ("g1",))
    job = Allocation.of(ENVIRON, "n2").within({"n1", "n2", "n3"})
    wanted = Config.model_validate({"cluster": {"nodes": 4, "domains": ["a", "b", "c", "d"]}, "parallel": {"pp": 2}})
    smaller = fitted(wanted, job).cluster
    assert (smaller.nodes, smaller.spares, smaller.domains) == (2, 0, ["a", "b"])  # 3 ranks are no pipelines of 2
    assert fitted(config(nodes=4, spares=0), job).cluster.nodes == 3


def test_the_replicas_that_are_asked_for_are_those_of_all_nodes():
    job = Allocation.of(ENVIRON, "n2")
    wanted = Config.model_validate({"cluster": {"nodes": 4, "procs_per_node": 1}, "parallel": {"dp": 4}})
    assert machine_layout(fitted(wanted, job), job).dp == 4
    left = job.within({"n1", "n2", "n3"})
    assert machine_layout(fitted(wanted, left), left).dp == 3


@pytest.mark.parametrize(
    "parallel", [{"dp_replicate": 4}, {"dp": 16, "dp_replicate": 4}, {"dp_shard": 4, "dp_replicate": "auto"}], ids=str
)
def test_a_job_that_has_lost_a_node_shards_its_state_as_before_also_where_its_gpus_are_counted(monkeypatch, parallel):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    left = Allocation.of(ENVIRON, "n2").within({"n1", "n2", "n3"})
    wanted = Config.model_validate({"cluster": {"nodes": 4}, "parallel": parallel, "train": {"global_batch_size": 48}})
    found = machine_layout(fitted(wanted, left), left)
    assert (found.world_size, found.dp_replicate, found.dp_shard) == (12, 3, 4)
    whole = machine_layout(fitted(wanted, Allocation.of(ENVIRON, "n2")), Allocation.of(ENVIRON, "n2"))
    assert (whole.world_size, whole.dp_replicate, whole.dp_shard) == (16, 4, 4)


def test_a_layout_that_does_not_come_out_is_not_made_to_fit_where_nothing_was_lost():
    job = Allocation.of(ENVIRON, "n2")
    wanted = Config.model_validate({"cluster": {"nodes": 3, "spares": 2}, "train": {"global_batch_size": 8, "micro_batch_size": 2}})
    assert (fitted(wanted, job).cluster.nodes, fitted(wanted, job).cluster.spares) == (3, 1)


def test_the_nodes_that_the_job_still_has_are_asked_of_slurm(slurm, monkeypatch):
    for name, value in ENVIRON.items():
        monkeypatch.setenv(name, value)
    slurm.set([{"id": "77", "name": "x", "state": "RUNNING", "end": "N/A", "nodes": "n[1-2,7]"}])
    found = allocation_of(config(nodes=4))
    assert found is not None
    assert (found.hosts, found.gone) == (("n2", "n1", "n7"), ("n3",))
    with pytest.raises(EnvironmentUnusable, match=r"3 nodes \(n2, n1, n7\), and cluster.min_nodes is 4; it has lost n3"):
        allocation_of(config(nodes=4, min_nodes=4))
    for nodes in ("n[1,7]", ""):  # without the node on which this runs: that is no answer
        slurm.becomes("77", nodes=nodes)
        found = allocation_of(config(nodes=4))
        assert found is not None
        assert found.gone == ()
    slurm.deaf(1)
    assert allocation_of(config(nodes=4)) is not None


@pytest.mark.parametrize(
    ("asked", "nodes", "spares"),
    [({}, 4, 0), ({"spares": 1}, 3, 1), ({"spares": 9}, 1, 3), ({"spares": 2, "min_nodes": 3}, 3, 1)],
)
def test_auto_is_all_nodes_of_the_job_less_the_spares_and_one_elsewhere(asked, nodes, spares):
    found = fitted(config(nodes="auto", **asked), Allocation.of(ENVIRON, "n2")).cluster
    assert (found.nodes, found.spares) == (nodes, spares)
    assert fitted(config(nodes="auto", **asked), None).cluster.nodes == 1


def test_there_are_no_more_spares_than_the_job_has_nodes_left():
    job = Allocation.of(ENVIRON, "n2")
    assert fitted(config(nodes=3, spares=4), job).cluster.spares == 1
    assert fitted(config(nodes=2, spares=1), job).cluster.spares == 1
    assert fitted(config(nodes=2, spares=4), None).cluster.spares == 4


def test_every_node_of_a_job_has_the_cores_and_gpus_of_a_machine_for_itself(monkeypatch):
    monkeypatch.setattr("resilient.campaign.gpu_count", lambda: 4)
    job = Allocation("77", ("n1", "n2", "n3"), (48, 48, 24), 0)
    wanted = Config.model_validate({"cluster": {"nodes": 3}, "train": {"global_batch_size": 48, "micro_batch_size": 4}})
    found = machine_layout(wanted, job)
    assert (found.procs_per_node, found.world_size, found.threads_per_proc) == (4, 12, 6)
    assert machine_layout(wanted).procs_per_node == 1


def test_without_a_job_agents_are_processes_and_slurm_is_an_error(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert allocation_of(config()) is None
    with pytest.raises(EnvironmentUnusable, match="no job of Slurm"):
        allocation_of(config(launcher="slurm"))


def test_addresses_are_written_so_that_an_agent_can_read_them():
    assert parse_addresses("n1i:80,10.0.0.1:80,[fd00::1]:80") == [("n1i", 80), ("10.0.0.1", 80), ("fd00::1", 80)]
    assert addresses("n1", 80, suffix="i")[0] == "n1i:80"
    assert all("127.0.0.1" not in each for each in addresses("n1", 80))
    assert addresses("n1", 80, interface="no-such-interface") == []


def test_a_task_of_an_array_is_no_other_task_of_it():
    array = {"SLURM_JOB_ID": "36", "SLURM_ARRAY_JOB_ID": "36", "SLURM_ARRAY_TASK_ID": "9"}
    assert own_job(array) == "36_9"
    assert own_job({"SLURM_JOB_ID": "36"}) == "36" and own_job({}) == ""
