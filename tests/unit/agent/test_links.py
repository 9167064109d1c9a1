"""Links: what two samples say of them, and sysfs text as machines have it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from resilient.agent.links import Change, Link, LinkWatch, Sample, Tcp, burst, compare, in_use, interfaces_of, ports_of


def net(ups: int, downs: int, trouble: str = "") -> Link:
    return Link(trouble, {"carrier_up_count": ups, "carrier_down_count": downs})


def port(trouble: str = "", **counters: int) -> Link:
    return Link(trouble, {"link_downed": 0, "symbol_error": 0, **counters})


GONE = Link("the interface is gone")


@pytest.mark.parametrize(
    ("was", "now", "changes"),
    [
        pytest.param(net(1, 1), net(1, 1), [], id="nothing"),
        pytest.param(net(1, 1), net(1, 2, "no carrier"), [("down", None, {"carrier_down_count": 1})], id="down"),
        pytest.param(net(1, 1), net(1, 1, "no carrier"), [("down", None, {})], id="down, counted later"),
        pytest.param(net(1, 2, "x"), net(2, 2), [("up", 7.0, {"carrier_up_count": 1})], id="up"),
        pytest.param(net(1, 1), net(3, 3), [("flapped", 2.0, {"carrier_up_count": 2, "carrier_down_count": 2})], id="flapped"),
        pytest.param(net(1, 2), net(2, 2), [], id="up was seen before it was counted"),
        pytest.param(
            net(1, 2, "x"),
            net(2, 3, "x"),
            [("up", 7.0, {"carrier_up_count": 1, "carrier_down_count": 1}), ("down", None, {})],
            id="down, up for a moment, down",
        ),
        pytest.param(net(1, 2, "x"), net(1, 2, "y"), [], id="still down"),
        pytest.param(net(5, 5), GONE, [("down", None, {})], id="gone"),
        pytest.param(GONE, net(1, 2, "x"), [], id="there again, not up"),
        pytest.param(GONE, net(2, 2), [("up", 7.0, {})], id="there again"),
        pytest.param(port(), port(link_downed=1), [("flapped", 2.0, {"link_downed": 1})], id="port flapped"),
        pytest.param(port(), port("DOWN, Polling"), [("down", None, {})], id="port down"),
        pytest.param(port("x"), port("x", link_downed=1), [], id="port down, counted later"),
        pytest.param(port("x"), port(link_downed=1), [("up", 7.0, {"link_downed": 1})], id="port up"),
        pytest.param(port(symbol_error=3), port(symbol_error=9), [("ib_errors", None, {"symbol_error": 6})], id="errors"),
        pytest.param(port(symbol_error=9), port(symbol_error=2), [("ib_errors", None, {"symbol_error": 2})], id="reset"),
    ],
)
def test_two_samples_tell_what_happened_between_them(was, now, changes):
    found = compare(Sample(10.0, {"a": was}), Sample(12.0, {"a": now}), {} if was.up else {"a": 5.0})
    assert [(change.state, change.down_s, dict(change.counters)) for change in found] == changes


@pytest.mark.parametrize(
    ("sent", "retransmitted", "timeouts", "told"),
    [(1000, 0, 0, False), (1000, 19, 1, False), (1000, 20, 0, True), (1_000_000, 9_000, 1, False), (0, 2, 2, True)],
)
def test_retransmissions_are_told_when_they_are_conspicuous(sent, retransmitted, timeouts, told):
    found = burst(Tcp(0.0, 7, 7, 7), Tcp(1.0, 7 + sent, 7 + retransmitted, 7 + timeouts))
    expected = Change(None, "retransmissions", counters={"RetransSegs": retransmitted, "TCPTimeouts": timeouts})
    assert found == (expected if told else None)


ADDRESSES = {
    "lo": ["127.0.0.1", "::1"],
    "eth0": ["192.0.2.2", "fe80::1"],
    "eth1": ["198.51.100.2"],
    "ib0": [],
    "docker0": ["172.17.0.1"],
    "veth9": ["fe80::2"],
}


@pytest.mark.parametrize(
    ("own", "environ", "names"),
    [
        ("192.0.2.2", {}, ["eth0"]),
        ("192.0.2.2", {"GLOO_SOCKET_IFNAME": "ib0,eth1"}, ["eth0", "eth1", "ib0"]),
        ("192.0.2.2", {"NCCL_SOCKET_IFNAME": "eth"}, ["eth0", "eth1"]),
        ("192.0.2.2", {"NCCL_SOCKET_IFNAME": "=eth"}, ["eth0"]),
        ("192.0.2.2", {"NCCL_SOCKET_IFNAME": "^lo,docker,veth"}, ["eth0", "eth1"]),
        ("127.0.0.1", {"GLOO_SOCKET_IFNAME": "lo"}, ["lo", "eth0", "eth1"]),
        ("172.17.0.1", {}, ["docker0"]),
        ("203.0.113.1", {}, ["eth0", "eth1"]),
    ],
)
def test_links_in_use_carry_the_nodes_address_or_are_named(own, environ, names):
    assert in_use(ADDRESSES, {own}, environ, bridges={"docker0"}) == names


def test_the_loopback_is_watched_where_it_is_all_there_is():
    assert in_use({"lo": ["127.0.0.1"]}, {"127.0.0.1"}, {}) == ["lo"]


def test_the_interfaces_of_this_machine_are_found_by_a_name_too():
    assert "lo" in interfaces_of("localhost", {})


# -- files as a machine with InfiniBand has them -------------------------------------------------------------------------

COUNTERS = ("link_downed", "link_error_recovery", "symbol_error", "port_rcv_errors", "port_xmit_discards", "port_rcv_data")


def infiniband(sys: Path, device: str, interface: str | None) -> Path:
    where = sys / "class/infiniband" / device / "ports/1"
    (where / "counters").mkdir(parents=True)
    (where / "state").write_text("4: ACTIVE\n")
    (where / "phys_state").write_text("5: LinkUp\n")
    (where / "rate").write_text("200 Gb/sec (4X HDR)\n")
    for name in COUNTERS:
        (where / "counters" / name).write_text("0\n")
    if interface is not None:
        (where.parents[1] / "device/net" / interface).mkdir(parents=True)
    return where


@pytest.fixture
def watch() -> Iterator[Callable[..., LinkWatch]]:
    with ExitStack() as stack:

        def make(*args: Any, **kwargs: Any) -> LinkWatch:
            made = LinkWatch(*args, **kwargs)
            stack.callback(made.close)
            return made

        yield make


def states(changes: list[Change]) -> list[tuple[str | None, str]]:
    return [(change.interface, change.state) for change in changes]


def test_an_infiniband_port_tells_of_its_state_and_its_errors(tmp_path: Path, watch):
    where = infiniband(tmp_path, "mlx5_0", "ib0")
    now = [100.0]
    links = watch([], ports_of({}, sys=tmp_path), sys=tmp_path, proc=tmp_path, clock=lambda: now[0])
    assert links.names == ["mlx5_0:1 (ib0)"]
    assert links.poll() == []

    (where / "state").write_text("1: DOWN\n")
    (where / "phys_state").write_text("2: Polling\n")
    now[0] = 101.0
    (down,) = links.poll()
    assert (down.state, down.detail) == ("down", "DOWN, Polling")

    (where / "state").write_text("4: ACTIVE\n")
    (where / "phys_state").write_text("5: LinkUp\n")
    (where / "counters/link_downed").write_text("1\n")
    (where / "counters/symbol_error").write_text("17\n")
    (where / "counters/port_rcv_data").write_text("99\n")
    now[0] = 108.0
    up, errors = links.poll()
    assert (up.state, up.down_s, up.counters) == ("up", 7.0, {"link_downed": 1})
    assert (errors.state, errors.counters) == ("ib_errors", {"symbol_error": 17})

    (where / "counters/link_downed").write_text("2\n")
    now[0] = 108.25
    (flapped,) = links.poll()
    assert (flapped.state, flapped.down_s) == ("flapped", 0.25)
    assert links.poll() == []


def test_ports_are_those_that_nccl_takes_and_are_called_by_their_interface(tmp_path: Path, watch):
    infiniband(tmp_path, "mlx5_0", None)
    of_gid = infiniband(tmp_path, "mlx5_1", "wrong")
    (of_gid / "gid_attrs/ndevs").mkdir(parents=True)
    (of_gid / "gid_attrs/ndevs/0").write_text("ib1\n")
    infiniband(tmp_path, "mlx5_10", None)

    def names(hca: str) -> list[str]:
        return watch([], ports_of({"NCCL_IB_HCA": hca}, sys=tmp_path), sys=tmp_path, proc=tmp_path).names

    assert names("") == ["mlx5_0:1", "mlx5_1:1 (ib1)", "mlx5_10:1"]
    assert names("=mlx5_1") == ["mlx5_1:1 (ib1)"]
    assert names("mlx5_1") == ["mlx5_1:1 (ib1)", "mlx5_10:1"]
    assert names("mlx5_0:1,mlx5_10:1") == ["mlx5_0:1", "mlx5_10:1"]
    assert names("^mlx5_1") == ["mlx5_0:1"]


def test_counters_that_a_port_lacks_or_does_not_count_are_no_trouble(tmp_path: Path, watch):
    where = infiniband(tmp_path, "efa_0", None)
    (where / "counters/symbol_error").unlink()
    (where / "counters/link_downed").write_text("N/A (no PMA)\n")
    links = watch([], ports_of({}, sys=tmp_path), sys=tmp_path, proc=tmp_path)
    (where / "state").write_text("1: DOWN\n")
    assert states(links.poll()) == [("efa_0:1", "down")]


def test_each_outage_of_a_link_is_measured_by_itself(tmp_path: Path, watch):
    where = infiniband(tmp_path, "mlx5_0", None)
    now = [100.0]
    links = watch([], ports_of({}, sys=tmp_path), sys=tmp_path, proc=tmp_path, clock=lambda: now[0])
    told = []
    for t, state in [(101.0, "1: DOWN"), (104.0, "4: ACTIVE"), (110.0, "2: INIT"), (115.0, "4: ACTIVE")]:
        now[0] = t
        (where / "state").write_text(f"{state}\n")
        told += [(change.state, change.down_s) for change in links.poll()]
    assert told == [("down", None), ("up", 3.0), ("down", None), ("up", 5.0)]


def snmp(proc: Path, sent: int, retransmitted: int, timeouts: int) -> None:
    (proc / "net").mkdir(exist_ok=True)
    (proc / "net/snmp").write_text(f"Ip: A\nIp: 1\nTcp: RtoMin OutSegs RetransSegs\nTcp: 200 {sent} {retransmitted}\n")
    (proc / "net/netstat").write_text(f"TcpExt: TW TCPTimeouts\nTcpExt: 3 {timeouts}\nIpExt: B\nIpExt: 2\n")


def test_retransmissions_that_go_on_are_told_once_and_then_now_and_then(tmp_path: Path, watch):
    now = [0.0]
    snmp(tmp_path, 0, 0, 0)
    links = watch([], sys=tmp_path, proc=tmp_path, clock=lambda: now[0])
    told = []
    for quarter in range(1, 4 * 25):
        now[0] = quarter / 4
        snmp(tmp_path, 100 * quarter, 3 * quarter, 2 * quarter)
        told += [(now[0], change.counters["TCPTimeouts"]) for change in links.poll()]
    assert told == [(1.0, 8), (11.0, 80), (21.0, 80)]
