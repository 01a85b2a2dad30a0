"""Whole optimizer steps: against the oracle, against torch, in the background or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fluxtrain
from fluxtrain.core.adamw import reference
from fluxtrain.core.adamw.hyper import Hyper, coefficients
from fluxtrain.core.updates.norm import clip_scale
from fluxtrain.core.wrap.engine import engine_of
from tests.wrap_with import wrap_with

STEPS = 20
MAX_NORM = 0.3  # no power of two: then order and number of roundings show


def grouped(model: nn.Module) -> torch.optim.AdamW:
    """AdamW with decay on matrices only, and a larger rate for vectors."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": 0.1, "lr": 2e-3},
        {"params": vectors, "weight_decay": 0.0, "lr": 5e-3},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98))


def masters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The fp32 masters of all parameters in the optimizer's order."""
    held = optimizer.state["fluxtrain"]  # type: ignore[index]
    every = [p for group in optimizer.param_groups for p in group["params"]]
    return [
        reference.decode(p.detach(), held[i]["lo"]) if "lo" in held[i] else p.detach().clone()
        for i, p in enumerate(every)
    ]


class Oracle:
    """AdamW by `core/adamw/reference.py`, one parameter at a time."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.parameters = [p for g in optimizer.param_groups for p in g["params"]]
        self.master = [p.detach().float().clone() for p in self.parameters]
        self.m = [torch.zeros_like(w) for w in self.master]
        self.v = [torch.zeros_like(w) for w in self.master]

    def step(self, gradients: list[Tensor], step: int, scale: float) -> None:
        options = [g for g in self.optimizer.param_groups for _ in g["params"]]
        for i, (gradient, o) in enumerate(zip(gradients, options, strict=True)):
            hyper = Hyper(o["lr"], o["betas"], o["eps"], o["weight_decay"])
            self.master[i], self.m[i], self.v[i] = reference.adamw(
                self.master[i], self.m[i], self.v[i], gradient, coefficients(hyper, step, scale)
            )


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("family", "offload"), [("llama", "weights"), ("qwen2", "max"), ("llama", "none")]
)
def test_twenty_clipped_bf16_steps_equal_the_oracle_and_torch_on_fp32_masters(
    family: str, offload: str, tiny: Any, batch: Any
) -> None:
    """The oracle bit for bit; torch, fed the same rounded gradients, to 1e-6 a step."""
    model = fluxtrain.wrap(tiny(family, torch.bfloat16), offload=offload, chunk_rows=2)
    engine, optimizer = engine_of(model), grouped(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    oracle = Oracle(optimizer)
    twins = [nn.Parameter(w.clone()) for w in oracle.master]
    theirs = grouped_like(optimizer, twins)
    for step in range(1, STEPS + 1):
        model(**batch(family, seed=step)).loss.backward()
        gradients = [p.grad.detach().clone() for p in oracle.parameters]
        assert all(g.dtype == torch.bfloat16 for g in gradients)
        norm = engine.clip_grad_norm(MAX_NORM).value()
        exact = torch.cat([g.double().flatten() for g in gradients]).norm().item()
        assert norm == pytest.approx(exact, rel=1e-6)
        optimizer.step()
        optimizer.zero_grad()
        oracle.step(gradients, step, clip_scale(norm, MAX_NORM))
        for ours, expected in zip(masters(optimizer), oracle.master, strict=True):
            assert torch.equal(ours, reference.decode(*reference.encode(expected)))
        for twin, gradient in zip(twins, gradients, strict=True):
            twin.grad = gradient.float()
        torch.nn.utils.clip_grad_norm_(twins, MAX_NORM)
        for ours_group, their_group in zip(
            optimizer.param_groups, theirs.param_groups, strict=True
        ):
            their_group["lr"] = ours_group["lr"]
        theirs.step()
        for ours, twin in zip(masters(optimizer), twins, strict=True):
            assert float((ours - twin).detach().norm()) <= 1e-6 * step * float(ours.norm())
        schedule.step()


def grouped_like(optimizer: torch.optim.Optimizer, twins: list[nn.Parameter]) -> torch.optim.AdamW:
    """The same groups and options over other tensors."""
    left = iter(twins)
    groups = [{**g, "params": [next(left) for _ in g["params"]]} for g in optimizer.param_groups]
    return torch.optim.AdamW(groups)


def train(
    model: nn.Module, family: str, batch: Any, *, clip: str, passes: int = 1, steps: int = 6
) -> list[Tensor]:
    """Losses of a few steps of an ordinary loop."""
    optimizer, losses = grouped(model), []
    for step in range(steps):
        for k in range(passes):
            loss = model(**batch(family, seed=10 * step + k)).loss / passes
            loss.backward()
            losses.append(loss.detach().clone())
        if clip == "torch":
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        elif clip == "engine":
            engine_of(model).clip_grad_norm(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    if "_fluxtrain_engine" in model.__dict__:
        engine_of(model).flush()
    return losses


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2", "vit"])
@pytest.mark.thinned(2)
def test_updates_in_the_background_give_the_bits_of_updates_in_the_foreground(
    family: str, dtype: torch.dtype, passes: int, tiny: Any, batch: Any, weights: Any, same: Any
) -> None:
    def inputs(family: str, seed: int) -> dict[str, Tensor]:
        made: dict[str, Tensor] = batch(family, seed=seed, dtype=dtype)
        return made

    found = []
    for overlap in (False, True):
        model = fluxtrain.wrap(tiny(family, dtype), overlap=overlap, chunk_rows=3)
        losses = train(model, family, inputs, clip="engine", passes=passes)
        found.append({"losses": torch.stack(losses), **weights(model)})
    same(found[0], found[1])


@pytest.mark.parametrize("clip", ["torch", "engine", "none"])
@pytest.mark.thinned(8)
def test_fp32_training_follows_the_plain_model(
    clip: str, family: str, tiny: Any, batch: Any, weights: Any, close: Any
) -> None:
    """Losses to 1e-5 over six steps, however the gradients are clipped."""
    plain, wrapped = tiny(family), fluxtrain.wrap(tiny(family), chunk_rows=2)
    theirs = train(plain, family, batch, clip="torch" if clip == "engine" else clip)
    ours = train(wrapped, family, batch, clip=clip)
    assert torch.allclose(torch.stack(ours), torch.stack(theirs), rtol=1e-5)
    close(weights(plain), weights(wrapped), 2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_norm_of_several_passes_is_that_of_the_sum_wherever_it_lives(
    dtype: torch.dtype, tiny: Any, batch: Any
) -> None:
    found = []
    for offload, groups in (("weights", 0), ("weights", 2), ("none", None)):
        model = wrap_with(tiny("qwen2", dtype), offload=offload, device_groups=groups)
        for seed in range(3):
            (model(**batch("qwen2", seed=seed)).loss / 3).backward()
        norm = engine_of(model).clip_grad_norm(None).value()
        parts = [p.grad.double().norm() for p in model.parameters() if p.grad is not None]
        assert norm == pytest.approx(float(torch.stack(parts).norm()), rel=1e-5)
        found.append(norm)
    assert found[1:] == pytest.approx([found[0]] * 2, rel=1e-2 if dtype == torch.bfloat16 else 1e-5)


def test_each_parameter_group_keeps_its_rate_decay_and_schedule(tiny: Any, batch: Any) -> None:
    model = fluxtrain.wrap(tiny("llama"))
    optimizer = grouped(model)
    optimizer.param_groups[1]["lr"] = 0.0
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    moved = []
    for _ in range(2):
        model(**batch()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        now = {n: p.detach().clone() for n, p in model.named_parameters()}
        moved.append(max(float((now[n] - before[n]).abs().max()) for n in now))
        assert all(
            torch.equal(now[n], before[n]) for n, p in model.named_parameters() if p.dim() < 2
        )
        before = now
    assert moved[0] > 1.5 * moved[1] > 0


def test_a_parameter_without_a_gradient_is_not_stepped(tiny: Any, batch: Any) -> None:
    """As in torch: no gradient, no decay, no count."""
    model = fluxtrain.wrap(tiny("llama"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)
    for step in range(3):
        model(**batch(seed=step)).loss.backward()
        kept = model.model.layers[1].mlp.up_proj.weight
        before = kept.detach().clone()
        if step == 1:
            kept.grad = None
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(kept.detach(), before) == (step == 1)
    counts = {entry["step"] for entry in optimizer.state["fluxtrain"].values()}  # type: ignore[index]
    assert counts == {2, 3}
