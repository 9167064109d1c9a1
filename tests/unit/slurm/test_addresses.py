"""At which addresses a job's driver listens, and which of them its agents are told."""

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from resilient.config import Config, ConfigError
from resilient.driver.agents import listening_addresses
from resilient.exits import EnvironmentUnusable
from resilient.slurm.allocation import Allocation
from resilient.slurm.launch import addresses, own_addresses

JOB = Allocation("77", ("n1", "n2"), (2, 2), 0)


def there_are(monkeypatch: pytest.MonkeyPatch, interfaces: dict[str, list[str]]) -> None:
    found = {
        name: [SimpleNamespace(family=socket.AF_INET6 if ":" in each else socket.AF_INET, address=each) for each in ips]
        for name, ips in interfaces.items()
    }
    monkeypatch.setattr("psutil.net_if_addrs", lambda: found)


def config(**slurm: object) -> Config:
    return Config.model_validate({"slurm": slurm})


def test_a_bridge_among_guests_is_offered_where_the_machine_has_no_other_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    there_are(monkeypatch, {"lo": ["127.0.0.1"], "br0": ["10.88.0.1", "fe80::1%br0"], "eth0": ["fe80::7%eth0"]})
    (tmp_path / "br0/bridge").mkdir(parents=True)
    assert own_addresses(sysfs=tmp_path) == ["10.88.0.1"]


def test_an_interface_that_the_host_does_not_have_is_an_error_of_the_config(monkeypatch: pytest.MonkeyPatch):
    there_are(monkeypatch, {"lo": ["127.0.0.1"], "eth0": ["10.0.0.7"]})
    with pytest.raises(ConfigError, match=r"slurm.interface = ib0: .* has no such interface; allowed: eth0, lo"):
        listening_addresses(config(interface="ib0"), JOB)
    assert listening_addresses(config(interface="ib0", hostname_suffix="i"), JOB) == ["10.0.0.7"]  # the name may lead elsewhere
    assert listening_addresses(config(interface="ib0"), None) == ["127.0.0.1"]


@pytest.mark.parametrize(
    ("slurm", "why"), [({}, "none of eth0, lo has an address"), ({"interface": "eth0"}, r"none of eth0 \(slurm.interface\) has")]
)
def test_a_host_without_an_address_that_leads_away_is_an_unusable_environment(slurm, why: str, monkeypatch: pytest.MonkeyPatch):
    there_are(monkeypatch, {"lo": ["127.0.0.1"], "eth0": ["fe80::7%eth0"]})
    with pytest.raises(EnvironmentUnusable, match=why):
        listening_addresses(config(**slurm), JOB)


def test_agents_are_told_no_name_of_a_node_where_the_driver_runs_on_none_of_them(monkeypatch: pytest.MonkeyPatch):
    there_are(monkeypatch, {"eth0": ["10.0.0.1"]})
    assert addresses("n1", 80) == ["n1:80", "10.0.0.1:80"]
    assert addresses(None, 80) == addresses(None, 80, suffix="i") == ["10.0.0.1:80"]
    assert JOB.holds({"SLURMD_NODENAME": "n2"}, "n2.site.eu")
    assert not JOB.holds({}, "login1")
