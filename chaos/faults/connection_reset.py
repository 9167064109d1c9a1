"""A rank's connections are reset."""

from chaos.fault import Aim, Evidence, Expectation, Outside
from chaos.injectors.context import InjectionContext
from chaos.primitives import sockets


class ConnectionReset(Outside):
    """A rank's TCP connections, to its peers and to the store, are reset (as by a firewall that has forgotten them)."""

    aim = Aim.RANK

    def expects(self) -> Expectation:
        # Those at both ends are told that the other one has gone: nobody is to blame.
        return Expectation(frozenset({"exception", "collective_timeout", "exit"}), frozenset({"restart_workers"}))

    def inject(self, context: InjectionContext) -> Evidence:
        process = context.worker()
        with sockets.borrowed(process) as connections:
            for each in connections.values():
                sockets.reset(each)
            return {"pid": process.pid, "peers": list(connections)}
