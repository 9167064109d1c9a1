"""The order of nodes: a dragonfly, a fat tree, and what Slurm's files say of them."""

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.campaign import machine_layout, places_in
from resilient.config import Config, ConfigError
from resilient.control.membership import Membership
from resilient.control.shares import whole_nodes
from resilient.placement.fabric import addresses_in, failure_domains, ordered
from resilient.slurm.hosts import expand
from resilient.snapshots.replication import buddies


def dragonfly(cells: int, leaves: int, nodes: int) -> list[str]:
    """A DragonFly+: cells that are all connected to each other, in each of them leaf switches."""
    return [f"cell{c}.c{c}l{leaf}.n{c}x{leaf}x{n}" for c in range(cells) for leaf in range(leaves) for n in range(nodes)]


def fat_tree(cores: int, pods: int, leaves: int, nodes: int) -> list[str]:
    """Three levels of switches."""
    return [
        f"core{c}.pod{c}{p}.leaf{c}{p}{leaf}.n{c}x{p}x{leaf}x{n}"
        for c in range(cores)
        for p in range(pods)
        for leaf in range(leaves)
        for n in range(nodes)
    ]


def within(addresses: Sequence[str], order: Sequence[int], block: int, level: int) -> int:
    """Blocks that lie below one switch of a level, 1 the highest."""
    blocks = [order[first : first + block] for first in range(0, len(order) // block * block, block)]
    return sum(len({tuple(addresses[place].split(".")[:level]) for place in each}) == 1 for each in blocks)


@pytest.mark.parametrize("seed", range(5))
def test_stages_of_a_pipeline_lie_in_cells_of_a_dragonfly_and_below_its_leaves(seed: int):
    nodes = dragonfly(cells=4, leaves=4, nodes=4)
    random.Random(seed).shuffle(nodes)
    whole = ordered(nodes, 16)  # pp 4: a stage is as large as a cell
    assert sorted(whole) == list(range(64))
    assert within(nodes, whole, 16, 1) == 4
    assert within(nodes, whole, 4, 2) == 16, "what a stage reduces goes through one leaf in groups of four"
    assert within(nodes, ordered(nodes, 4), 4, 2) == 16


@pytest.mark.parametrize("seed", range(5))
def test_stages_are_whole_where_a_job_has_parts_of_leaves_of_a_fat_tree(seed: int):
    chance = random.Random(seed)
    nodes = chance.sample(fat_tree(cores=2, pods=3, leaves=4, nodes=8), 96)
    for block in (2, 4, 6, 12):
        order = ordered(nodes, block)
        of_leaf = Counter(".".join(each.split(".")[:3]) for each in nodes)
        assert within(nodes, order, block, 3) >= sum(count // block for count in of_leaf.values()), "as many as there can be"
        assert within(nodes, order, block, 1) >= 96 // block - 1, "one stage at the most is below both core switches"


def test_a_leaf_that_does_not_come_out_even_gives_its_rest_to_its_neighbours():
    nodes = ["s.a.n0", "s.a.n1", "s.a.n2", "t.b.n3", "s.c.n4", "t.b.n5", "t.d.n6", "s.c.n7"]
    assert [nodes[place] for place in ordered(nodes, 2)] == [
        *("s.a.n0", "s.a.n1", "s.c.n4", "s.c.n7"),
        *("t.b.n3", "t.b.n5"),
        *("s.a.n2", "t.d.n6"),
    ]


def test_nodes_of_which_nothing_is_known_stay_as_they_were():
    assert ordered(["", "n1", "", "n0"], 2) == [0, 1, 2, 3]  # a name alone: Slurm knows no switches
    assert ordered(["", "s2.n1", "s10.n2", "s2.n3", ""], 1) == [1, 3, 2, 0, 4]


@given(st.lists(st.text("ab.0", max_size=8)), st.integers(0, 5))
def test_every_node_has_one_place_whatever_the_addresses_say(addresses: list[str], block: int):
    assert sorted(ordered(addresses, block)) == list(range(len(addresses)))
    assert len(failure_domains(addresses)) in (0, len(addresses))


@pytest.mark.parametrize("nodes", [dragonfly(2, 4, 4), fat_tree(1, 2, 3, 4)], ids=["dragonfly", "fat tree"])
def test_no_buddy_is_below_the_same_leaf(nodes: list[str]):
    nodes = [nodes[place] for place in ordered(nodes, 4)]
    domains = failure_domains(nodes)
    found = buddies(len(nodes), domains)
    assert all(buddy is not None and domains[node] != domains[buddy] for node, buddy in enumerate(found))
    assert failure_domains([*nodes, "n7"]) == ()


# -- who says so -----------------------------------------------------------------------------------------------------------

TOPOLOGY = """
# of the machine
SwitchName=leaf0 Level=0 LinkSpeed=1 Nodes=n[0-3]
SwitchName=leaf1 Nodes=n[4-5],x7
SwitchName=top Level=1 LinkSpeed=1 Nodes=n[0-5],x7 Switches=leaf[0-1]
"""


def test_a_file_of_switches_is_read_as_slurm_has_it_and_prints_it():
    found = addresses_in(TOPOLOGY, expand)
    assert (found["n2"], found["x7"], len(found)) == ("top.leaf0.n2", "top.leaf1.x7", 7)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("NodeName=n1", "names no switch"),
        ("SwitchName=a Switches=b\nSwitchName=b Switches=a\nSwitchName=b Nodes=n1", "below itself"),
        ("SwitchName=a Nodes=n[0-", "list"),
    ],
)
def test_what_is_no_such_file_is_refused(text: str, words: str):
    with pytest.raises(ValueError, match=words):
        addresses_in(text, expand)


def members(places: Sequence[str], stage_nodes: int, spares: int = 0) -> Membership:
    found = Membership(whole_nodes([len(places) - spares]), spares, 30.0, stage_nodes)
    found.begin(0.0)
    for index, place in enumerate(places):
        found.hello(index, f"n{index}", f"10.0.0.{index}", 0.0, place=place)
        found.is_ready(index, 5000)
    return found


def test_the_first_generation_is_in_the_order_of_the_fabric_and_later_ones_stay_in_it():
    nodes = members(["s0.n0", "s1.n1", "s0.n2", "s1.n3", "s1.n4"], 2, spares=1)
    first = nodes.choose(1.0)
    assert first == (0, 2, 1, 3)
    nodes.start(first)
    assert nodes.failure_domains() == ("s0", "s0", "s1", "s1")
    nodes.lost(2, "gone", 2.0)
    for index in (0, 1, 3):
        nodes.is_ready(index, 5001)
    assert nodes.choose(3.0) == (0, 4, 1, 3), "the spare takes the place of the node that is gone"


def test_a_config_whose_file_of_switches_is_none_is_refused_before_anything_starts(tmp_path: Path):
    path = tmp_path / "topology.conf"
    for text in (None, "NodeName=n1"):
        if text is not None:
            path.write_text(text)
        config = Config.model_validate({"cluster": {"fabric": str(path), "device": "cpu"}})
        with pytest.raises(ConfigError, match=r"cluster\.fabric.*cannot be read as a file of switches"):
            machine_layout(config)
    path.write_text(TOPOLOGY)
    machine_layout(config)
    assert places_in(path)["n5"] == "top.leaf1.n5"


def test_a_comment_in_a_file_of_switches_is_of_any_locale(tmp_path: Path):
    (tmp_path / "topology.conf").write_bytes("# Größe\n".encode() + "# Größe\n".encode("latin-1") + TOPOLOGY.encode())
    assert places_in(tmp_path / "topology.conf")["n5"] == "top.leaf1.n5"
