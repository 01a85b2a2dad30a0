"""fp16 weights with fp32 masters and a loss scale: whole steps, overflow, homes, what is kept."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fluxtrain
from fluxtrain.errors import BadInput, Diverged, MisusedModel, UnsupportedModel
from fluxtrain.memory.group import Member
from fluxtrain.optim import reference
from fluxtrain.optim.clip import clip_scale
from fluxtrain.optim.hyper import Hyper, coefficients
from fluxtrain.plan import states as state_formats
from fluxtrain.stream.engine import Engine, engine_of
from fluxtrain.stream.grouping import facts_of
from fluxtrain.stream.loss_scale import BACKOFF, FIRST, LEAST, LossScale
from fluxtrain.stream.resettle import resettle

HALF = torch.float16
MAX_NORM = 0.5
RATE = 2e-3
TOO_LARGE = 2.0**40

HOMES = pytest.mark.parametrize("offload", ["weights", "none", "max"])


@pytest.fixture
def half(tiny: Any) -> Callable[..., tuple[nn.Module, Engine]]:
    """`half(family, scale, **options)`: a wrapped fp16 model with a loss scale, and its engine."""

    def make(
        family: str = "llama", scale: float = FIRST, interval: int = 2000, **options: Any
    ) -> tuple[nn.Module, Engine]:
        model = fluxtrain.wrap(tiny(family, HALF), **options)
        engine = engine_of(model)
        engine.loss_scale = LossScale(engine.device.torch_device, scale, interval)
        return model, engine

    return make


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: dict[str, Tensor]
) -> tuple[float, float]:
    """One step as the trainer makes it: loss, and norm before clipping."""
    engine = engine_of(model)
    assert engine.loss_scale is not None
    loss = model(**inputs).loss
    engine.loss_scale.of(loss).backward()
    norm = engine.clip_grad_norm(MAX_NORM, [loss])
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach()), norm.value()


def state(model: nn.Module) -> dict[str, Tensor]:
    """Everything that training changes, as copies."""
    engine = engine_of(model)
    return {
        f"{shard}.{name}": tensor.clone()
        for shard, tensors in engine.state_shards()
        for name, tensor in tensors.items()
    }


def masters(engine: Engine) -> dict[str, Tensor]:
    """fp32 masters by group and parameter."""
    return {f"{g.name}.{m.name}": m.states()["master"] for g, m in members(engine)}


def members(engine: Engine) -> list[tuple[Any, Member]]:
    engine.flush()
    return [(g, m) for g in engine.groups for m in g.members]


@HOMES
@pytest.mark.parametrize("states", ["fp32", "bf16", "8bit"])
def test_fp16_steps_equal_the_oracle_on_fp32_masters(
    half: Any, batch: Any, offload: str, states: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, from the scaled fp16 gradients; the weights are what the masters round to."""
    monkeypatch.setattr(state_formats, "LEAST_NARROW", 100)
    model, engine = half(offload=offload, states=states, chunk_rows=2)
    optimizer = adamw(model)
    hyper = Hyper(RATE, (0.9, 0.999), 1e-8, 0.1)
    expected: dict[int, Any] = {}
    for number in range(1, 6):
        loss = model(**batch(seed=number)).loss
        engine.loss_scale.of(loss).backward()
        scaled = {id(m): m.parameter.grad.detach().clone() for _, m in members(engine)}
        assert all(g.dtype == HALF for g in scaled.values())
        norm = engine.clip_grad_norm(MAX_NORM, [loss]).value()
        exact = torch.cat([g.double().flatten() for g in scaled.values()]).norm().item() / FIRST
        assert norm == pytest.approx(exact, rel=1e-6)
        before = {id(m): m.parameter.detach().float().flatten() for _, m in members(engine)}
        optimizer.step()
        optimizer.zero_grad()
        c = coefficients(hyper, number, clip_scale(norm, MAX_NORM) / FIRST)
        for _, member in members(engine):
            if member.segment.format != "fp32":
                continue  # what those formats do to moments is tested elsewhere
            zero = torch.zeros_like(before[id(member)])
            master, m, v = expected.get(id(member), (before[id(member)], zero, zero))
            found = reference.adamw(master, m, v, scaled[id(member)].flatten(), c)
            expected[id(member)] = found
            assert torch.equal(member.states()["master"].flatten(), found[0])
    for _, member in members(engine):
        weights = member.parameter.detach()
        assert weights.dtype == HALF
        assert torch.equal(weights, member.states()["master"].half())


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_a_streamed_fp16_training_follows_the_plain_one(
    family: str, half: Any, tiny: Any, batch: Any
) -> None:
    """Plain torch with fp32 masters and the same scale: losses to half a thousandth over 12 steps,
    in which they fall."""
    plain = tiny(family, HALF)
    theirs = [nn.Parameter(p.detach().float()) for p in plain.parameters()]
    reference_optimizer = torch.optim.AdamW(theirs, lr=RATE, weight_decay=0.1)
    model, engine = half(family, chunk_rows=2, overlap=True)
    optimizer = adamw(model)
    ours_losses, their_losses = [], []
    for number in range(12):
        inputs = batch(family, seed=number % 2)
        loss = plain(**inputs).loss
        (loss * FIRST).backward()
        for master, p in zip(theirs, plain.parameters(), strict=True):
            assert p.grad is not None
            master.grad, p.grad = p.grad.float() / FIRST, None
        torch.nn.utils.clip_grad_norm_(theirs, MAX_NORM)
        reference_optimizer.step()
        with torch.no_grad():
            for master, p in zip(theirs, plain.parameters(), strict=True):
                p.copy_(master)
        their_losses.append(float(loss.detach()))
        ours_losses.append(step(model, optimizer, inputs)[0])
    assert ours_losses == pytest.approx(their_losses, rel=5e-4)
    assert ours_losses[-1] < ours_losses[0] - 0.1
    assert float(engine.loss_scale.value) == FIRST


