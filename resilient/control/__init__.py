"""The control core: what is decided for a job, as a state machine without clock, file, socket or event loop.

News go in with the time at which they came; effects are appended to an outbox (`resilient.outbox`). Start at `coordinator`.
"""

from resilient.control.coordinator import Coordinator
from resilient.control.job import JobSpec

__all__ = ["Coordinator", "JobSpec"]
