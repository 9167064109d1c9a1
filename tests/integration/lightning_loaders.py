"""A script of Lightning with one of several loaders; what it does between steps: validation, plateaus, averages, ends of epochs."""

import argparse
import os
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from safetensors.torch import save_file
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from resilient.integrations.lightning import ResilientCallback


class Sums(pl.LightningModule):
    """Learns the sum of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0  # batches; in checkpoints by a hook alone
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = self.seen

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["seen"]

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        self.seen += 1
        return torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        noise = torch.rand(1).item()  # a validation that draws numbers
        self.log("val_loss", torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1]) + noise / 100, sync_dist=True)

    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            self.layers[0].bias += 0.001 * self.seen  # type: ignore[operator]

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.9, patience=1)
        if any(isinstance(each, StochasticWeightAveraging) for each in self.trainer.callbacks):
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}
        plateau = {"scheduler": scheduler, "interval": "step", "frequency": 5, "monitor": "val_loss", "strict": False}
        return {"optimizer": optimizer, "lr_scheduler": plateau}


class Endless(IterableDataset):
    """Batches of which nobody knows how many there are."""

    def __init__(self, data: Dataset) -> None:
        self.data = data

    def __iter__(self):
        return (self.data[number] for number in range(200))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("loader", choices=["plain", "generator", "workers", "stateful", "unsized", "ema", "swa"])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    pl.seed_everything(0)
    inputs = torch.randn(208, 8)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loaders = {
        "plain": lambda: DataLoader(data, batch_size=8, shuffle=True),
        "generator": lambda: DataLoader(data, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(5)),
        "workers": lambda: DataLoader(data, batch_size=8, shuffle=True, num_workers=1),
        "stateful": lambda: StatefulDataLoader(data, batch_size=8, shuffle=True),
        "unsized": lambda: DataLoader(Endless(data), batch_size=8),
    }
    averages = {"ema": [EMAWeightAveraging(decay=0.9)], "swa": [StochasticWeightAveraging(1e-3, swa_epoch_start=1)]}
    callbacks = [ResilientCallback(), ModelCheckpoint(args.out, monitor="val_loss", save_last=True), *averages.get(args.loader, [])]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        max_steps=args.steps,
        max_epochs=-1,
        accumulate_grad_batches=2,
        val_check_interval=6,
        log_every_n_steps=1,
        logger=False,
        enable_progress_bar=False,
        default_root_dir=args.out,
        callbacks=callbacks,
    )
    model = Sums()
    loader = loaders["plain" if args.loader in averages else args.loader]()
    trainer.fit(model, loader, DataLoader(data, batch_size=104), ckpt_path="last" if args.loader in averages else None)
    if trainer.is_global_zero:
        save_file(model.state_dict(), args.out / "model.safetensors")


if __name__ == "__main__":
    main()
