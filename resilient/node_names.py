"""Which nodes of a campaign a person means by a number or a host. Reads the run directory, and writes nothing."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from resilient import ledger
from resilient.config import document


@dataclass(frozen=True)
class Nodes:
    """The nodes of a job, as far as its run directory tells of them.

    Attributes:
        hosts: by number; those of spares are not known before they take part.
        count: with spares; None: not known.
    """

    hosts: Mapping[int, str]
    count: int | None

    def has(self, name: str) -> bool | None:
        """Whether a node is called so. None: not known."""
        if meant(name, self.hosts):
            return True
        if self.count is None:
            return None
        if name.isascii() and name.isdecimal():
            return name in map(str, range(self.count))
        return False if len(self.hosts) >= self.count else None

    def __str__(self) -> str:
        numbers = range(self.count) if self.count is not None else sorted(self.hosts)
        return ", ".join(f"{number} ({self.hosts[number]})" if number in self.hosts else str(number) for number in numbers)


def meant(name: str, hosts: Mapping[int, str]) -> set[int]:
    """The nodes with this number or host, with a domain or without. Args: hosts: by number; empty: not known."""
    short = name.partition(".")[0]
    return {node for node, host in hosts.items() if name == str(node) or (short and short == host.partition(".")[0])}


def nodes_of(run_dir: Path) -> Nodes:
    """Those of the newest job. Raises OSError."""
    hosts: dict[int, str] = {}
    computing: object = None
    for line in ledger.read_events(run_dir / ledger.EVENTS):
        if line["event"] == "run_started":
            hosts, layout = {}, line.get("layout")
            computing = layout.get("nodes") if isinstance(layout, dict) else None
        elif line["event"] == "generation_started":
            members = line.get("members")
            numbers = members if isinstance(members, list) else range(len(line["nodes"]))
            hosts |= {number: host for number, host in zip(numbers, line["nodes"], strict=False) if type(number) is int}
    spares = document.value_at(run_dir / "config.yaml", "cluster", "spares")
    return Nodes(hosts, computing + spares if type(computing) is int and type(spares) is int else None)
