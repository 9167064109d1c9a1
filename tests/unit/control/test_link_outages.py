"""What the driver knows of the links that nodes have reported."""

from resilient.control.links import Links, Outage
from resilient.protocol.messages import LinkChange


def changed(links: Links, node: int, state: str, now: float, down_s: float | None = None, interface: str = "eth0") -> None:
    links.changed(node, LinkChange(interface=interface, state=state, down_s=down_s), now)


def test_a_link_is_an_outage_while_it_is_down_and_for_a_while_after():
    links = Links()
    changed(links, 1, "down", 100.0)
    assert links.outages(103.0, within_s=5.0) == [Outage(1, "eth0", 3.0, None)]
    changed(links, 1, "up", 104.0, 4.1)
    assert links.outages(109.0, within_s=5.0) == [Outage(1, "eth0", 4.1, 104.0)]
    assert links.outages(109.1, within_s=5.0) == []


def test_links_that_are_down_come_first_and_the_longest_outage_leads():
    links = Links()
    changed(links, 0, "flapped", 100.0, 0.25)
    changed(links, 1, "down", 99.0)
    changed(links, 2, "down", 98.0)
    changed(links, 3, "up", 100.0, 60.0)
    found = links.outages(101.0, within_s=5.0)
    assert [(outage.node, outage.down_s) for outage in found] == [(2, 3.0), (1, 2.0), (3, 60.0), (0, 0.25)]


def test_errors_and_retransmissions_are_no_outage():
    links = Links()
    changed(links, 0, "ib_errors", 100.0)
    links.changed(0, LinkChange(interface=None, state="retransmissions"), 100.0)
    assert links.outages(100.0, within_s=5.0) == []


def test_a_link_whose_agent_has_gone_is_not_down_for_ever():
    links = Links()
    changed(links, 0, "down", 100.0)
    changed(links, 1, "down", 100.0)
    links.forget(0)
    assert [outage.node for outage in links.outages(101.0, within_s=5.0)] == [1]
