"""What a step does."""

import torch
from torch import distributed as dist


class Trainer:
    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def step(self, inputs: torch.Tensor) -> torch.Tensor:
        from checkpoint import again  # when it is first called

        loss = (again(self.model, inputs) - inputs).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
        self.optimizer.step()
        dist.all_reduce(loss := loss.detach())
        return loss
