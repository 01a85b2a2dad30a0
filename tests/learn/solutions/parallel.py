import torch
import torch.distributed as dist
from torch import Tensor, nn


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor
) -> float:
    optimizer.zero_grad()
    loss = (model(inputs) - targets).square().sum()
    loss.backward()
    total = torch.tensor([loss.item(), float(len(inputs))])
    dist.all_reduce(total)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= total[1]
    optimizer.step()
    return float(total[0] / total[1])
