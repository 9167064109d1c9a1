"""A training script of one rank with three lines for `resilient`: what scripts do on a GPU, by its first word.

cuda_script.py WAY STEPS [KILLED]     with KILLED it kills itself in these steps (a,b,...), once each, by marks in the run directory
"""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import resilient

WIDTH, BATCH, EAGER = 256, 64, 3
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
ON_GPU = DEVICE.type == "cuda"


class Net(nn.Module):
    """Residual layers that drop out, and statistics of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(4)
        )
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        out: Tensor = self.head(self.norm(x))
        return out


class Training:
    """A step of each way. Attributes: more: what `attach` is given beside model and optimizer."""

    def __init__(self, way: str) -> None:
        self.way, self.more = way, {}
        self.model: nn.Module = Net().to(DEVICE)
        self.scaler = torch.amp.GradScaler(DEVICE.type) if way == "fp16" else None
        self.numbers = torch.Generator(device=DEVICE).manual_seed(5)
        self.average = None
        if way == "fsdp2":
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

            for layer in self.model.layers:
                fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
            fully_shard(self.model)
        elif way in ("ddp", "fp16", "compiled"):
            self.model = nn.parallel.DistributedDataParallel(self.model, device_ids=[0] if ON_GPU else None)
        if way == "average":
            self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        rate = torch.tensor(1e-3, device=DEVICE) if way == "graph" else 1e-3
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, capturable=way == "graph" and ON_GPU)
        extra = {"fp16": self.scaler, "generator": {"numbers": self.numbers}, "average": {"average": self.average}}
        self.more = {"extra": extra.get(way, {})}
        self.called = torch.compile(self.model) if way == "compiled" else self.model
        self.graph: torch.cuda.CUDAGraph | None = None
        self.steps = 0
        self.held = (torch.empty(BATCH, WIDTH, device=DEVICE), torch.empty(BATCH, 1, device=DEVICE))

    def backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss, of no dimensions; gradients are there."""
        self.optimizer.zero_grad(set_to_none=True)
        half = torch.float16 if self.way == "fp16" and ON_GPU else torch.bfloat16
        with torch.autocast(DEVICE.type, dtype=half, enabled=self.way in ("fp16", "compiled")):
            out = self.called(inputs)
        if self.way == "generator":
            out = out + 0.01 * torch.randn(out.shape, device=DEVICE, generator=self.numbers)
        loss = F.mse_loss(out.float(), targets)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        return loss

    def update(self) -> None:
        """Change the weights."""
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if self.average is not None:
            self.average.update_parameters(self.model)

    def replayed(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """A whole step by a CUDA graph, after the first ones of this process, which prepare it."""
        for place, given in zip(self.held, (inputs, targets), strict=True):
            place.copy_(given)
        self.steps += 1
        if self.steps <= EAGER:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                loss = self.backward(*self.held)
                self.update()
            torch.cuda.current_stream().wait_stream(side)
            return loss
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            self.optimizer.zero_grad(set_to_none=True)
            with torch.cuda.graph(self.graph):
                self.loss = self.backward(*self.held)
                self.update()
        self.graph.replay()
        return self.loss


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs (BATCH, WIDTH) and what they sum to (BATCH, 1), on the CPU; always the same ones."""
    numbers = torch.Generator().manual_seed(2)
    while True:
        inputs = torch.randn(BATCH, WIDTH, generator=numbers)
        yield inputs, inputs.sum(1, keepdim=True) / 16


def main(way: str, last_step: int, killed: frozenset[int]) -> None:
    backend = "nccl" if ON_GPU else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(1)
    training = Training(way)
    snapshots = resilient.attach(model=training.model, optimizer=training.optimizer, **training.more)
    data, taken = batches(), 0
    for step in snapshots.steps(last_step):
        while taken <= step:
            batch, taken = next(data), taken + 1
        inputs, targets = (each.to(DEVICE) for each in batch)
        if way == "graph" and ON_GPU:
            loss = training.replayed(inputs, targets)
        else:
            loss = training.backward(inputs, targets)
        if step in killed and not (mark := Path(f"killed-{way}-{step}")).exists():
            loss.item()
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if way != "graph" or not ON_GPU:
            training.update()
        print(f"step {step + 1} loss {loss.item()!r}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), frozenset(map(int, sys.argv[3].split(","))) if len(sys.argv) > 3 else frozenset())
