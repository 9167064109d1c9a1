"""A run whose numbers go bad behind a checkpoint."""

from control_play import VICTIM, Play

from resilient.outbox import Effect
from resilient.recovery.faults import Raised

BAD = Raised("BadBatch", "4 batches in a row are bad", "a traceback", 9.2, None, "not_finite", 6)


def durable(play: Play, step: int) -> None:
    """A step is held by all nodes and committed."""
    play.held(0, step, wants=["scratch"])
    effects = play.held(1, step, wants=["scratch"])
    orders = [order for _, order in play.jobs("flush", effects)]
    play.flushed(orders[0])
    play.committed(orders[0])


def spoilt(play: Play) -> list[Effect]:
    """The numbers are bad: since step 6, told at step 9."""
    play.beat(0, 8)
    play.exit(1, 1, VICTIM, step=8)
    return play.exit(0, 1, BAD, step=8)
