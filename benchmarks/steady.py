"""What supervision costs while nothing happens: processor time of agent, keeper and driver, as a share of a core.

    python benchmarks/steady.py [--ranks 8] [--step-ms 65] [--seconds 20]

The ranks only sleep, beat and report, so that what is measured is the runtime alone. What it costs in tokens per second is
`python benchmarks/trainer.py --part supervised`.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import psutil
from launchers import make

SCRIPT = """
import sys, time
from resilient import worker

rank, step = worker.init().rank, 0
while worker.should_stop() is None:
    began = time.time()
    with worker.phase("step"):
        time.sleep({step_s})
    step += 1
    if rank == 0:
        worker.report({{"step": step, "step_s": time.time() - began, "loss": 1.0}})
    worker.beat(step)
"""
CONFIG = """
name: steady
run_dir: {directory}/run
entrypoint: {directory}/script.py
cluster: {{procs_per_node: {ranks}, threads_per_proc: 1}}
data: {{path: {directory}/none}}
model: {{vocab_size: 256}}
train: {{steps: 1000000, global_batch_size: {ranks}, micro_batch_size: 1}}
"""
SETTLE_S = 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--step-ms", type=float, default=65.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="steady-") as scratch:
        directory = Path(scratch)
        (directory / "script.py").write_text(SCRIPT.format(step_s=args.step_ms / 1000))
        config = directory / "config.yaml"
        config.write_text(CONFIG.format(directory=directory, ranks=args.ranks))
        run = make("resilient", config, directory / "run", args.ranks, None)
        try:
            run.start()
            time.sleep(SETTLE_S)
            before = spent(run.family())
            began = time.monotonic()
            time.sleep(args.seconds)
            took = time.monotonic() - began
            after = spent(run.family())
        finally:
            run.stop()
    sys.stdout.write(f"share of a core, {args.ranks} ranks with steps of {args.step_ms:g} ms, over {took:.0f} s\n")
    for name, seconds in after.items():
        sys.stdout.write(f"  {name:8} {100 * (seconds - before[name]) / took:6.2f} %\n")


def spent(family: list[psutil.Process]) -> dict[str, float]:
    """Processor seconds so far, by what a process is."""
    found = dict.fromkeys(("driver", "agent", "keeper"), 0.0)
    for process in family:
        command = process.cmdline()
        kind = "agent" if "resilient.agent" in command else "keeper" if "checkpoint.tiers.keeper" in command else ""
        if kind or process.pid == family[0].pid:
            times = process.cpu_times()
            found[kind or "driver"] += times.user + times.system
    return found


if __name__ == "__main__":
    main()
