"""The plain script and this trainer, each in a process of its own that runs steps when it is told to and waits otherwise.

python benchmarks/contestants.py NAME     # reads from stdin how many steps, writes how fast; at its end, what it took
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from plain_gpt import Size, plain_script
from step_anatomy import MADE, counted  # which takes this folder off the path, where trainer.py would be the package `trainer`

from resilient.worker import Config, init

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZE = Size(layers=6, hidden=512, heads=8, seq_len=512, vocab_size=4096, micro_batch=4, accumulation=4)

PLAIN, EAGER, COMPILED = "plain script, eager", "this trainer, eager", "this trainer, compiled"


class Contestant:
    """A process that runs steps when it is told to, with as many threads as a rank has, and waits otherwise."""

    def __init__(self, name: str) -> None:
        environ = {"OMP_NUM_THREADS": "1", **os.environ}
        command = [sys.executable, __file__, name]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)
        self._answer("ready")

    def speed(self, steps: int) -> float:
        """Tokens per second."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        return float(self._answer())

    def took(self) -> tuple[float, float | None]:
        """MiB of memory at its most, and of the tensors that a step made; the process ends."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        found = json.loads(self._answer())
        self._process.wait()
        return found["peak"] / 2**20, found["made"] and found["made"] / 2**20

    def _answer(self, awaited: str | None = None) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if awaited is None or line.strip() == awaited:
                return line
        raise SystemExit(f"a contestant ended with {self._process.wait()}")


def config_of(directory: Path, **sections: dict[str, object]) -> Config:
    """A config of the trainer for random tokens in this directory; `sections` has what is different."""
    base: dict[str, dict[str, object]] = {
        "model": {
            **{"layers": SIZE.layers, "hidden": SIZE.hidden, "heads": SIZE.heads, "seq_len": SIZE.seq_len},
            **{"vocab_size": SIZE.vocab_size, "norm": "layernorm", "mlp": "gelu"},
        },
        "train": {
            **{"global_batch_size": SIZE.micro_batch * SIZE.accumulation, "micro_batch_size": SIZE.micro_batch},
            **{"precision": "bf16", "steps": 10**6, "eval_interval": 0},
        },
        "data": {"path": str(directory / "random"), "split": [1, 0, 0]},
        "checkpoint": {"every_steps": 10**6},
        "logging": {"level": "error"},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return Config.model_validate({"run_dir": str(directory / "run"), **base})


def write_tokens(directory: Path) -> None:
    """The data of such a config."""
    import numpy as np

    from trainer.data.indexed import IndexedWriter

    with IndexedWriter(directory / "random", np.dtype("<u2")) as writer:
        random = np.random.default_rng(0)
        for _ in range(64):
            writer.add(random.integers(0, SIZE.vocab_size, 16384).tolist())
        writer.commit({})


def trainer_script(directory: Path, *, compiled: bool) -> Callable[[], None]:
    """A step of this trainer, data and reports included."""
    import trainer.loop

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            "gloo" if DEVICE.type == "cpu" else "cpu:gloo,cuda:nccl", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
    trainer.loop._join = lambda *_: None  # a rank without a rendezvous
    made = trainer.loop.Trainer(config_of(directory, train={"compile": compiled}), init())
    return made._step


def timed(step: Callable[[], None], count: int) -> float:
    """Tokens per second of `count` steps."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        step()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return count * SIZE.tokens / (time.perf_counter() - began)


def resident_peak() -> int:
    """Bytes that this process had in RAM at its most. (`ru_maxrss` of a process starts at that of its parent.)"""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def main(name: str) -> None:
    """Run steps for each line of stdin that says how many, and say how fast they were; then what they took."""
    with tempfile.TemporaryDirectory() as place:
        write_tokens(Path(place))
        step = plain_script(SIZE, DEVICE) if name == PLAIN else trainer_script(Path(place), compiled=name == COMPILED)
        step()
        step()
        print("ready", flush=True)
        for line in sys.stdin:
            print(timed(step, int(line)), flush=True)
        peak = torch.cuda.max_memory_allocated() if DEVICE.type == "cuda" else resident_peak()
        print(json.dumps({"peak": peak, "made": counted(step)[MADE] if name != COMPILED else None}))


if __name__ == "__main__":
    main(sys.argv[1])
