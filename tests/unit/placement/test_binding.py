"""Cores and memory of ranks: machines with GPUs as they are sold, cpusets of Slurm, and this very machine."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import Machine, dgx_a100, dgx_h100, gh200, juwels_booster, made

from resilient.placement.applied import VARIABLE, of_this_node, variables_of
from resilient.placement.binding import Binding, Mode, Place, Share, bind, chosen
from resilient.placement.topology import Domain, Gpu, Topology, cpus_in, in_words, read


def bound(machine: Machine, ranks: int, allowed: str = "", mode: Mode = "auto", **environ: str) -> Binding:
    names = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(ranks))), **environ}
    cpus = cpus_in(allowed) if allowed else machine.cpus
    return of_this_node(mode, "cuda", Share(0, ranks, ranks), names, sys=machine.sys, proc=machine.proc, allowed=cpus)


def words(binding: Binding) -> list[tuple[str, int | None] | None]:
    return [None if place is None else (in_words(place.cpus), place.memory) for place in binding.ranks]


def test_ranks_of_a_juwels_booster_node_are_at_the_domains_of_their_gpus(tmp_path: Path):
    found = bound(juwels_booster(tmp_path), 4)
    assert words(found) == [("18-23,66-71", 3), ("6-11,54-59", 1), ("42-47,90-95", 7), ("30-35,78-83", 5)]
    assert in_words(found.left) == "0-5,12-17,24-29,36-41,48-53,60-65,72-77,84-89"


def test_two_gpus_of_a_domain_divide_its_cores_with_their_hyperthreads(tmp_path: Path):
    found = bound(dgx_a100(tmp_path), 8)
    assert words(found)[:3] == [("48-55,176-183", 3), ("56-63,184-191", 3), ("16-23,144-151", 1)]
    assert found.left == frozenset().union(*(cpus_in(f"{n}-{n + 15},{n + 128}-{n + 143}") for n in (0, 32, 64, 96)))


def test_where_every_domain_has_gpus_a_few_cores_of_each_are_left(tmp_path: Path):
    found = bound(dgx_h100(tmp_path), 8)
    assert words(found)[0] == ("0-12,112-124", 0)
    assert words(found)[4] == ("56-68,168-180", 1)
    assert in_words(found.left) == "52-55,108-111,164-167,220-223"


def test_ranks_of_superchips_take_memory_of_the_cpu_and_not_of_the_gpu(tmp_path: Path):
    found = bound(gh200(tmp_path), 4)
    assert words(found) == [("0-66", 0), ("72-138", 1), ("144-210", 2), ("216-282", 3)]
    assert in_words(found.left) == "67-71,139-143,211-215,283-287"
    one = bound(gh200(tmp_path / "one", chips=1), 1)
    assert (words(one), one.left) == ([None], frozenset())
    assert "one NUMA domain" in one.why
    assert words(bound(gh200(tmp_path / "one", chips=1), 1, mode="numa")) == [("0-66", 0)]


@pytest.mark.parametrize(
    ("environ", "domains"),
    [
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, [7, 3]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-00000003,GPU-00000001-aaaa"}, [5, 1]),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_STEP_GPUS": "2-3"}, [7, 5]),  # a cgroup has but those, and CUDA counts from 0
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_JOB_GPUS": "1,3"}, [1, 5]),
        ({"CUDA_VISIBLE_DEVICES": "1,3", "SLURM_JOB_GPUS": "1,3"}, [1, 5]),  # no cgroup
        ({"CUDA_VISIBLE_DEVICES": "MIG-1234,1"}, [None, 1]),
        ({"CUDA_VISIBLE_DEVICES": "1,9"}, [1, None]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, [1, None]),
    ],
    ids=lambda value: " ".join(value.values()) if isinstance(value, Mapping) else None,
)
def test_a_rank_is_at_the_gpu_that_cuda_gives_it(tmp_path: Path, environ: dict[str, str], domains: list[int | None]):
    found = bound(juwels_booster(tmp_path), 2, **environ)
    assert [None if place is None else place.memory for place in found.ranks] == domains
    assert bool(found.why) == (None in domains)


def test_nothing_outside_of_a_cpuset_is_used(tmp_path: Path):
    machine = juwels_booster(tmp_path)
    found = bound(machine, 2, allowed="12-20,60-68", CUDA_VISIBLE_DEVICES="0,1")  # half of domain 3, none of domain 1
    assert words(found) == [("18-20,66-68", 3), None]
    assert in_words(found.left) == "12-17,60-65"
    assert "1 of 2 GPUs" in found.why


def test_of_a_domain_that_a_job_has_a_part_of_its_own_gpus_have_all(tmp_path: Path):
    found = bound(dgx_h100(tmp_path), 2, allowed="8-23,56-63", CUDA_VISIBLE_DEVICES="1,2")
    assert words(found) == [("8-15", 0), ("16-23", 0)]


def test_agents_of_one_machine_never_share_a_core_of_their_gpus(tmp_path: Path):
    machine = dgx_h100(tmp_path)
    found = [bound(machine, 2, CUDA_VISIBLE_DEVICES=f"{first},{first + 1}") for first in (0, 2, 4, 6)]
    cores = [place.cpus for each in found for place in each.ranks if place is not None]
    assert len(frozenset().union(*cores)) == sum(map(len, cores)) == 4 * 2 * 26
    assert not frozenset().union(*cores).intersection(*[frozenset().union(*(each.left for each in found))])


def test_a_firmware_that_does_not_tell_the_domain_may_tell_the_cores(tmp_path: Path):
    cpus = {0: "0-7", 1: "8-15"}
    told = made(tmp_path / "a", cpus, [("0000:03:00.0", -1)], threads=1, local={"0000:03:00.0": "8-15"})
    assert words(bound(told, 1)) == [("8-15", 1)]
    untold = made(tmp_path / "b", cpus, [("0000:03:00.0", -1)], threads=1, local={"0000:03:00.0": "0-15"})
    found = bound(untold, 1)
    assert (words(found), found.left) == ([None], frozenset())
    assert "not known" in found.why


@pytest.mark.parametrize(
    ("share", "cores"),
    [
        (Share(0, 4, 4), ["0-11,48-59", "12-23,60-71", "24-35,72-83", "36-47,84-95"]),  # two domains each
        (Share(0, 8, 8), [f"{6 * n}-{6 * n + 5},{48 + 6 * n}-{48 + 6 * n + 5}" for n in range(8)]),
        (Share(2, 2, 16), ["6-8,54-56", "9-11,57-59"]),  # the second of eight agents
    ],
    ids=str,
)
def test_ranks_on_cpus_divide_the_domains(tmp_path: Path, share: Share, cores: list[str]):
    machine = juwels_booster(tmp_path)
    found = of_this_node("numa", "cpu", share, {}, sys=machine.sys, proc=machine.proc, allowed=machine.cpus)
    assert [each and each[0] for each in words(found)] == cores
    assert not found.left


def test_asked_for_nothing_nothing_is_bound(tmp_path: Path):
    found = bound(juwels_booster(tmp_path), 4, mode="none")
    assert (found.bound, found.left) == (False, frozenset())
    (tmp_path / "empty").mkdir()
    assert not of_this_node("numa", "cpu", Share(0, 2, 2), {}, sys=tmp_path / "empty", proc=tmp_path / "empty").bound
    machine = juwels_booster(tmp_path / "cpus")
    found = of_this_node("auto", "cpu", Share(0, 2, 2), {}, sys=machine.sys, proc=machine.proc, allowed=machine.cpus)
    assert not found.bound, "two campaigns of a machine would have the same cores"


@given(st.data())
def test_whatever_the_machine_and_the_cpuset_ranks_share_no_core_and_leave_the_cpuset_never(data: st.DataObject):
    count = data.draw(st.integers(1, 4))
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    starts = [sum(sizes[:n]) for n in range(count)]
    domains = tuple(Domain(n, frozenset(range(starts[n], starts[n] + sizes[n])), 1 << 30) for n in range(count))
    cpus = range(sum(sizes))
    gpus = tuple(
        Gpu(f"{n:04x}:00:00.0", at, n)
        for n, at in enumerate(data.draw(st.lists(st.none() | st.integers(0, count - 1), max_size=6)))
    )
    allowed = data.draw(st.frozensets(st.sampled_from(cpus))) if cpus else frozenset()
    topology = Topology(domains, tuple(frozenset([cpu]) for cpu in cpus), gpus)
    names = data.draw(st.lists(st.sampled_from(range(len(gpus))), unique=True)) if gpus else []
    on_gpu = data.draw(st.booleans())
    ranks = len(names) if on_gpu else data.draw(st.integers(1, 6))
    mine = chosen([str(name) for name in names], topology) if on_gpu else None
    found = bind("numa", topology, allowed, (), Share(0, ranks, ranks), mine)
    places = [place.cpus for place in found.ranks if place is not None]
    assert len(found.ranks) == ranks
    assert all(places), "a rank has a core, or any"
    assert sum(map(len, places)) == len(frozenset().union(*places))
    assert frozenset().union(*places, found.left) <= allowed
    assert not found.left.intersection(*[frozenset().union(*places)] if places else [frozenset()])


@given(st.frozensets(st.integers(0, 500)))
def test_lists_of_cpus_are_read_as_they_are_written(cpus: frozenset[int]):
    assert cpus_in(in_words(cpus)) == cpus


@pytest.mark.parametrize("text", ["0-99999999", "a", "3-x"])
def test_what_is_no_list_of_cpus_is_refused(text: str):
    with pytest.raises(ValueError):
        cpus_in(text)


# -- this machine --------------------------------------------------------------------------------------------------------


def test_this_machine_tells_its_cores_and_memory():
    found = read()
    mine = os.sched_getaffinity(0)
    assert mine <= frozenset().union(*found.cores)
    if found.domains:
        assert mine <= frozenset().union(*(each.cpus for each in found.domains))
        assert sum(each.memory_bytes for each in found.domains) > 1 << 28


PROBE = """
import os, threading, time
from resilient.placement.applied import take_place
stop = threading.Event()
earlier = threading.Thread(target=stop.wait)
earlier.start()
take_place()
later = threading.Thread(target=stop.wait)
later.start()
maps = open("/proc/self/numa_maps").readlines() if os.path.exists("/proc/self/numa_maps") else []
policy = next((line.split()[1] for line in maps if "stack" in line), "")
print(*(",".join(map(str, sorted(os.sched_getaffinity(int(task))))) for task in os.listdir("/proc/self/task")), policy)
stop.set()
"""


def test_a_process_and_all_its_threads_are_where_they_were_told_to_be():
    cpu = max(os.sched_getaffinity(0))
    told = variables_of(Place(frozenset([cpu]), 0))
    done = subprocess.run([sys.executable, "-c", PROBE], env={**os.environ, **told}, capture_output=True, text=True, check=True)
    assert done.stdout.split()[:3] == [str(cpu)] * 3
    policy = done.stdout.split()[3:]
    assert policy in ([], ["prefer:0"]), done.stderr


def test_a_process_that_cannot_be_bound_says_so_and_runs_anywhere():
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env={**os.environ, VARIABLE: "99999/0"}, capture_output=True, text=True, check=True
    )
    mine = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    assert done.stdout.split()[:3] == [mine] * 3
    assert "cannot be bound to 99999/0" in done.stderr