@pytest.mark.parametrize("states", ["fp32", "8bit"])
def test_every_placement_of_fp16_gives_the_same_bits(
    half: Any, batch: Any, same: Any, states: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_formats, "LEAST_NARROW", 100)
    found = []
    for options in (
        {"offload": "none"},
        {"offload": "weights", "overlap": True},
        {"offload": "weights", "device_groups": 2},
        {"offload": "max"},
    ):
        model, _ = half("qwen2", chunk_rows=2, states=states, **options)
        optimizer = adamw(model)
        for number in range(4):
            step(model, optimizer, batch("qwen2", seed=number))
        found.append(state(model))
    for other in found[1:]:
        same(found[0], other)


@HOMES
def test_an_overflow_leaves_everything_as_it_was_and_halves_the_scale(
    half: Any, batch: Any, same: Any, offload: str
) -> None:
    model, engine = half(offload=offload, overlap=True)
    optimizer = adamw(model)
    step(model, optimizer, batch(seed=0))
    before = state(model)
    engine.loss_scale.load_state_dict({"scale": TOO_LARGE, "good_steps": 7})
    loss, norm = step(model, optimizer, batch(seed=1))
    assert loss > 0
    assert not math.isfinite(norm)
    same(before, state(model))
    assert engine.loss_scale.state_dict() == {"scale": TOO_LARGE * BACKOFF, "good_steps": 0}


