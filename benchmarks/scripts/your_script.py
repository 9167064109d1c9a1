"""What `your_script.py` runs under each launcher: the script of transformers, with its steps written down from outside.

your_script.py DIRECTORY SCRIPT ARGS...
"""

import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments  # noqa: F401 - as the script does


def main() -> None:
    directory, script, *words = sys.argv[1:]
    pids = Path(directory) / "pids"
    pids.mkdir(parents=True, exist_ok=True)
    (pids / os.environ["RANK"]).write_text(str(os.getpid()))
    if os.environ["RANK"] == "0":
        generation, file, last_t = time.time(), (Path(directory) / "metrics.jsonl").open("a"), [time.time()]

        def after_step(*_: Any) -> None:
            t = time.time()
            file.write(json.dumps({"t": t, "generation": generation, "step_s": t - last_t[0]}) + "\n")
            file.flush()
            last_t[0] = t

        register_optimizer_step_post_hook(after_step)
    sys.argv = [script, *words]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
