"""Task 6: evaluation by log-likelihood."""

from typing import Any

import torch
from torch import nn


def loglikelihood(model: nn.Module, context: list[int], answer: list[int]) -> float:
    """Return the log-probability of the answer's tokens behind the context."""
    raise NotImplementedError


def accuracy(model: nn.Module, rows: list[dict[str, Any]]) -> float:
    """Return the share of rows whose right choice is the likeliest a token."""
    raise NotImplementedError
