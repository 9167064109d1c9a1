"""What a case of gpu.py is given.

On a GPU the model is that of `examples/opengptx-800m.yaml` at world 1; in a dry run it is a tiny one, on the CPU.
"""

import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from gpu_report import Figure

from resilient.worker import Config, load_config

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples/opengptx-800m.yaml"
TINY = ("layers=2", "hidden=32", "heads=2", "ffn_hidden=64", "vocab_size=256")
SHORTER = 64  # times, in a dry run, are sequences


class LeftOut(Exception):
    """This case cannot be measured here; why."""


@dataclass(frozen=True)
class Batch:
    """Of a step: samples of a micro batch, micro batches, tokens of a sample."""

    micro: int
    accumulation: int
    seq_len: int = 2048


@dataclass(frozen=True)
class Setting:
    """Attributes: known: figures of cases before this one, by `case/name`."""

    dry: bool
    scratch: Path
    known: Mapping[str, float]

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.dry else torch.device("cuda", 0)

    @property
    def kind(self) -> str:
        """As `cluster.device` has it."""
        return "cpu" if self.dry else "cuda"

    def figure(
        self,
        name: str,
        unit: str,
        value: float | Sequence[float],
        note: str = "",
        *,
        peer: str = "",
        peer_value: float | None = None,
    ) -> Figure:
        """A figure of one value, or the median of several; see `Figure`."""
        measured = () if isinstance(value, int | float) else tuple(value)
        one = float(value) if isinstance(value, int | float) else statistics.median(measured)
        return Figure(name, unit, one, not self.dry, note, peer, peer_value, measured if len(measured) > 1 else ())

    def overrides(self, name: str, batch: Batch) -> list[str]:
        """What makes the example one of world 1, on random tokens."""
        tokens = self.scratch / "random"
        if not Path(f"{tokens}.idx").exists():
            _write_tokens(tokens, 256 if self.dry else 50257)
        seq_len = batch.seq_len // SHORTER if self.dry else batch.seq_len
        return [
            *(f"run_dir={self.scratch / name}", "cluster.procs_per_node=1", f"cluster.device={self.kind}"),
            *(f"train.global_batch_size={batch.micro * batch.accumulation}", f"train.micro_batch_size={batch.micro}"),
            *("train.samples=null", "train.steps=1000000", "train.eval_interval=0", "train.exit_duration_min=null"),
            *("optimizer.decay_samples=1000000", "optimizer.warmup_samples=320", f"model.seq_len={seq_len}"),
            *(f"data.path={tokens}", "data.split=[1,0,0]", "logging.level=error"),
            *([*(f"model.{each}" for each in TINY), "cluster.threads_per_proc=1"] if self.dry else []),
        ]

    def config(self, name: str, batch: Batch, *more: str) -> Config:
        """The example's, changed so. Args: name: of its run directory."""
        os.environ.setdefault("SCRATCH", str(self.scratch))
        os.environ.setdefault("PROJECT", str(self.scratch))
        return load_config(EXAMPLE, [*self.overrides(name, batch), *more])


Case = Callable[[Setting], Iterator[Figure]]


def _write_tokens(prefix: Path, vocabulary: int) -> None:
    import numpy as np

    from trainer.data.indexed import IndexedWriter

    with IndexedWriter(prefix, np.dtype("<u2")) as writer:
        numbers = np.random.default_rng(0)
        for _ in range(64):
            writer.add(numbers.integers(0, vocabulary, 16384).tolist())
        writer.commit({})
