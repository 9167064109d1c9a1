"""The snapshot core: who holds what, what is complete, transferred, replicated, retained, invalid. Pure: no input or output.

`Snapshots` is all that others need; see there.
"""

from resilient.snapshots.plan import StoragePlan, TierPlan
from resilient.snapshots.snapshots import Snapshots

__all__ = ["Snapshots", "StoragePlan", "TierPlan"]
