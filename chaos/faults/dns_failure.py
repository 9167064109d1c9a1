"""On a node no name leads to an address any more."""

from pydantic import Field

from chaos.fault import Aim, CannotInject, Evidence, Expectation, Need, Outside
from chaos.injectors.context import InjectionContext
from chaos.lab.network import HostNetwork
from chaos.lab.shape import LOGIN
from chaos.primitives import links


class DnsFailure(Outside):
    """On a node no name leads to an address any more: /etc/hosts knows only the host itself, and no name server answers."""

    aim = Aim.NODE
    needs = frozenset({Need.ROOT, Need.LAB})
    site = "machine"
    undone = "what was mounted over both files is unmounted"

    seconds: float = Field(10.0, gt=0, description="for which none does")

    def expects(self) -> Expectation:
        return Expectation()

    def inject(self, context: InjectionContext) -> Evidence:
        host = HostNetwork(context)
        path = host.lay_down(links.no_names(host.mark))
        host.make(links.without_names(host.init, host.mark, str(path)))
        if host.resolves(LOGIN):
            raise CannotInject(f"the name {LOGIN} leads somewhere on host {host.name} all the same")
        context.hold(self.seconds)
        return {"host": host.name, "resolves": False}
