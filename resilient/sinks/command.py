"""`resilient sinks`: sends what the sinks of a campaign have not taken, between two jobs or after the last one."""

import logging
import threading
import time
from pathlib import Path

from resilient.access import must_be_ours, restrict
from resilient.config import load
from resilient.driver.lease import PATIENCE_S, holder
from resilient.exits import EnvironmentUnusable
from resilient.processes import must_be_run_directory
from resilient.sinks.process import Pulse, pumps
from resilient.sinks.settings import Settings

GIVE_UP_S = 60.0  # of a sink at which nothing has gone well for so long
POLL_S = 0.2


def send(run_dir: Path) -> str:
    """Feed the sinks to the end of the files, for as long as something goes on; what to say then.

    Raises:
        EnvironmentUnusable: there is no such campaign, it has no sinks, a job of it runs, which does the same, somebody else could
            have written its config, or a sink takes nothing.
    """
    must_be_run_directory(run_dir)
    config = load(run_dir / "config.yaml")
    must_be_ours(run_dir / "config.yaml", run_dir, config.run_dir_mode)  # it says what is sent where, files with tokens included
    restrict(config.run_dir_mode)
    if not config.logging.sinks.wanted:
        raise EnvironmentUnusable(f"{run_dir} has no sinks: its config says nothing of logging.sinks")
    if holder(run_dir, PATIENCE_S) is not None:
        raise EnvironmentUnusable(f"a job of {run_dir} runs, and feeds the sinks itself")
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    settings = Settings(config.name, str(run_dir.absolute()), 0.0, config.logging.sinks.wanted)
    ending = threading.Event()
    ending.set()
    nobody = Pulse()
    nobody.end()  # no job runs
    feeding = pumps(settings, nobody, ending)
    for pump in feeding:
        pump.start()
    try:
        while alive := [pump for pump in feeding if pump.is_alive()]:
            failing = [pump for pump in alive if pump.failing_s > GIVE_UP_S]
            if len(failing) == len(alive):
                left = ", ".join(f"{pump.name} ({pump.last_failure})" for pump in failing)
                raise EnvironmentUnusable(f"not all was sent: {left}; what is left is kept: call again once that works")
            time.sleep(POLL_S)  # a thread whose join Ctrl-C interrupts is taken for one that has ended (Python 3.11)
    except KeyboardInterrupt:
        left = ", ".join(pump.name for pump in feeding if pump.is_alive())
        return f"not all was sent: {left}" if left else "all was sent"
    refused = ", ".join(f"{pump.passed_over} lines that {pump.name} refuses" for pump in feeding if pump.passed_over)
    return f"all was sent, but for {refused}" if refused else "all was sent"
