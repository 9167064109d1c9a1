"""A loop with Accelerate as people write them: it saves, and goes on from what it saved. It knows nothing of resilient.

python examples/accelerate_loop.py --steps 20
torchrun --nproc_per_node 2 examples/accelerate_loop.py --steps 40     # goes on at step 20
resilient run --procs 2 examples/accelerate_loop.py --steps 2000       # and is started again whatever happens to it
"""

import argparse
import shutil
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, TensorDataset

ACCUMULATE = 2  # batches of each rank in a step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("runs/accelerate"))
    args = parser.parse_args()
    order = DataLoaderConfiguration(use_seedable_sampler=True)  # that of an epoch follows from its number
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=ACCUMULATE, dataloader_config=order)
    set_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, args.steps)
    inputs = torch.randn(512, 8)  # (sample, feature)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    step, args.out = 0, args.out.absolute()
    saved = sorted(args.out.glob("step-*"))
    if saved:
        step = int(saved[-1].name.removeprefix("step-"))
        accelerator.load_state(str(saved[-1]))
    epoch, done = divmod(step * ACCUMULATE, len(loader))
    while step < args.steps:
        batches = accelerator.skip_first_batches(loader, done)
        batches.set_epoch(epoch)
        for features, targets in batches:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(features), targets)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                step += 1
                accelerator.print(f"step {step} loss {loss.item()!r}", flush=True)
                if step % args.save_steps == 0:
                    save(accelerator, args.out, step)
                if step == args.steps:
                    break
        epoch, done = epoch + 1, 0
    accelerator.end_training()


def save(accelerator: Accelerator, out: Path, step: int) -> None:
    """A folder that has its name is whole."""
    partial = out / f"partial-{step}"
    accelerator.save_state(str(partial))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(out / f"step-{step:08}", ignore_errors=True)
        partial.rename(out / f"step-{step:08}")
        for old in sorted(out.glob("step-*"))[:-3]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