def test_training_goes_on_after_overflows_as_if_they_had_not_been(
    half: Any, batch: Any, same: Any
) -> None:
    """The count of steps for the bias correction too, although the next step is queued before
    anybody has read how the last one went."""
    found = []
    for wasted in (0, 5):
        model, engine = half(overlap=True, device_groups=2, offload="weights")
        optimizer = adamw(model)
        step(model, optimizer, batch(seed=0))
        engine.loss_scale.load_state_dict({"scale": FIRST * 2.0**wasted, "good_steps": 0})
        if wasted:
            spoilt = next(m for g, m in members(engine) if g.kind == "block")
            for _ in range(wasted):
                loss = model(**batch(seed=1)).loss
                engine.loss_scale.of(loss).backward()
                spoilt.parameter.grad.fill_(float("inf"))
                engine.clip_grad_norm(MAX_NORM, [loss])
                optimizer.step()
                optimizer.zero_grad()
        assert float(engine.loss_scale.value) == FIRST
        for number in range(1, 4):
            step(model, optimizer, batch(seed=number))
        found.append(state(model))
        counts = {entry["step"] for entry in optimizer.state_dict()["state"]["fluxtrain"].values()}
        assert counts == {4}
    same(found[0], found[1])


def test_the_scale_doubles_after_enough_steps_without_an_overflow(half: Any, batch: Any) -> None:
    model, engine = half(scale=2.0**10, interval=3)
    optimizer = adamw(model)
    seen = []
    for number in range(7):
        seen.append(float(engine.loss_scale.value))
        step(model, optimizer, batch(seed=number))
    assert seen == [2.0**10] * 3 + [2.0**11] * 3 + [2.0**12]


def test_the_scale_never_falls_below_one(half: Any, batch: Any) -> None:
    model, engine = half(scale=LEAST)
    optimizer = adamw(model)
    loss = model(**batch()).loss
    engine.loss_scale.of(loss).backward()
    next(model.parameters()).grad.fill_(float("inf"))
    engine.clip_grad_norm(None, [loss])
    optimizer.step()
    assert float(engine.loss_scale.value) == LEAST


def test_a_loss_that_is_not_finite_is_no_overflow(half: Any, batch: Any) -> None:
    """No scale cures it: the update says so, as in other precisions."""
    model, engine = half()
    optimizer = adamw(model)
    loss = model(**batch()).loss
    engine.loss_scale.of(loss).backward()
    norm = engine.clip_grad_norm(None, [loss * float("nan")])
    assert not norm.overflowed()
    with pytest.raises(Diverged):
        optimizer.step()


def test_several_backward_passes_add_up_beyond_the_range_of_fp16(half: Any, batch: Any) -> None:
    model, engine = half(offload="weights")
    loss = engine.loss_scale.of(model(**batch()).loss)
    loss.backward()
    once = engine.clip_grad_norm(None).value()
    largest = max(float(m.parameter.grad.abs().max()) for _, m in members(engine))
    model.zero_grad()
    passes = int(65504 / largest) + 2
    for _ in range(passes):
        engine.loss_scale.of(model(**batch()).loss).backward()
    assert engine.clip_grad_norm(None).value() == pytest.approx(passes * once, rel=1e-3)


def test_a_weight_that_is_written_from_outside_is_its_own_master(half: Any, batch: Any) -> None:
    model, engine = half()
    optimizer = adamw(model)
    step(model, optimizer, batch(seed=0))
    member = engine.groups[1].members[0]
    with torch.no_grad():
        member.parameter.zero_()
    step(model, optimizer, batch(seed=1))
    engine.flush()
    assert float(member.parameter.detach().abs().max()) <= 1.01 * RATE
    assert float(member.states()["master"].abs().max()) <= 1.01 * RATE


def test_a_saved_and_restored_fp16_training_goes_on_bit_for_bit(
    half: Any, batch: Any, same: Any
) -> None:
    """Through state_dict and torch.save, and through shards; the masters' lower bits too."""
    model, _ = half("qwen2", overlap=True)
    optimizer = adamw(model)
    for number in range(3):
        step(model, optimizer, batch("qwen2", seed=number))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved, shards = torch.load(file), list(engine_of(model).state_shards())
    shards = [(name, {k: t.clone() for k, t in tensors.items()}) for name, tensors in shards]
    by_torch, _ = half("qwen2")
    by_torch.load_state_dict(saved["model"])
    again = adamw(by_torch)
    again.load_state_dict(saved["optimizer"])
    by_shards, engine = half("qwen2", offload="none")
    for name, tensors in shards:
        engine.load_state_shard(name, tensors)
    third = adamw(by_shards)
    for number in range(3, 5):
        inputs = batch("qwen2", seed=number)
        for one, its in ((model, optimizer), (by_torch, again), (by_shards, third)):
            step(one, its, inputs)
    same(state(model), state(by_torch))
    same(state(model), state(by_shards))
    assert any(bool((m != m.half().float()).any()) for m in masters(engine_of(model)).values())


