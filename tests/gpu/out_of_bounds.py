"""A script whose kernel reaches outside its memory in its thirtieth step, once. Args: a file that says that it has."""

import sys
from pathlib import Path

import torch
import triton
import triton.language as tl

import resilient


@triton.jit
def write(place, far):  # type: ignore[no-untyped-def]
    tl.store(place + far, 1.0)


def main(mark: Path) -> None:
    model = torch.nn.Linear(64, 64, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in resilient.attach(model=model, optimizer=optimizer).steps(90):
        model(torch.ones(8, 64, device="cuda")).square().mean().backward()
        if step == 30 and not mark.exists():
            mark.touch()
            write[(1,)](torch.zeros(16, device="cuda"), 1 << 44)
            torch.cuda.synchronize()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
