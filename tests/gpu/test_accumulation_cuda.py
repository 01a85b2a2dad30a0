"""Steps of several backward passes on a GPU: gradients are those of plain torch there, and those at
home have the bits of those that stay on the device."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import fluxtrain
from fluxtrain.core.device.cuda_device import CudaDevice
from fluxtrain.core.wrap.engine import engine_of
from fluxtrain.models.known_packing import known_packing
from fluxtrain.plan import heads
from tests.gpu.exactly import exactly
from tests.wrap_with import wrap_with

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

WORDS, WIDTH, ROWS, TOKENS, STEPS, MAX_NORM = 1000, 256, 8, 64, 3, 0.3
CHUNK_ROWS = 256  # words of bf16, half as many of fp32: the last chunk is a smaller one
STREAMED: dict[str, Any] = {"offload": "weights", "device_groups": 0, "resident_blocks": 0}
PLACES: dict[str, dict[str, Any]] = {
    "on the device": {"offload": "none"},
    "at home": STREAMED,
    "some at home": {"offload": "weights", "device_groups": 3, "resident_blocks": 1},
    "boundaries at home": {"offload": "max"},
    "embedding by rows": {**STREAMED, "embedding": "rows"},
    "head in vocabulary chunks": {**STREAMED, "head": "chunks"},
    "rows and vocabulary chunks": {**STREAMED, "embedding": "rows", "head": "chunks"},
}
OF_TIED = [
    place for place in PLACES if place != "head in vocabulary chunks"
]  # which need the rows too
# Of the norm, for losses, norms and gradients in fp32. Chunks add up otherwise than a whole head.
CLOSE, CLOSE_IN_CHUNKS = 1e-4, 1e-3
LATE = 400_000_000  # clocks, some 0.2 s


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(heads, "VOCAB_CHUNK_BYTES", CHUNK_ROWS * WIDTH * 2)
    with exactly():
        yield


def build(dtype: torch.dtype = torch.float32, *, tied: bool = False) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=WORDS, max_position_embeddings=TOKENS,
        tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype).train()


def wrapped(plain: nn.Module, place: dict[str, Any], device: str = "cuda", **options: Any) -> Any:
    model = copy.deepcopy(plain)
    wrap_with(model, device=device, chunk_rows=4, overlap=True, **place, **options)
    engine = engine_of(model)
    assert any(group.rows is not None for group in engine.groups) == ("embedding" in place)
    assert any(unit.vocab_chunks is not None for unit in engine.units) == ("head" in place)
    return model


def passed(model: Any, step: int, passes: int) -> list[Tensor]:
    """Losses of the backward passes of one step, whose gradients are a mean over all rows."""
    draw, losses = torch.Generator().manual_seed(step), []
    where = model.get_input_embeddings().weight.device
    for _ in range(passes):
        ids = torch.randint(0, WORDS, (ROWS, TOKENS), generator=draw).to(where)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        (loss / passes).backward()
        losses.append(loss.detach())
    return losses


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad.detach().cpu().clone()
    return found


def follows_plain_torch(
    place: dict[str, Any], passes: int, *, tied: bool, device: str = "cuda"
) -> None:
    close = CLOSE_IN_CHUNKS if place.get("head") == "chunks" else CLOSE
    plain = build(tied=tied)
    ours = wrapped(plain, place, device)
    plain.to(device)
    told: list[list[float]] = []
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in (plain, ours)]
    for step in range(STEPS):
        told = [[float(loss) for loss in passed(m, step, passes)] for m in (plain, ours)]
        expected, found = gradients(plain), gradients(ours)
        for name, gradient in expected.items():
            apart = float((found[name] - gradient).norm() / gradient.norm())
            assert apart < close, f"{name} of step {step}: {apart:.1e}"
        told[0].append(float(nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM)))
        told[1].append(engine_of(ours).clip_grad_norm(MAX_NORM).value())
        assert told[1] == pytest.approx(told[0], rel=close)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    fluxtrain.unwrap(ours)


@pytest.mark.parametrize("passes", [2, 3])
@pytest.mark.parametrize(
    ("place", "tied"),
    [*((place, False) for place in PLACES), *((place, True) for place in OF_TIED)],
)
def test_an_accumulated_step_follows_plain_torch(place: str, tied: bool, passes: int) -> None:
    follows_plain_torch(PLACES[place], passes, tied=tied)


def at_home_and_on_the_device(
    place: dict[str, Any], dtype: torch.dtype, *, tied: bool, device: str = "cuda"
) -> list[dict[str, Tensor]]:
    """Gradients of three passes, of a model that lives on the device and of one in `place`."""
    found = []
    for each in (PLACES["on the device"], place):
        model = wrapped(build(dtype, tied=tied), each, device)
        passed(model, 0, 3)
        found.append(gradients(model))
        fluxtrain.unwrap(model)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("place", ["at home", "some at home", "embedding by rows"])
def test_accumulated_gradients_at_home_have_the_bits_of_those_on_the_device(
    place: str, tied: bool, dtype: torch.dtype
) -> None:
    there, home = at_home_and_on_the_device(PLACES[place], dtype, tied=tied)
    assert [name for name in there if not torch.equal(home[name], there[name])] == []


@pytest.fixture
def waiting_is_an_error() -> Iterator[None]:
    """Where a test says so."""
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("place", ["at home", "some at home", "boundaries at home"])
def test_sums_whose_ways_home_are_late_are_right_and_nobody_waits(
    place: str, waiting_is_an_error: None
) -> None:
    plain = build()
    ours = wrapped(plain, PLACES[place])
    plain.to("cuda")
    device = engine_of(ours).device
    assert isinstance(device, CudaDevice)
    draw = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, WORDS, (ROWS, TOKENS), generator=draw) for _ in range(9)]
    for number, ids in enumerate(ids.pin_memory() for ids in batches):
        there = ids.cuda()
        (plain(input_ids=there, labels=there, use_cache=False).loss / len(batches)).backward()
        if number >= 6:  # the first passes look at what they compute, and make their memory
            with torch.cuda.stream(device._down):
                torch.cuda._sleep(LATE)
            torch.cuda.set_sync_debug_mode("error")
        with known_packing(mixes=False):
            loss = ours(input_ids=ids, labels=ids, use_cache=False).loss
        (loss / len(batches)).backward()
        torch.cuda.set_sync_debug_mode("default")
    expected, found = gradients(plain), gradients(ours)
    for name, gradient in expected.items():
        assert float((found[name] - gradient).norm() / gradient.norm()) < CLOSE, name
    fluxtrain.unwrap(ours)
