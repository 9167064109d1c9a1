"""The campaign of the README's picture: the quickstart with faults, drawn by the tool itself.

    python benchmarks/campaign.py [--svg docs/campaign.svg]

A worker is killed, one is stopped, the agent is killed with all workers, the command is killed and run again, Ctrl-C is pressed and
the command run again, and another worker is killed. Exit status 1 if the run does not reach its target.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from launchers import Resilient, make

from resilient.status import draw

PATIENCE_S = 900.0  # for a score of steps, on a machine that has other things to do
ROOT = Path(__file__).parents[1]
# Steps that are far enough from one another for their marks, and the last one before the learning rate is at its end.
KILL, STOP, AGENT, DRIVER, CTRL_C, AGAIN = 20, 38, 56, 74, 90, 105


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--svg", type=Path, default=ROOT / "docs/campaign.svg")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="campaign-") as scratch:
        run = make("resilient", ROOT / "examples/quickstart.yaml", Path(scratch) / "run", 2, None)
        assert isinstance(run, Resilient)
        try:
            status = hurt(run)
            sys.stdout.write(f"the run ended with status {status}; {draw(run.run_dir, args.svg)}\n")
        finally:
            run.stop()
    return int(status != 0)


def hurt(run: Resilient) -> int:
    """Start it, hurt it, and wait for its end; its exit status."""
    run.patience_s = PATIENCE_S
    run.start()
    reach(run, KILL)
    os.kill(run.ranks()[1], signal.SIGKILL)
    reach(run, STOP)
    os.kill(run.ranks()[0], signal.SIGSTOP)
    reach(run, AGENT)
    run.agents()[0].kill()
    reach(run, DRIVER)
    assert run.process is not None
    run.process.kill()
    run.process.wait()
    time.sleep(1.0)  # as long as a person needs for the up arrow
    run.start()
    reach(run, CTRL_C)
    run.process.send_signal(signal.SIGINT)
    run.process.wait()
    time.sleep(1.0)  # as long as a person needs for the up arrow
    run.start()
    reach(run, AGAIN)
    os.kill(run.ranks()[1], signal.SIGKILL)
    return run.process.wait(timeout=run.patience_s)


def reach(run: Resilient, step: int) -> None:
    run.wait(lambda line: line["step"] >= step)


if __name__ == "__main__":
    sys.exit(main())
