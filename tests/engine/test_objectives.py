"""Objectives that are not language modelling train through the loop as it is.

Two small ones, of the kinds that are most unlike it: preference pairs, with two sequences a row and
a frozen reference model, and flow matching, with latents, noise and timesteps in place of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fluxtrain
from fluxtrain.config.cadence import Cadence
from fluxtrain.core.wrap.engine import engine_of
from fluxtrain.data.batches import Batch
from fluxtrain.events import events as ev
from fluxtrain.events.console import line
from fluxtrain.events.emitter import Announcer
from fluxtrain.measure.calibrate import calibrate
from fluxtrain.methods.objective import BoundBatch, choose_attention
from fluxtrain.methods.optimizer import EngineAdamW
from fluxtrain.methods.text_task import CausalLM
from fluxtrain.plan.facts import Offload
from fluxtrain.train.checkpoint.checkpoint import read_checkpoint
from fluxtrain.train.checkpoint.randomness import seed_everything
from fluxtrain.train.checkpoint.run_state import RunState
from fluxtrain.train.checkpoint.writer import CheckpointWriter
from fluxtrain.train.loop import LoopSettings, TrainingLoop
from fluxtrain.train.requests import Requests
from tests.engine.toy_objectives import LATENT, Case, flow_matching, preference

RATE = 1e-2


class NoChanges:
    """Stands for the live changes of a run: nobody asks for one."""

    waiting = False

    def carry_out(self, *_given: object) -> None: ...
    def step_took(self, _step: object) -> None: ...
    def disturbed(self) -> None: ...
    def keep_room(self, *_given: object) -> None: ...
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
def test_a_block_is_timed_with_the_batches_of_any_objective(make: Make) -> None:
    case = make()

    def batch_of(rows: int) -> BoundBatch[Any]:
        return BoundBatch(case.objective, case.data.batches[0 if rows > 2 else 1])

    found = calibrate(case.model, batch_of, torch.device("cpu"), (2, 4))
    assert found.forward.at(4) > 0 < found.backward.at(4)
    assert found.rows == tuple(batch_of(rows).rows for rows in (2, 4))


@pytest.mark.parametrize(("tokens", "allowed"), [(1024, True), (192, False), (48, False)])
def test_attention_of_cudnn_is_left_out_where_its_gradients_are_wrong(
    tokens: int, allowed: bool
) -> None:
    config = LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, vocab_size=8, max_position_embeddings=tokens,
    )  # fmt: skip
    ids = torch.ones(1, tokens, dtype=torch.int64)
    at = torch.arange(tokens)[None]
    batch = Batch(input_ids=ids, labels=ids, position_ids=at, predicted=tokens, tokens=tokens)
    CausalLM().loss(LlamaForCausalLM(config), batch, tokens)
    assert torch.backends.cuda.cudnn_sdp_enabled() == allowed
    choose_attention(None)
    assert not torch.backends.cuda.cudnn_sdp_enabled()
