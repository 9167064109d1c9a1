"""A module of Lightning with `ResilientCallback`: no step is lost that had a snapshot in RAM or on disk.

python examples/lightning_snapshots.py --steps 20
torchrun --nproc_per_node 2 examples/lightning_snapshots.py --steps 40
resilient run --procs 2 examples/lightning_snapshots.py --steps 2000
"""

import argparse
import os
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from safetensors.torch import save_file
from torch.utils.data import DataLoader, TensorDataset

from resilient.integrations.lightning import ResilientCallback


class Sums(pl.LightningModule):
    """Learns the sum of its inputs."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        features, targets = batch  # (batch, 8), (batch, 1)
        return torch.nn.functional.mse_loss(self.layers(features), targets)

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        features, targets = batch
        self.log("val_loss", torch.nn.functional.mse_loss(self.layers(features), targets), sync_dist=True)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("runs/lightning-snapshots"))
    args = parser.parse_args()
    pl.seed_everything(0)
    inputs = torch.randn(512, 8)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    trainer = pl.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        max_steps=args.steps,
        max_epochs=-1,
        accumulate_grad_batches=2,
        val_check_interval=16,
        log_every_n_steps=1,
        logger=False,
        enable_progress_bar=False,
        default_root_dir=args.out,
        callbacks=[ResilientCallback(), ModelCheckpoint(args.out, monitor="val_loss", save_last=True)],
    )
    module = Sums(args.steps)
    trainer.fit(module, DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=64), ckpt_path="last")
    if trainer.is_global_zero:
        save_file(module.state_dict(), args.out / "model.safetensors")


if __name__ == "__main__":
    main()
