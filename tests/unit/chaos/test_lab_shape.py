"""What a lab consists of, and what its Slurm is told."""

import pytest

from chaos.lab import host, needs
from chaos.lab.shape import LOGIN, LabPaths, Shape, SlurmTimes, address, hosts_text
from chaos.lab.slurm_conf import cgroup_conf, slurm_conf
from chaos.orchestration.cleanup import CAMPAIGN, INJECTOR, CleanupGuard
from resilient.exits import EnvironmentUnusable, Exit


def settings(text: str) -> dict[str, str]:
    lines = [line for line in text.splitlines() if not line.startswith(("NodeName", "PartitionName"))]
    return dict(line.split("=", 1) for line in lines)


def test_every_host_has_an_address_of_its_own_that_all_know_by_name():
    shape = Shape(hosts=64)
    lines = [line.split() for line in hosts_text(shape).splitlines()[2:]]
    assert [name for _, name in lines] == [LOGIN, *(f"n{number}" for number in range(1, 65))]
    assert len({where for where, _ in lines}) == 65
    assert all(address(name) == where for where, name in lines)


@pytest.mark.parametrize("hosts", [0, 65])
def test_a_number_of_hosts_that_cannot_be_is_refused(hosts: int):
    with pytest.raises(EnvironmentUnusable, match="1 to 64 hosts"):
        Shape(hosts=hosts)


@pytest.mark.parametrize("name", ["", "a/b", "Lab", "..", "a" * 17])
def test_a_name_that_would_lead_elsewhere_is_refused(name: str):
    with pytest.raises(EnvironmentUnusable, match="no name for a lab"):
        LabPaths(name)


def test_a_lab_knows_its_own_namespaces_and_no_others():
    place = LabPaths("one")
    assert place.host_of(place.namespace("n1")) == "n1"
    assert place.host_of(LabPaths("two").namespace("n1")) is None
    assert place.host_of("n1") is None


def test_slurm_is_told_of_files_of_the_lab_alone():
    place = LabPaths("one")
    told = settings(slurm_conf(Shape(), place, memory_mib=1000))
    files = [value for key, value in told.items() if key == "AuthInfo" or (value.startswith("/") and key != "MailProg")]
    assert len(files) == 7
    assert all(str(place.directory) in value for value in files)


def test_slurm_is_told_the_times_that_were_asked_for():
    times = SlurmTimes(slurmd_timeout_s=7, kill_wait_s=8, grace_s=9, max_time_min=3, message_timeout_s=4)
    text = slurm_conf(Shape(times=times), LabPaths(), memory_mib=1000)
    assert [settings(text)[key] for key in ("SlurmdTimeout", "KillWait", "MessageTimeout")] == ["7", "8", "4"]
    (limited,) = [line for line in text.splitlines() if line.startswith("PartitionName=limited")]
    assert "MaxTime=3 " in limited
    assert "GraceTime=9 " in limited


@pytest.mark.parametrize(("version", "plugin"), [((22, 5), "cgroup/v1"), ((23, 11), "disabled"), ((24, 11), "disabled")])
def test_no_version_of_slurm_is_given_a_cgroup_to_use(version: tuple[int, ...], plugin: str):
    assert cgroup_conf(version).splitlines()[0] == f"CgroupPlugin={plugin}"


def test_what_is_missing_is_named_with_the_packages_that_have_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(needs.os, "geteuid", lambda: 1000)
    with pytest.raises(EnvironmentUnusable) as found:
        needs.demand(slurm=True)
    assert found.value.code is Exit.UNUSABLE
    assert "root" in str(found.value)
    assert "slurmctld" in str(found.value)
    assert "apt-get install iproute2 util-linux mount slurm-wlm munge" in str(found.value)
    assert not any("slurm" in each for each in needs.missing(slurm=False))


def test_a_daemon_of_the_lab_has_no_job_and_no_mark_of_an_experiment(monkeypatch: pytest.MonkeyPatch):
    with CleanupGuard() as cleanup:
        for name, value in {**cleanup.campaign(), **cleanup.injector(), "SLURM_JOB_ID": "7", "KEPT": "yes"}.items():
            monkeypatch.setenv(name, value)
        found = host.daemon_environ()
    assert found["KEPT"] == "yes"
    assert not {CAMPAIGN, INJECTOR, "SLURM_JOB_ID"} & set(found)
