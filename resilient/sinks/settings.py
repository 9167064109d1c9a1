"""What the driver tells the process of the sinks, and the names that both know."""

from typing import Any

import msgspec

GROUP = "resilient.sinks"  # entry points of other packages: each makes a sink
LOG = "logs/sinks.log"


class Settings(msgspec.Struct, frozen=True):
    """What the driver says of the campaign.

    Attributes:
        began_t: unix seconds at which the job began.
        sinks: settings of each, by name.
    """

    name: str
    run_dir: str
    began_t: float
    sinks: dict[str, dict[str, Any]]
