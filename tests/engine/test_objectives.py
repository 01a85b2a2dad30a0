"""Objectives that are not language modelling train through the loop as it is.

Two small ones, of the kinds that are most unlike it: preference pairs, with two sequences a row and
a frozen reference model, and flow matching, with latents, noise and timesteps in place of tokens.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

import fluxtrain
from fluxtrain.plan.facts import Offload
from fluxtrain.stream.engine import engine_of
from fluxtrain.telemetry import events as ev
from fluxtrain.train.announce import Announcer
from fluxtrain.train.cadence import Cadence
from fluxtrain.train.calibrate import calibrate
from fluxtrain.train.checkpoint import read_checkpoint
from fluxtrain.train.checkpoint_writer import CheckpointWriter
from fluxtrain.train.console import line
from fluxtrain.train.loop import LoopSettings, TrainingLoop
from fluxtrain.train.objective import B, BoundBatch, Objective, Task
from fluxtrain.train.optimizer import EngineAdamW
from fluxtrain.train.randomness import seed_everything
from fluxtrain.train.requests import Requests
from fluxtrain.train.run_state import RunState

WORDS, WIDTH, LENGTH, LATENT = 11, 8, 5, 6
RATE = 1e-2


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
    def task(self) -> Task[B]:
        """What it learns: evaluated on the same batches."""
        return Task(objective=self.objective, data=self.data, held_out=lambda: self.data.batches)


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


class NoChanges:
    """Stands for the live changes of a run: nobody asks for one."""

    waiting = False

    def carry_out(self, _step: int) -> None: ...
    def step_took(self, _step: object) -> None: ...
    def disturbed(self) -> None: ...
    def finish(self, _step: int) -> None: ...


class Silent:
    def emit(self, _event: object) -> None: ...


def trained(
    case: Case[Any],
    folder: Path,
    *,
    steps: int = 6,
    until: int | None = None,
    evaluate_every: int = 3,
    resumed_from: Path | None = None,
    offload: Offload = "weights",
    max_grad_norm: float | None = 0.5,
) -> list[ev.Event]:
    """The events of a run; `until` is the step after which the process is over."""
    seen: list[ev.Event] = []
    model = fluxtrain.wrap(case.model, device="cpu", offload=offload, chunk_rows=2, overlap=True)
    engine = engine_of(model)
    silent, unchanged, state = Silent(), NoChanges(), RunState()
    announcer = Announcer(silent, seen.append)  # type: ignore[arg-type]
    optimizer = EngineAdamW(engine, model.parameters(), lr=RATE)
    writer = CheckpointWriter(
        folder, Cadence(every=3, total_steps=steps, share=1.0), 9, announcer, {}, optimizer
    )
    seed_everything(5)
    if resumed_from is not None:
        state = writer.restore(read_checkpoint(resumed_from), engine, case.data)
    loop = TrainingLoop(
        model=model,
        optimizer=optimizer,
        task=case.task,
        settings=LoopSettings(
            total_steps=until or steps,
            max_grad_norm=max_grad_norm,
            evaluations=Cadence(every=evaluate_every, total_steps=steps, share=1.0),
            learning_rate_at=lambda step: RATE / (1 + step),
        ),
        checkpoints=writer,
        announcer=announcer,
        requests=Requests(),
        changes=unchanged,  # type: ignore[arg-type]
        state=state,
    )
    try:
        loop.run()
    finally:
        fluxtrain.unwrap(model)
    return seen


def plain_losses(case: Case[Any], steps: int = 6) -> list[float]:
    """The textbook loop over the model as it is: a mean over all units of a step."""
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=RATE)
    objective, losses = case.objective, []
    seed_everything(5)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = RATE / (1 + step)
        batches = case.data.next_step()
        units = [objective.count(batch) for batch in batches]
        means = [objective.loss(case.model, b, n) for b, n in zip(batches, units, strict=True)]
        loss = sum(m * n for m, n in zip(means, units, strict=True)) / sum(units)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(case.model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def steps_of(events: list[ev.Event]) -> dict[int, float]:
    return {e.step: e.loss for e in events if isinstance(e, ev.StepFinished)}


def evaluations_of(events: list[ev.Event]) -> list[ev.EvaluationFinished]:
    return [e for e in events if isinstance(e, ev.EvaluationFinished)]


Make = Callable[[], Case[Any]]
both = pytest.mark.parametrize("make", [preference, flow_matching])


@both
@pytest.mark.parametrize("offload", ["none", "weights"])
def test_uneven_batches_of_a_step_weigh_what_they_hold(
    make: Make, tmp_path: Path, offload: Offload
) -> None:
    losses = steps_of(trained(make(), tmp_path, offload=offload))
    assert list(losses.values()) == pytest.approx(plain_losses(make()), rel=1e-4)
    assert losses[6] != losses[1]


@both
def test_a_resumed_run_goes_on_with_the_same_losses_and_metrics(make: Make, tmp_path: Path) -> None:
    whole = trained(make(), tmp_path / "whole")
    first = trained(make(), tmp_path / "halves", until=3)
    second = trained(make(), tmp_path / "halves", resumed_from=tmp_path / "halves/step-00000003")
    assert steps_of(first) | steps_of(second) == steps_of(whole)
    assert list(steps_of(second)) == [4, 5, 6]
    halves = [*evaluations_of(first), *evaluations_of(second)]
    assert [(e.step, e.metrics) for e in halves] == [
        (e.step, e.metrics) for e in evaluations_of(whole)
    ]


@both
def test_evaluating_draws_nothing_from_the_random_numbers_of_the_training(
    make: Make, tmp_path: Path
) -> None:
    often = trained(make(), tmp_path / "often", evaluate_every=1)
    seldom = trained(make(), tmp_path / "seldom", evaluate_every=6)
    assert [e.step for e in evaluations_of(often)] == [1, 2, 3, 4, 5, 6]
    assert steps_of(often) == steps_of(seldom)
    assert evaluations_of(often)[-1].metrics == evaluations_of(seldom)[-1].metrics


@both
def test_blocks_are_updated_in_the_backward_pass_of_any_objective(
    make: Make, tmp_path: Path
) -> None:
    """One batch a step and no clipping."""
    losses = []
    for limit in (None, 1e9):
        case = make()
        case.data.batches_a_step = 1
        losses.append(steps_of(trained(case, tmp_path / str(limit), max_grad_norm=limit)))
    assert losses[0] == losses[1]


def test_the_metrics_of_preference_pairs_are_means_over_pairs(tmp_path: Path) -> None:
    case = preference()
    told = evaluations_of(trained(case, tmp_path))[-1]
    batches, objective = case.data.batches, case.objective
    with torch.no_grad():
        parts = [objective.metrics(case.model, batch) for batch in batches]
    for name in ("loss", "accuracy"):
        mean = (
            sum(p[name] * objective.count(b) for p, b in zip(parts, batches, strict=True))
            / told.count
        )
        assert told.metrics[name] == pytest.approx(mean, rel=1e-4)
    assert (told.count, told.unit) == (18, "pairs")
    assert 0 < told.metrics["accuracy"] <= 1
    assert f"accuracy {told.metrics['accuracy']:.4g} over 18 pairs" in line(told)
    assert told.loss < math.log(2)  # what the reference itself would have


def test_flow_matching_has_no_tokens_and_says_none(tmp_path: Path) -> None:
    events = trained(flow_matching(), tmp_path)
    told = [e for e in events if isinstance(e, ev.StepFinished)]
    assert {(step.tokens, step.tokens_per_s) for step in told} == {(0, 0)}
    assert all("tokens" not in line(step) for step in told)
    assert evaluations_of(events)[-1].count == 18 * LATENT


@both
def test_a_bound_batch_has_the_mean_loss_of_its_units(make: Make) -> None:
    case = make()
    batch = case.data.next_step()[0]
    bound = BoundBatch(case.objective, batch).to(torch.device("cpu"))
    seed_everything(0)
    with torch.no_grad():
        mean = case.objective.metrics(case.model, batch)["loss"]
    seed_everything(0)
    assert bound.loss(case.model).item() == pytest.approx(mean)
    assert bound.rows == case.objective.rows(batch)


@both
def test_a_block_is_timed_with_the_batches_of_any_objective(make: Make) -> None:
    case = make()

    def batch_of(rows: int) -> BoundBatch[Any]:
        return BoundBatch(case.objective, case.data.batches[0 if rows > 2 else 1])

    found = calibrate(case.model, batch_of, torch.device("cpu"), (2, 4))
    assert found.forward.at(4) > 0 < found.backward.at(4)
    assert found.rows == tuple(batch_of(rows).rows for rows in (2, 4))
