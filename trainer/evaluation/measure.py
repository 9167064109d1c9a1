"""How well a model predicts text that it has not seen: loss, perplexity and bits a byte, of each corpus and of all.

A campaign's own validation split is read in the order in which the campaign reads it, so that the same samples give the loss that
it reports. Bits a byte (as in Gao et al., The Pile, 2020) do not depend on the tokenizer: what is divided by is the UTF-8 bytes of
the tokens that were predicted.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from resilient.worker import Config
from trainer.batches import unfolded
from trainer.data.samples import Samples, Split, open_split
from trainer.evaluation.sizes import Bytes
from trainer.loss import IGNORED
from trainer.model import GPT
from trainer.sources import datasets, end_of_text


@dataclass
class Tally:
    """What was found of a corpus.

    Attributes:
        tokens: that were predicted.
        nats: their summed loss.
        size_bytes: of their text; None where the tokenizer does not say.
    """

    tokens: int = 0
    nats: float = 0.0
    size_bytes: int | None = 0

    def add(self, tokens: int, nats: float, size_bytes: int | None) -> None:
        """Some more of it."""
        self.tokens += tokens
        self.nats += nats
        self.size_bytes = None if size_bytes is None or self.size_bytes is None else self.size_bytes + size_bytes

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.nats / max(self.tokens, 1)

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float | None:
        return self.nats / math.log(2) / self.size_bytes if self.size_bytes else None

    def figures(self) -> dict[str, float | int | None]:
        """As they are recorded."""
        return {"tokens": self.tokens, "loss": self.loss, "perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}


@dataclass
class Evaluation:
    """Of one checkpoint, over all and by corpus."""

    whole: Tally = field(default_factory=Tally)
    corpora: dict[str, Tally] = field(default_factory=dict)


@dataclass(frozen=True)
class Text:
    """Samples to evaluate on: the first `count`. `names` are those of the corpora that they are drawn from."""

    samples: Samples
    count: int
    names: tuple[str, ...]


def texts(config: Config, vocab: int, data: Sequence[Path], split: Split, most: int | None) -> list[Text]:
    """What a model of this config is evaluated on.

    Args:
        vocab: tokens that the model knows.
        data: prefixes of indexed datasets, each read whole; none: the split of the config's own.
        most: samples of each; None: of the config's own as many as the campaign validates on, of others all.

    Raises:
        DataError: a dataset is not good, or has no sample.
    """
    seq_len, seed = config.model.seq_len, config.seed
    if data:
        found = []
        for prefix, name in zip(data, _names(data), strict=True):
            samples = open_split([(prefix, 1.0)], (1, 0, 0), "train", seq_len, seed, vocab_size=vocab)
            found.append(Text(samples, min(most or len(samples), len(samples)), (name,)))
        return found
    own = datasets(config)
    samples = open_split(own, config.data.split, split, seq_len, seed, vocab_size=vocab)
    count = most or config.train.eval_iters * config.train.global_batch_size
    return [Text(samples, count, tuple(_names([prefix for prefix, _ in own])))]


def _names(prefixes: Sequence[Path]) -> list[str]:
    """Last parts of the paths, where these tell them apart."""
    short = [prefix.name for prefix in prefixes]
    return short if len(set(short)) == len(short) else [str(prefix) for prefix in prefixes]


@torch.no_grad()
def evaluate(
    model: GPT, config: Config, parts: Sequence[Text], *, rows: int, sizes: Bytes | None, progress: Callable[[int, int], None]
) -> Evaluation:
    """Evaluate a model, on the device and in the precision that its weights have.

    Args:
        rows: samples computed at once.
        sizes: bytes of each token, (vocabulary); None: not known.
        progress: samples done, of how many.
    """
    result, end = Evaluation(), end_of_text(config)
    device = model.embedding.weight.device
    total, done = sum(part.count for part in parts), 0
    for part in parts:
        tallies = [result.corpora.setdefault(name, Tally()) for name in part.names]
        for first in range(0, part.count, rows):
            numbers = np.arange(first, min(first + rows, part.count), dtype=np.int64)
            batch = unfolded(torch.from_numpy(part.samples.get(numbers)), config, end)
            targets = batch.targets.numpy()
            moved = batch.locked(device).to(device)
            logits = model(moved.tokens, moved.positions, moved.documents).float()  # (rows, seq, vocabulary)
            losses = F.cross_entropy(logits.flatten(0, 1), moved.targets.flatten(), reduction="none", ignore_index=IGNORED)
            nats = losses.view(moved.targets.shape).double().sum(1).tolist()
            for row, which in enumerate(part.samples.dataset_of(numbers)):
                counted = targets[row][targets[row] != IGNORED]
                found = len(counted), nats[row], None if sizes is None else int(sizes[counted].sum())
                tallies[which].add(*found)
                result.whole.add(*found)
            done += len(numbers)
            progress(done, total)
    return result
