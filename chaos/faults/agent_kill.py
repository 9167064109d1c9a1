"""An agent is killed."""

from chaos.fault import Aim, Evidence, Expectation, Outside
from chaos.injectors.context import InjectionContext
from chaos.primitives.processes import end


class AgentKill(Outside):
    """The agent of a node is killed (SIGKILL); its workers go with it, what the node holds stays."""

    aim = Aim.NODE

    def expects(self) -> Expectation:
        actions = frozenset({"replace_node", "restart_agent", "shrink", "grow"})
        return Expectation(frozenset({"node_lost"}), actions, culprit=True)

    def inject(self, context: InjectionContext) -> Evidence:
        process = context.agent()
        end(process)
        return {"pid": process.pid, "state": "gone"}