def test_moving_homes_in_between_changes_no_bit(half: Any, batch: Any, same: Any) -> None:
    found = []
    for moves in (False, True):
        model, engine = half(offload="weights")
        optimizer = adamw(model)
        for number in range(4):
            if moves and number in (1, 3):
                resettle(
                    engine, device_groups=2 if number == 1 else 0, resident_blocks=1, slots=2,
                    kept_blocks=0, chunk_rows=engine.chunk_rows, need=engine.plan.need,
                )  # fmt: skip
            step(model, optimizer, batch(seed=number))
        found.append(state(model))
    same(found[0], found[1])


def test_small_probabilities_at_the_head_keep_their_gradients(tiny: Any, batch: Any) -> None:
    """The mean over a batch makes slopes of 1e-8 and less, which fp16 does not know: the head keeps
    them larger until they meet the loss scale."""
    found = []
    for dtype in (HALF, torch.float32):
        model = fluxtrain.wrap(tiny("llama", HALF).to(dtype), chunk_rows=2)
        loss = model(**batch(rows=16, length=32)).loss
        (loss * FIRST).backward()
        found.append(model.lm_head.weight.grad.float() / FIRST)
    error = (found[0] - found[1]).norm() / found[1].norm()
    assert float(error) < 2e-3


@pytest.mark.parametrize("rows", [1, 2])
def test_a_head_over_many_equal_tokens_does_not_overflow(tiny: Any, rows: int) -> None:
    """On the way to fp32 sums: thousands of tokens with the same target."""
    model = fluxtrain.wrap(tiny("llama", HALF, max_position_embeddings=4096))
    ids = torch.full((rows, 2048), 5)
    model(input_ids=ids, labels=ids).loss.backward()
    assert bool(torch.isfinite(model.lm_head.weight.grad).all())


# -- other loops than the trainer's ----------------------------------------------------------------


def scaled_step(
    model: nn.Module, optimizer: Any, scaler: Any, inputs: dict[str, Tensor], *, clip: bool = True
) -> float:
    """The loop of torch's documentation."""
    loss = model(**inputs).loss
    scaler.scale(loss).backward()
    if clip:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return float(loss.detach())


def test_a_users_loop_with_a_grad_scaler_trains_as_the_engine_does(
    half: Any, tiny: Any, batch: Any
) -> None:
    model, engine = half()
    optimizer = adamw(model)
    theirs = fluxtrain.wrap(tiny("llama", HALF))
    their_optimizer, scaler = adamw(theirs), fluxtrain.GradScaler("cpu")
    for number in range(6):
        loss, _ = step(model, optimizer, batch(seed=number))
        their_loss = scaled_step(theirs, their_optimizer, scaler, batch(seed=number))
        assert their_loss == pytest.approx(loss, rel=1e-4)
    for name, master in masters(engine_of(theirs)).items():
        assert torch.allclose(master, masters(engine)[name], atol=2e-4)


