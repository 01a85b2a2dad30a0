"""Small models with objectives unlike language modelling: preference pairs and flow matching."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from fluxtrain.methods.objective import B, BoundTask, Objective
from fluxtrain.train.checkpoint.randomness import seed_everything

WORDS, WIDTH, LENGTH, LATENT = 11, 8, 5, 6


class Block(nn.Module):
    """A residual block that mixes its input (rows, ..., WIDTH) with the mean of earlier places."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        if hidden.dim() == 3:
            places = torch.arange(1, hidden.shape[1] + 1, device=hidden.device)
            hidden = hidden + hidden.cumsum(1) / places[:, None]
        out: Tensor = hidden + self.down(torch.tanh(self.up(hidden)))
        return out


# --- preference pairs -----------------------------------------------------------------------------


class WordModel(nn.Module):
    """Logits (rows, LENGTH, WORDS) of word numbers (rows, LENGTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden)
        return logits


@dataclass(frozen=True)
class Pairs:
    """Two sequences a row: the one that is preferred, and the other; each (rows, LENGTH)."""

    chosen: Tensor
    rejected: Tensor


class Preference:
    """Direct preference optimization against a frozen reference model."""

    unit = "pairs"
    beta = 0.5

    def __init__(self, model: nn.Module) -> None:
        self.reference = copy.deepcopy(model).requires_grad_(False).eval()

    def count(self, batch: Pairs) -> int:
        return len(batch.chosen)

    def rows(self, batch: Pairs) -> int:
        return 2 * len(batch.chosen)

    def tokens(self, batch: Pairs) -> int:
        return batch.chosen.numel() + batch.rejected.numel()

    def loss(self, model: nn.Module, batch: Pairs, step_count: int) -> Tensor:
        return -logsigmoid(self._margins(model, batch)).sum() / step_count

    def metrics(self, model: nn.Module, batch: Pairs) -> Mapping[str, float]:
        margins = self._margins(model, batch)
        return {
            "loss": float(-logsigmoid(margins).mean()),
            "accuracy": float((margins > 0).float().mean()),
        }

    def to(self, batch: Pairs, device: torch.device) -> Pairs:
        return Pairs(batch.chosen.to(device), batch.rejected.to(device))

    def _margins(self, model: nn.Module, batch: Pairs) -> Tensor:
        """(pairs,): by how much more than the reference `model` prefers the chosen sequence."""
        ids = torch.cat([batch.chosen, batch.rejected])
        with torch.no_grad():
            reference = _log_probabilities(self.reference, ids)
        chosen, rejected = (_log_probabilities(model, ids) - reference).chunk(2)
        return self.beta * (chosen - rejected)


def _log_probabilities(model: nn.Module, ids: Tensor) -> Tensor:
    """(rows,): of every sequence behind its first word."""
    logits = torch.log_softmax(model(ids)[:, :-1], -1)
    return logits.gather(-1, ids[:, 1:, None]).squeeze(-1).sum(-1)


# --- flow matching --------------------------------------------------------------------------------


class FlowModel(nn.Module):
    """A velocity (rows, LATENT) of noised latents (rows, LATENT) at times (rows, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(LATENT + 1, WIDTH), nn.Linear(WIDTH, LATENT)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, latents: Tensor, times: Tensor) -> Tensor:
        hidden = self.first(torch.cat([latents, times], -1))
        for block in self.blocks:
            hidden = block(hidden)
        velocity: Tensor = self.last(hidden)
        return velocity


class FlowMatching:
    """The mean squared error of the velocity from latents to noise, over elements."""

    unit = "elements"

    def count(self, batch: Tensor) -> int:
        return batch.numel()

    def rows(self, batch: Tensor) -> int:
        return len(batch)

    def tokens(self, batch: Tensor) -> int:
        return 0

    def loss(self, model: nn.Module, batch: Tensor, step_count: int) -> Tensor:
        noise, times = torch.randn_like(batch), torch.rand(len(batch), 1)
        noised = (1 - times) * batch + times * noise
        velocity: Tensor = model(noised, times)
        return (velocity - (noise - batch).to(velocity.device)).square().sum() / step_count

    def metrics(self, model: nn.Module, batch: Tensor) -> Mapping[str, float]:
        return {"loss": float(self.loss(model, batch, batch.numel()))}

    def to(self, batch: Tensor, device: torch.device) -> Tensor:
        return batch.to(device)


# --- what both are trained with -------------------------------------------------------------------


class Stream(Generic[B]):
    """The batches of a list, two uneven ones a step by default, over and over."""

    def __init__(self, batches: list[B]) -> None:
        self.batches, self.batches_a_step, self.position = batches, 2, 0

    @property
    def epoch(self) -> float:
        return self.position / len(self.batches)

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.batches) // self.batches_a_step)

    def next_step(self) -> list[B]:
        first, self.position = self.position, self.position + self.batches_a_step
        return [self.batches[i % len(self.batches)] for i in range(first, self.position)]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


@dataclass
class Case(Generic[B]):
    """A model with its task, made anew for every run."""

    model: nn.Module
    objective: Objective[B]
    data: Stream[B]

    @property
    def task(self) -> BoundTask[B]:
        """What it learns: evaluated on the same batches."""
        return BoundTask(
            objective=self.objective, data=self.data, held_out=lambda: self.data.batches
        )


def _sizes() -> Iterator[int]:
    return iter([4, 2, 3, 4, 1, 4])


def preference() -> Case[Any]:
    seed_everything(3)
    model = WordModel()
    batches = [Pairs(*torch.randint(0, WORDS, (2, rows, LENGTH)).unbind()) for rows in _sizes()]
    return Case(model, Preference(model), Stream(batches))


def flow_matching() -> Case[Any]:
    seed_everything(3)
    model = FlowModel()
    batches = [torch.randn(rows, LATENT) for rows in _sizes()]
    return Case(model, FlowMatching(), Stream(batches))
