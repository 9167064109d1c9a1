"""resilient: a fault-tolerant training runtime.

`resilient run config.yaml` starts three layers of processes. The *driver* (`resilient.driver`, one per job) owns the job:
signals, generations, the ledger. The *agent* (`resilient.agent`, one per node) owns the node: it forks workers warm, watches
them, and outlives them. The *worker* (one per rank) runs the entry point that the config names and talks to the runtime
through the six calls of `resilient.worker`, all of which do nothing when no supervisor is there.

A training script that wants its state kept calls `resilient.attach` (`resilient.state`), which is imported when it is asked for.
Nothing is imported before, so that `resilient --help` stays quick.
"""

from typing import TYPE_CHECKING, Any

from resilient.imports import shadowing

if TYPE_CHECKING:
    from resilient.state.attach import Attached, attach

__all__ = ["Attached", "attach"]

shadowing.look()


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'resilient' has no attribute {name!r}")
    from resilient.state import attach as room

    return getattr(room, name)
