"""A training script as people write them for torchrun: DDP, AdamW, a DataLoader, its own checkpoints, and nothing of resilient.

It misbehaves where it is told to, once for each time that is told: `--fault hang:12:1` as in *what:step:rank*. Its steps take no
longer than they must once there is a file `go-on`.
"""

import argparse
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset[torch.Tensor]):
    """Samples that are a function of their index; one of them may take for ever."""

    def __init__(self, length: int, stuck: Callable[[int], bool]) -> None:
        self.length, self.stuck = length, stuck

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.stuck(index + 1):
            time.sleep(3600)
        return torch.full((8,), index % 7 / 7)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--optimizer", choices=["adamw", "sgd", "momentum"], default="adamw")
    parser.add_argument("--raise-after", type=int, default=0)
    parser.add_argument("--fault", action="append", default=[])
    parser.add_argument("--handle-sigterm", action="store_true")
    parser.add_argument("--ask", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    parameters = model.parameters()
    optimizers = {
        "adamw": lambda: torch.optim.AdamW(parameters, 1e-2),
        "sgd": lambda: torch.optim.SGD(parameters, 1e-2),
        "momentum": lambda: torch.optim.SGD(parameters, 1e-2, momentum=0.9),
    }
    optimizer = optimizers[args.optimizer]()
    done, checkpoint = 0, args.out / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["step"]

    def due(what: str, step: int) -> bool:
        name = f"{what}:{step}:{rank}"
        marker = args.out / f"had-{name}"
        if name not in args.fault or marker.exists():
            return False
        marker.touch()
        return True

    stop: list[int] = []
    if args.handle_sigterm:
        signal.signal(signal.SIGTERM, lambda number, _: stop.append(number))
    samples = Numbers(args.steps, lambda step: due("data", step))
    loader = DataLoader(samples, batch_size=1, sampler=range(done, args.steps))
    began = done
    try:
        for batch in loader:
            step = done + 1
            if due("hang", step):
                time.sleep(3600)
            if due("exit", step):
                os._exit(3)
            if args.raise_after and done - began == args.raise_after and rank == 1:
                raise RuntimeError(f"no luck with step {step}")
            optimizer.zero_grad()
            loss = model(batch).pow(2).mean()
            loss.backward()
            optimizer.step()
            done = step
            if not Path("go-on").exists():
                time.sleep(args.step_s)
            if rank == 0:
                print(f"step {step} loss {loss.item()!r}", flush=True)
                if step % args.save_every == 0:
                    save(checkpoint, model, optimizer, done)
            if stop or (args.ask and asked_to_stop()):
                if rank == 0:
                    save(checkpoint, model, optimizer, done)
                break
    finally:
        if done and rank == 0:
            print(f"leaving after step {done}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def asked_to_stop() -> bool:
    from resilient import worker

    return worker.should_stop() is not None


def save(checkpoint: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    partial = checkpoint.with_suffix(".partial")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, partial)
    partial.rename(checkpoint)


if __name__ == "__main__":
    main()
