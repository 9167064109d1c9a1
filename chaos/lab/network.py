"""The network of one host of the lab, as faults change it: commands of `chaos.primitives.links`, counters of the kernel."""

import json
import os
import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from chaos.fault import CannotInject
from chaos.injectors.context import InjectionContext
from chaos.lab.lab import Lab
from chaos.lab.shape import LOGIN, LabPaths, address
from chaos.primitives import links
from resilient.exits import EnvironmentUnusable


class HostNetwork:
    """Args: context: with the lab and the host that is aimed at. Raises CannotInject: that host is not up."""

    def __init__(self, context: InjectionContext) -> None:
        self._context = context
        self.mark = os.getpid() % 0xFFFE + 1
        self.name = context.target.host
        try:
            self._lab = Lab(LabPaths(context.lab))
            init = self._lab.host(self.name).init()
        except EnvironmentUnusable as error:
            raise CannotInject(str(error)) from None
        if init is None:
            raise CannotInject(f"host {self.name} of the lab is not up")
        self.init = init
        self.namespace, self.switch = self.namespace_of(self.name), self.namespace_of(LOGIN)

    @property
    def root(self) -> Path:
        """Of the host's file system, as this machine sees it."""
        return Path(f"/proc/{self.init}/root")

    def make(self, changes: Iterable[links.Change]) -> None:
        """Make changes that are undone when the guard is released."""
        for change in changes:
            self._context.guard.add(change.undo)
            self._context.guard.run(change.do)

    def hosts(self) -> Sequence[str]:
        """All that compute."""
        return self._lab.shape().names

    def namespace_of(self, host: str) -> str:
        """The network namespace of a host."""
        return self._lab.paths.namespace(host)

    def resolves(self, name: str) -> bool:
        """Whether a name leads to an address there."""
        words = self._lab.command(["getent", "hosts", name], host=self.name)
        return subprocess.run(words, check=False, capture_output=True).returncode == 0

    def lay_down(self, text: str) -> Path:
        """A file with this text, which is gone when the guard is released."""
        path = self._lab.paths.directory / f"chaos-{self.mark}"
        self._context.guard.add(["rm", "-f", str(path)])
        path.write_text(text)
        return path

    def carrier_downs(self) -> int:
        """How often its link was down since it has been up."""
        return int(Path(f"/proc/{self.init}/root/sys/class/net/{links.DEVICE}/carrier_down_count").read_text())

    def dropped(self, *others: str) -> int:
        """Packets that the rules of this fault have dropped here and on other hosts.

        Raises:
            CannotInject: there were none.
        """
        found = 0
        for namespace in (self.namespace, *map(self.namespace_of, others)):
            command, mark = links.packets(namespace, self.mark)
            output = subprocess.run(command, check=False, capture_output=True, text=True).stdout
            found += sum(int(line.split()[0]) for line in output.splitlines() if re.search(rf"{mark}\b", line))
        if not found:
            raise CannotInject(f"host {self.name} has lost no packet")
        return found

    def held_back(self, namespace: str, device: str) -> int:
        """How often a packet had to wait, or was lost, because of a cap."""
        command = ["tc", "-n", namespace, "-s", "-j", "qdisc", "show", "dev", device]
        output = subprocess.run(command, check=False, capture_output=True, text=True).stdout
        return sum(each.get("overlimits", 0) + each.get("drops", 0) for each in json.loads(output or "[]"))


def addresses(hosts: Iterable[str]) -> list[str]:
    """Of hosts on the lab's network."""
    return [address(host) for host in hosts]
