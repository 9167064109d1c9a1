"""What should come of it when a node or a rank is not heard of for a while, by how long. Pure; with the runtime's own defaults."""

from chaos.fault import Expectation
from resilient.config.sections.fault_tolerance import Resilience
from resilient.config.timeouts import FENCE_S, LOST_WITH_SPARE_S

RESENDS = 2.0  # TCP's pauses grow, so that it may be silent for so many times as long as the network was
SHORT_S = LOST_WITH_SPARE_S / RESENDS + 1.0
LONG_S = FENCE_S + 10.0
HANG_S: float = Resilience.model_fields["hang_floor_s"].default

NODE_RUNGS = frozenset({"replace_node", "shrink", "grow", "restart_agent", "departed"})


def of_a_node(seconds: float) -> Expectation:
    """Nothing is restarted for a short one, beyond the fence the node is lost, and in between both is right."""
    if seconds <= SHORT_S:
        return Expectation(actions=frozenset({"wait"}))
    if seconds < LONG_S:
        return Expectation(actions=NODE_RUNGS | {"wait", "restart_workers"})
    return Expectation(frozenset({"node_lost"}), NODE_RUNGS | {"wait", "restart_workers"}, culprit=True)


def of_a_rank(seconds: float) -> Expectation:
    """A stall that no link explains: a hang, if it is long enough."""
    if RESENDS * seconds < HANG_S:
        return Expectation()
    kinds = frozenset({"collective_timeout", "hang"}) if seconds > 2 * HANG_S else frozenset[str]()
    return Expectation(kinds, frozenset({"restart_workers"}))
