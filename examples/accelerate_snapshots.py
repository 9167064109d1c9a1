"""The loop of accelerate_loop.py with `Snapshots`: no step is lost that had a snapshot in RAM or on disk.

python examples/accelerate_snapshots.py --steps 20
torchrun --nproc_per_node 2 examples/accelerate_snapshots.py --steps 40
resilient run --procs 2 examples/accelerate_snapshots.py --steps 2000
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, TensorDataset

from resilient.integrations.accelerate import Snapshots

ACCUMULATE = 2  # batches of each rank in a step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("runs/accelerate-snapshots"))
    args = parser.parse_args()
    order = DataLoaderConfiguration(use_seedable_sampler=True)  # that of an epoch follows from its number
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=ACCUMULATE, dataloader_config=order)
    set_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, args.steps)
    inputs = torch.randn(512, 8)  # (sample, feature)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    snapshots = Snapshots(accelerator, model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    for features, targets in snapshots.batches(args.steps):
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(features), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        snapshots.report(loss=loss.item())
    accelerator.save_model(model, args.out)
    accelerator.end_training()


if __name__ == "__main__":
    main()
