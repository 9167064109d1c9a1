"""A training script at a pace that a test can keep up with: before each step it waits so many seconds. `SECONDS SCRIPT ARGS...`

`SECONDS:STEP` has it stand still from this step on. Both end when the campaign may go on, see `holding`.
"""

import runpy
import sys
import time
from pathlib import Path

from holding import GO_ON, hold

from resilient import worker

step_s, _, since = sys.argv[1].partition(":")
asked, told = worker.should_stop, worker.beat
reached = 0


def beat(step: int) -> None:
    global reached
    reached = step
    told(step)


def after_a_while() -> str | None:
    if not GO_ON.exists():
        time.sleep(float(step_s))
    hold(reached, int(since) if since else None)
    return asked()


worker.should_stop, worker.beat = after_a_while, beat
sys.argv = sys.argv[2:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))  # as Python does with a script's
runpy.run_path(sys.argv[0], run_name="__main__")
