"""A LightningModule and a Trainer as people write them: it saves, and goes on from what it saved. It knows nothing of resilient.

python examples/lightning_module.py --steps 20
torchrun --nproc_per_node 2 examples/lightning_module.py --steps 40     # goes on at step 20
resilient run --procs 2 examples/lightning_module.py --steps 2000       # and is started again whatever happens to it
"""

import argparse
import os
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader  # so that it goes on in the middle of an epoch


class Sums(pl.LightningModule):
    """Learns the sum of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        features, targets = batch  # (batch, 8), (batch, 1)
        loss = torch.nn.functional.mse_loss(self.layers(features), targets)
        if self.trainer.is_global_zero:
            print(f"step {self.global_step + 1} loss {loss.item()!r}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("runs/lightning"))
    args = parser.parse_args()
    pl.seed_everything(0)
    inputs = torch.randn(512, 8)
    loader = StatefulDataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8)
    trainer = pl.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        max_steps=args.steps,
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        default_root_dir=args.out,
        callbacks=[ModelCheckpoint(args.out, every_n_train_steps=args.save_steps, save_last=True)],
    )
    last = args.out / "last.ckpt"
    trainer.fit(Sums(), loader, ckpt_path=last if last.exists() else None)


if __name__ == "__main__":
    main()