@pytest.mark.parametrize("clip", [True, False])
def test_a_grad_scaler_skips_a_step_that_overflowed(
    clip: bool, tiny: Any, batch: Any, same: Any
) -> None:
    model = fluxtrain.wrap(tiny("llama", HALF))
    optimizer, scaler = adamw(model), fluxtrain.GradScaler("cpu", init_scale=TOO_LARGE)
    before = state(model)
    scaled_step(model, optimizer, scaler, batch(), clip=clip)
    same(before, state(model))
    assert scaler.get_scale() == TOO_LARGE / 2
    scaler.update(FIRST)
    scaled_step(model, optimizer, scaler, batch(), clip=clip)
    after = state(model)
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_torchs_own_scaler_works_with_a_fused_adamw(tiny: Any, batch: Any) -> None:
    """Which is handed the scale: the way of torch for optimizers that unscale by themselves."""
    found = []
    for fused in (True, False):
        model = fluxtrain.wrap(tiny("llama", HALF))
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=fused)
        scaler = torch.amp.GradScaler("cpu") if fused else fluxtrain.GradScaler("cpu")
        for number in range(3):
            scaled_step(model, optimizer, scaler, batch(seed=number), clip=False)
        found.append(masters(engine_of(model)))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_unscaled_gradients_read_as_the_true_ones(tiny: Any, batch: Any) -> None:
    model, exact = fluxtrain.wrap(tiny("llama", HALF)), fluxtrain.wrap(tiny("llama"))
    optimizer, scaler = adamw(model), fluxtrain.GradScaler("cpu")
    scaler.scale(model(**batch()).loss).backward()
    exact(**batch()).loss.backward()
    scaler.unscale_(optimizer)
    for (name, p), q in zip(model.named_parameters(), exact.parameters(), strict=True):
        limit = 0.02 * float(q.grad.norm()) + 1e-6
        assert float((p.grad.float() - q.grad).norm()) <= limit, name


# -- what is refused, and what it takes ------------------------------------------------------------


def test_a_group_cannot_be_updated_before_the_overflow_is_known(half: Any) -> None:
    model, engine = half()
    with pytest.raises(MisusedModel, match="loss scale"):
        engine.begin_eager_step(adamw(model))


def test_a_loose_fp16_parameter_is_refused_with_the_cure() -> None:
    class Loose(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(4, dtype=HALF))
            self.blocks = nn.ModuleList(nn.Linear(4, 4, dtype=HALF) for _ in range(3))

    with pytest.raises(UnsupportedModel, match="gain is float16"):
        fluxtrain.wrap(Loose())


def test_a_loss_scale_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(BadInput, match="loss scale"):
        LossScale(torch.device("cpu")).load_state_dict({"scale": "much"})


@pytest.mark.parametrize("states", ["fp32", "bf16", "8bit"])
def test_predicted_bytes_of_fp16_are_those_that_are_allocated(
    states: Any, half: Any, tiny: Any, batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_formats, "LEAST_NARROW", 100)
    facts = facts_of(tiny("qwen2", HALF), states)
    model, engine = half("qwen2", offload="weights", states=states)
    optimizer = adamw(model)
    for _ in range(2):
        engine.loss_scale.of(model(**batch("qwen2")).loss).backward()
    engine.clip_grad_norm(None)
    optimizer.step()
    engine.flush()
    assert facts.scales_its_loss
    for group, predicted in zip(engine.groups, facts.groups, strict=True):
        assert group.wire_bytes == predicted.weight_bytes
        assert group.state_bytes == pytest.approx(predicted.state_bytes, abs=4096)
        held = predicted.gradient_bytes(accumulates=True)
        assert group.gradient_bytes == pytest.approx(held, abs=4096)


def test_a_large_fp16_parameter_costs_sixteen_bytes_and_an_update_moves_28() -> None:
    n = 1 << 20
    layers = [nn.Linear(1024, 1024, bias=False, dtype=HALF) for _ in range(3)]
    model = nn.ModuleDict({"blocks": nn.ModuleList(layers)})
    facts = facts_of(model).groups[0]
    assert facts.weight_bytes == 2 * n
    assert facts.state_bytes == 12 * n
    assert facts.home_bytes() == 16 * n
    assert facts.home_bytes(accumulates=True) == 20 * n
    assert facts.update_bytes == 28 * n
    assert facts_of(model, "8bit").groups[0].home_bytes() == 10 * n + 2 * 4 * n // 256
