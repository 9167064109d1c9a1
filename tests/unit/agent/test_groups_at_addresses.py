"""Process groups that a script makes at an address of its own: where the ranks of each of them meet."""

import os
import subprocess
import sys
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from resilient.agent.groups import Address, Group, asked_for, number_of, place_of, served_by_agent, url_at
from resilient.agent.rendezvous import open_store

OURS = Address("10.0.0.1", 4711)
OWN = Address("localhost", 12355)
RANK_1 = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4711"}


@pytest.mark.parametrize(
    ("url", "environ", "group"),
    [
        ("env://", RANK_1, Group(OURS, 1, 4)),
        ("env://?rank=0&world_size=2", RANK_1, Group(OURS, 0, 2)),
        ("env://", {**RANK_1, "MASTER_ADDR": "localhost", "MASTER_PORT": "12355"}, Group(OWN, 1, 4)),
        ("tcp://localhost:12355?rank=0&world_size=2", RANK_1, Group(OWN, 0, 2)),
        ("tcp://[::1]:12355?rank=0&world_size=2", RANK_1, Group(Address("::1", 12355), 0, 2)),
        ("tcp://localhost:12355?world_size=2", RANK_1, None),
        ("tcp://localhost?rank=0&world_size=2", RANK_1, None),
        ("tcp://localhost:port?rank=0&world_size=2", RANK_1, None),
        ("env://", {**RANK_1, "MASTER_PORT": "port"}, None),
        ("env://", {**RANK_1, "MASTER_ADDR": ""}, None),
        ("env://", {"RANK": "1", "WORLD_SIZE": "4"}, None),
    ],
)
def test_the_group_that_is_asked_for_is_that_of_the_url_or_the_environment(url: str, environ: dict[str, str], group: Group | None):
    assert asked_for(url, environ) == group


def test_a_script_that_has_taken_back_that_an_agent_serves_the_store_serves_it_itself():
    agents = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert served_by_agent(Group(OWN, 0, 4), OURS, agents)
    assert not served_by_agent(Group(OWN, 0, 4), OURS, {})
    assert served_by_agent(Group(OURS, 0, 4), OURS, {}), "the port is taken by the agent's"


def test_groups_of_other_addresses_sizes_and_nodes_meet_in_other_places():
    def place(host: str, port: int, ranks: int, node: str) -> str:
        return place_of(Group(Address(host, port), 0, ranks), OURS, node, procs=2)

    asked = [(*OURS, 4, "0"), (*OURS, 2, "0"), (*OWN, 4, "0"), (*OWN, 2, "0"), (*OWN, 2, "1"), ("localhost", 12356, 4, "0")]
    assert len({place(*each) for each in asked}) == len(asked)
    assert place(*OWN, 4, "0") == place(*OWN, 4, "1"), "of more ranks than a node has"
    assert place("node0", 12355, 2, "0") == place("node0", 12355, 2, "1")


def test_a_process_that_joins_for_the_first_time_has_the_number_of_those_that_it_meets():
    store = HashStore()
    assert [number_of(store, rank) for rank in (0, 1)] == [1, 1]
    assert [number_of(store, rank) for rank in (0, 1)] == [2, 2], "rank 1 is another process now"


def test_an_address_of_version_6_is_in_brackets():
    assert asked_for(url_at(Address("fd00::1", 1), Group(OWN, 1, 2)), {}) == Group(Address("fd00::1", 1), 1, 2)


JOINS = """
import os, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from resilient.agent.groups import meet_below

meet_below("s3cret")
me = int(os.environ["RANK"])

def meet(members, **where):
    if me in members:
        dist.init_process_group("gloo", timeout=timedelta(seconds=120), **where)
        dist.all_reduce(total := torch.tensor(10**me))
        print(total.item(), flush=True)
        dist.destroy_process_group()

def tcp(members):
    rank = members.index(me) if me in members else -1
    meet(members, init_method="tcp://localhost:29500", rank=rank, world_size=len(members))

meet([0, 1, 2])
meet([0, 1, 2])
tcp([0, 1])
tcp([0, 1, 2])
tcp([2, 0])
tcp([0, 1, 2])
os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "12355"
meet([0, 1, 2])
meet([0, 1, 2], rank=me, world_size=3)
"""


def test_groups_at_the_runtimes_address_and_at_others_come_together_again_and_again_in_whichever_ranks():
    store = open_store("127.0.0.1")
    store.set_timeout(timedelta(seconds=60))
    torchruns = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    environ = {**os.environ, **torchruns, "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", JOINS]
    ranks = [subprocess.Popen(command, env={**environ, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True) for rank in range(3)]
    try:
        said = [rank.communicate(timeout=240)[0].split() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    everyone = "111"
    assert said == [
        [everyone, everyone, "11", everyone, "101", everyone, everyone, everyone],
        [everyone, everyone, "11", everyone, everyone, everyone, everyone],
        [everyone, everyone, everyone, "101", everyone, everyone, everyone],
    ]
