"""A training script at a pace that a test can keep up with: before each step it waits so many seconds. `SECONDS SCRIPT ARGS...`"""

import runpy
import sys
import time

from resilient import worker

step_s = float(sys.argv[1])
asked = worker.should_stop


def after_a_while() -> str | None:
    time.sleep(step_s)
    return asked()


worker.should_stop = after_a_while
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
