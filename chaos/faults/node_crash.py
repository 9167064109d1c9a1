"""A node crashes, as far as that can be done without its power switch."""

import shutil

from chaos.fault import Aim, CannotInject, Evidence, Expectation, Outside
from chaos.injectors.context import InjectionContext
from chaos.primitives.processes import continues, end, end_at_once, is_gone


class NodeCrash(Outside):
    """All that runs on a node ends at once, and what it held in RAM and on disks of its own is gone."""

    aim = Aim.NODE
    undone = "the driver starts the agent anew; what was held is gone"

    def expects(self) -> Expectation:
        # A buddy that was fetching from the node may say so first.
        kinds, actions = frozenset({"node_lost"}), frozenset({"replace_node", "restart_agent", "shrink", "grow"})
        return Expectation(kinds, actions, culprit=True, lost_steps=None)

    def inject(self, context: InjectionContext) -> Evidence:
        agent = context.agent()
        node = context.target.node
        assert node is not None
        held = {
            path: path.with_name(f".{path.name}.gone") for path in (*context.held(node), *context.memory(node)) if path.exists()
        }
        context.guard.add(["rm", "-rf", *map(str, held.values())])
        context.guard.add(continues(agent))
        agent.suspend()  # nothing is started anew before all is gone, and the driver hears nothing
        ended: list[int] = []
        # Stopped, the agent cannot take leave of those that have ended: they stay its children.
        while below := [each for each in agent.children(recursive=True) if not is_gone(each)]:
            ended += end_at_once(below)
        for path, aside in held.items():
            path.rename(aside)
        end(agent)
        size = sum(file.stat().st_size for aside in held.values() for file in aside.rglob("*") if file.is_file())
        for aside in held.values():
            shutil.rmtree(aside, ignore_errors=True)
        if left := [str(aside) for aside in held.values() if aside.exists()]:
            raise CannotInject(f"{', '.join(left)} cannot be removed")
        return {"pid": agent.pid, "state": "gone", "below": ended, "held": [str(path) for path in held], "bytes": size}
