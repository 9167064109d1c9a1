"""What other launchers run in `recovery.py`: the trainer, unsupervised, with its metrics written to a file.

torchrun_entry.py RUN_DIR CONFIG [KEY=VALUE]...

Under NVRx's launcher it beats as its documentation asks.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

sys.path.remove(str(Path(__file__).parent))  # where benchmarks/trainer.py would be the package `trainer`

from resilient import worker
from trainer.main import prepare, train


def main() -> None:
    directory, config_path, *overrides = sys.argv[1:]
    config = worker.load_config(Path(config_path), overrides)
    pids = Path(directory) / "pids"
    pids.mkdir(parents=True, exist_ok=True)
    (pids / os.environ["RANK"]).write_text(str(os.getpid()))
    attempt = time.time()

    def report(fields: Mapping[str, object], *, event: str | None = None) -> None:
        if event is None:
            with (Path(directory) / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({**fields, "generation": attempt, "t": time.time()}) + "\n")

    worker.report = report  # type: ignore[assignment]
    if "FT_RANK_MONITOR_IPC_SOCKET" in os.environ:
        worker.beat = heartbeat()
    prepare(config, lambda what, done, total: None)
    train(config)


def heartbeat() -> Callable[[int], None]:
    """Tells NVRx's rank monitor of each step."""
    from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient  # type: ignore[import-not-found]

    client = RankMonitorClient()
    client.init_workload_monitoring()
    return lambda step: client.send_heartbeat()


if __name__ == "__main__":
    main()
