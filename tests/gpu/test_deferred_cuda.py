"""The weights first, the moments later, on a real GPU: the same bits, and what waits for what."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from fluxtrain._native import Pass
from fluxtrain.core.optimizer.state_shards import state_shards
from fluxtrain.core.updates import updates
from fluxtrain.core.wrap.engine import Engine, engine_of
from tests.gpu.exactly import exactly
from tests.wrap_with import wrap_with

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
STREAMED: dict[str, Any] = {"offload": "weights", "device_groups": 0, "resident_blocks": 0}
HOLD_S, GIVEN_UP_S = 0.5, 60.0


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    with exactly():
        yield


def build(dtype: torch.dtype, *, tied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=1024, max_position_embeddings=256,
        tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype).train()


class Training:
    """A wrapped model and its optimizer with and without decay."""

    def __init__(self, model: nn.Module, *, deferred: bool, **how: Any) -> None:
        options = {**STREAMED, "chunk_rows": 4, "overlap": True, **how}
        self.model = wrap_with(model, device="cuda", deferred_moments=deferred, **options)
        self.engine: Engine = engine_of(self.model)
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": 0.1, "lr": 1e-3},
            {"params": vectors, "weight_decay": 0.0, "lr": 2e-3},
        ]
        self.optimizer = torch.optim.AdamW(groups)
        self.losses: list[Tensor] = []

    def forward(self) -> Tensor:
        generator = torch.Generator().manual_seed(len(self.losses))
        ids = torch.randint(0, 1024, (8, 64), generator=generator)
        loss: Tensor = self.model(input_ids=ids, labels=ids).loss
        self.losses.append(loss.detach())
        return loss

    def step(self) -> None:
        self.engine.clip_grad_norm(0.3)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, count: int, passes: int = 1) -> None:
        for _ in range(count):
            for _ in range(passes):
                self.forward().backward()
            self.step()

    def state(self) -> dict[str, Tensor]:
        return {
            f"{shard} {name}": tensor.cpu().clone()
            for shard, tensors in state_shards(self.engine)
            for name, tensor in tensors.items()
        }


def assert_same(one: Training, other: Training) -> None:
    assert [float(loss) for loss in one.losses] == [float(loss) for loss in other.losses]
    left, right = one.state(), other.state()
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor.view(torch.uint8), right[name].view(torch.uint8)), name


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"device_groups": 3, "resident_blocks": 1},
        {"activations": "host"},
        {"embedding": "rows"},
        {"offload": "optimizer", "resident_blocks": None},
        {"overlap": False},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("dtype", "tied"),
    [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, False)],
    ids=str,
)
def test_a_training_with_deferred_moments_has_the_bits_of_one_without(
    dtype: torch.dtype, tied: bool, how: dict[str, Any], passes: int
) -> None:
    both = [Training(build(dtype, tied=tied), deferred=later, **how) for later in (False, True)]
    for training in both:
        training.steps(5, passes)
    assert_same(*both)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Moments are written while it is set."""
    free, step = threading.Event(), updates.step_

    def late(*arguments: Any, **options: Any) -> None:
        if options.get("part") == Pass.MOMENTS:
            assert free.wait(GIVEN_UP_S), "nobody let the moments go"
        step(*arguments, **options)

    monkeypatch.setattr(updates, "step_", late)
    free.set()
    yield free
    free.set()


@pytest.mark.parametrize("embedding", ["whole", "rows"])
def test_a_whole_forward_is_computed_while_no_moment_is_written_and_backward_waits_for_them(
    embedding: str, gate: threading.Event
) -> None:
    both = [
        Training(build(torch.bfloat16), deferred=later, embedding=embedding)
        for later in (False, True)
    ]
    both[0].steps(3)
    training = both[1]
    training.steps(1)
    training.engine.flush()
    training.forward().backward()
    gate.clear()
    training.step()
    loss = training.forward()
    torch.cuda.synchronize()
    assert torch.isfinite(loss)
    assert not gate.is_set()
    timer = threading.Timer(HOLD_S, gate.set)
    timer.start()
    loss.backward()
    assert gate.is_set(), "gradients were sent home while moments had to read those before"
    timer.join()
    training.step()
    assert_same(*both)
