"""On a GPU fp16 training has the host's bits, leaves overflows out and scales its loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import fluxtrain
from fluxtrain.core.adamw.flat import Flat
from fluxtrain.core.adamw.hyper import AdamWUpdate, Hyper
from fluxtrain.core.adamw.kernels import step_
from fluxtrain.core.adamw.reference import rounding
from fluxtrain.core.updates.loss_scale import FIRST, LossScale
from fluxtrain.core.wrap.engine import Engine, engine_of
from tests.gpu.exactly import exactly
from tests.wrap_with import wrap_with

pytestmark = pytest.mark.gpu
HALF = torch.float16
HYPER = Hyper(lr=1e-2, weight_decay=0.1)
PLACES: list[dict[str, Any]] = [
    {"offload": "none"},
    {"offload": "weights", "device_groups": 0, "resident_blocks": 0},
    {"offload": "weights", "device_groups": 3, "resident_blocks": 0},
]


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    with exactly():
        yield


def wrapped(scale: float = FIRST, **options: Any) -> tuple[nn.Module, Engine]:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        vocab_size=1024, max_position_embeddings=256,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(HALF).train()
    wrap_with(model, device="cuda", chunk_rows=4, overlap=True, **options)
    engine = engine_of(model)
    engine.loss_scale = LossScale(engine.device.torch_device, scale)
    return model, engine


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> Any:
    """As the trainer makes it; the norm, not waited for."""
    engine = engine_of(model)
    assert engine.loss_scale is not None
    ids = torch.randint(0, 1024, (8, 64), generator=torch.Generator().manual_seed(seed)).cuda()
    loss = model(input_ids=ids, labels=ids).loss
    engine.loss_scale.of(loss).backward()
    norm = engine.clip_grad_norm(0.3, [loss])
    optimizer.step()
    optimizer.zero_grad()
    return norm


def state(engine: Engine) -> dict[str, Tensor]:
    return {
        f"{shard}.{name}": tensor.cpu().clone()
        for shard, tensors in engine.state_shards()
        for name, tensor in tensors.items()
    }


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    differ = [name for name in one if not torch.equal(one[name], other[name])]
    assert not differ, differ[:4]


@pytest.mark.parametrize("kind", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("n", [1, 255, 1025, 1_000_003])
def test_the_update_of_fp16_weights_on_the_gpu_has_the_hosts_bits(kind: str, n: int) -> None:
    generator = torch.Generator().manual_seed(3)
    master = torch.randn(n, generator=generator) * 10 ** (
        torch.rand(n, generator=generator) * 8 - 6
    )
    master = master.half().float()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8}[kind]
    scales = [torch.zeros(-(-n // 256)) if kind == "8bit" else None for _ in range(2)]
    host = {
        "weights": master.half(), "lo": None, "m": torch.zeros(n, dtype=dtype),
        "v": torch.zeros(n, dtype=dtype), "m_scale": scales[0], "v_scale": scales[1],
        "master": master,
    }  # fmt: skip
    device = {name: None if x is None else x.cuda() for name, x in host.items()}
    clip = torch.full((), 0.3, device="cuda")
    for number in range(1, 5):
        gradient = torch.randn(n, generator=generator).mul_(1000).half()
        key = rounding(7, number, 0)
        one = Flat(**host, gradient=gradient, rounding=key)  # type: ignore[arg-type]
        other = Flat(**device, gradient=gradient.cuda(), rounding=key)  # type: ignore[arg-type]
        step_(one, AdamWUpdate(hyper=HYPER, step=number, scale=float(clip) * 2.0**-16))
        step_(other, AdamWUpdate(hyper=HYPER, step=number, scale=2.0**-16, clip=clip))
    for name, x in host.items():
        y = device[name]
        if x is not None and y is not None:
            assert torch.equal(x.view(torch.uint8), y.cpu().view(torch.uint8)), name
    before = [x.clone() for x in device.values() if x is not None]
    nothing = torch.full((), torch.nan, device="cuda")
    step_(other, AdamWUpdate(hyper=HYPER, step=5, clip=nothing))
    after = [x for x in device.values() if x is not None]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


@pytest.mark.parametrize("states", ["fp32", "8bit"])
def test_every_home_of_fp16_trains_to_the_same_bits(states: Any) -> None:
    found = []
    for place in PLACES:
        model, engine = wrapped(states=states, **place)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        norms = [step(model, optimizer, seed) for seed in range(5)]
        assert all(norm.value() < 100 for norm in norms)
        found.append(state(engine))
    for other in found[1:]:
        assert_same(found[0], other)


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_steps_that_overflow_change_nothing_and_the_next_ones_go_on(place: dict[str, Any]) -> None:
    """Queued one behind the other, without a look at how they went."""
    found = []
    for overflows in (0, 3):
        model, engine = wrapped(**place)
        assert engine.loss_scale is not None
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step(model, optimizer, 0)
        for _ in range(overflows):
            kept = engine.loss_scale.value
            engine.loss_scale.value = torch.full_like(kept, 2.0**40)
            norm = step(model, optimizer, 1)
            engine.loss_scale.value = kept
        if overflows:
            assert norm.overflowed()
        for seed in (2, 3):
            step(model, optimizer, seed)
        found.append(state(engine))
    assert_same(found[0], found[1])


def test_a_scale_that_a_busy_gpu_has_not_sent_yet_is_waited_for() -> None:
    """torch's scaler copies it into page-locked memory and does not wait."""
    model, engine = wrapped(offload="weights", device_groups=0)
    engine.loss_scale = None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = fluxtrain.GradScaler("cuda", init_scale=FIRST)
    ids = torch.randint(0, 1024, (8, 64), generator=torch.Generator().manual_seed(1)).cuda()
    scaler.scale(model(input_ids=ids, labels=ids).loss).backward()
    assert all(p.grad is not None for p in model.parameters())  # all are at home
    torch.cuda._sleep(400_000_000)
    scaler.unscale_(optimizer)
    scales = {m.gradient_scale for group in engine.groups for m in group.members}
    assert scales == {1 / FIRST}
