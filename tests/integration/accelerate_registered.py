"""A loop with Accelerate: an average of its weights is kept by `register_for_checkpointing` alone; rank 0 may deal batches out."""

import argparse
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from safetensors.torch import save_file
from torch.utils.data import DataLoader, TensorDataset

from resilient.integrations.accelerate import Snapshots


class Average:
    """Of the weights, by each step's."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.count = model, 0
        self.weights = {name: value.detach().clone() for name, value in model.state_dict().items()}

    def update(self) -> None:
        self.count += 1
        for name, value in self.model.state_dict().items():
            self.weights[name].lerp_(value, 1 / self.count)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.weights = state["count"], state["weights"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dispatch", action="store_true")
    args = parser.parse_args()
    order = DataLoaderConfiguration(use_seedable_sampler=True, dispatch_batches=args.dispatch)
    accelerator = Accelerator(cpu=True, dataloader_config=order)
    set_seed(0)
    model = torch.nn.Linear(8, 1)
    average = Average(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, args.steps)
    inputs = torch.randn(208, 8)  # (sample, feature)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    accelerator.register_for_checkpointing(average, scheduler)  # the scheduler is given below as well

    snapshots = Snapshots(accelerator, model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    for features, targets in snapshots.batches(args.steps):
        loss = torch.nn.functional.mse_loss(model(features), targets)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        average.update()
        snapshots.report(loss=loss.item())
    if accelerator.is_main_process:
        args.out.mkdir(exist_ok=True)
        save_file(average.weights, args.out / "model.safetensors")
    accelerator.end_training()


if __name__ == "__main__":
    main()
