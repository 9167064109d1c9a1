"""Loaders as Accelerate prepares them, and a loop over one; imported only by what uses them."""

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard, SkipBatchSampler, prepare_data_loader
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from resilient.integrations import accelerate as adapter

DATA = TensorDataset(torch.arange(16.0).reshape(16, 1))
WEIGHTS = [1.0 + each for each in range(8)]


class Own(RandomSampler):
    """Of a script."""


SAMPLERS: dict[str, Callable[[Any], Sampler[int]]] = {
    "random": lambda generator: RandomSampler(DATA, generator=generator),
    "own": lambda generator: Own(DATA, generator=generator),
    "weighted": lambda generator: WeightedRandomSampler(WEIGHTS, 8, generator=generator),
    "subset": lambda generator: SubsetRandomSampler(range(8), generator=generator),
    "in order": lambda _: SequentialSampler(DATA),
}


def prepared(kind: str, *, generator: torch.Generator | None = None, seedable: bool = False, ranks: int = 1) -> Any:
    """The loader of the last of so many ranks."""
    _reset()
    Accelerator(cpu=True)
    loader = DataLoader(DATA, 2, sampler=SAMPLERS[kind](generator))
    return prepare_data_loader(loader, num_processes=ranks, process_index=ranks - 1, use_seedable_sampler=seedable)


def is_refused(loader: Any) -> bool:
    return adapter._shuffles_unseeded(loader)


def of_two_ranks(kind: str, *, skipped: int = 0) -> DataLoader[Any]:
    """As a loader of Accelerate's is inside."""
    shard = BatchSamplerShard(BatchSampler(SAMPLERS[kind](None), 2, False), 2, 0)
    return DataLoader(DATA, batch_sampler=SkipBatchSampler(shard, skipped) if skipped else shard)


def losses(kind: str, steps: int, ranks: int) -> list[float]:
    """Of a loop that reads several epochs, whose order the sampler's own generator draws."""
    loader = prepared(kind, generator=torch.Generator().manual_seed(3), ranks=ranks)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    torch.nn.init.ones_(model.weight)
    torch.nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    model, optimizer = accelerator.prepare(model, optimizer)
    found = []
    for (features,) in adapter.Snapshots(accelerator, model=model, optimizer=optimizer, loader=loader).batches(steps):
        loss = model(features).square().sum()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def _reset() -> None:
    for each in (AcceleratorState, GradientState, PartialState):
        each._reset_state()
