"""What torchrun runs in `recovery.py`: the trainer, unsupervised, with its metrics written to a file.

torchrun_entry.py METRICS CONFIG [KEY=VALUE]...
"""

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path

sys.path.remove(str(Path(__file__).parent))  # where benchmarks/trainer.py would be the package `trainer`

from resilient import worker
from trainer.main import prepare, train


def main() -> None:
    metrics, config_path, *overrides = sys.argv[1:]
    config = worker.load_config(Path(config_path), overrides)

    def report(fields: Mapping[str, object], *, event: str | None = None) -> None:
        if event is None:
            with Path(metrics).open("a") as file:
                file.write(json.dumps({**fields, "t": time.time()}) + "\n")

    worker.report = report  # type: ignore[assignment]
    config.run_dir.mkdir(parents=True, exist_ok=True)
    prepare(config, lambda what, done, total: None)
    train(config)


if __name__ == "__main__":
    main()
