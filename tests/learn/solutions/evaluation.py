from typing import Any

import torch
from torch import nn


def loglikelihood(model: nn.Module, context: list[int], answer: list[int]) -> float:
    tokens = torch.tensor([context + answer])
    steps = model(tokens)[0].log_softmax(-1)
    begin = len(context)
    return sum(float(steps[at - 1, tokens[0, at]]) for at in range(begin, tokens.shape[1]))


def accuracy(model: nn.Module, rows: list[dict[str, Any]]) -> float:
    right = 0
    for row in rows:
        scores = [loglikelihood(model, row["context"], one) / len(one) for one in row["choices"]]
        right += scores.index(max(scores)) == row["gold"]
    return right / len(rows)
