"""Small trainings whose moments may come later, and what holds these back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from fluxtrain._native import Pass
from fluxtrain.core.optimizer.state_shards import state_shards
from fluxtrain.core.updates import updates
from fluxtrain.core.wrap.engine import engine_of
from tests.wrap_with import wrap_with

MAX_NORM = 0.3  # no power of two: then order and number of roundings show
HOLD_S = 0.25  # far longer than a step of these models
GIVEN_UP_S = 30.0


def build(dtype: torch.dtype = torch.bfloat16, *, tied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype)


class Training:
    """A small model that streams, its optimizer, and the losses so far."""

    def __init__(self, model: nn.Module, *, deferred: bool, **how: Any) -> None:
        options = {"offload": "weights", "overlap": True, "chunk_rows": 2, **how}
        self.model = wrap_with(model, device="cpu", deferred_moments=deferred, **options)
        self.engine = engine_of(self.model)
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() <= 1]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": 0.1, "lr": 2e-3},
                {"params": vectors, "weight_decay": 0.0, "lr": 5e-3},
            ]
        )
        self.losses: list[float] = []
        self.saved: list[tuple[str, dict[str, Tensor]]] = []  # by a test, of its optimizer states
        self.weights: dict[str, Tensor] = {}  # by a test

    def forward(self) -> Tensor:
        generator = torch.Generator().manual_seed(len(self.losses))
        ids = torch.randint(0, 128, (4, 12), generator=generator)
        loss: Tensor = self.model(input_ids=ids, labels=ids).loss
        self.losses.append(float(loss.detach()))
        return loss

    def backward(self) -> None:
        self.forward().backward()

    def step(self) -> None:
        self.engine.clip_grad_norm(MAX_NORM)
        self.optimizer.step()

    def steps(self, count: int, passes: int = 1) -> None:
        for _ in range(count):
            for _ in range(passes):
                self.backward()
            self.step()
            self.optimizer.zero_grad()

    def state(self) -> dict[str, Tensor]:
        """Weights, what completes their masters, moments and step counts, all copied."""
        return {
            f"{shard} {name}": tensor.clone()
            for shard, tensors in state_shards(self.engine)
            for name, tensor in tensors.items()
        }


def assert_same_bits(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in got.items():
        assert torch.equal(tensor.view(torch.uint8), expected[name].view(torch.uint8)), name


class Hold:
    """Stands between the weights and the moments of every update."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.free.set()
        self.passed: list[torch.dtype] = []  # of the moments that were written
        self.places: list[int] = []  # the memory of these: earlier tests' may be among them
        self.fails: Exception | None = None

    def __call__(self, *arguments: Any, **options: Any) -> None:
        if options.get("part") != Pass.MOMENTS:
            step_(*arguments, **options)
            return
        assert self.free.wait(GIVEN_UP_S), "nobody let the moments go"
        fails, self.fails = self.fails, None
        if fails is not None:
            raise fails
        step_(*arguments, **options)
        self.places.append(arguments[0].m.untyped_storage().data_ptr())
        self.passed.append(arguments[0].m.dtype)

    def hold(self) -> None:
        self.free.clear()

    def assert_waits(self, action: Callable[[], object], hold_s: float = HOLD_S) -> None:
        """`action` does not end before the moments are let go."""
        timer = threading.Timer(hold_s, self.free.set)
        timer.start()
        try:
            action()
            assert self.free.is_set(), "it came between the weights and their moments"
        finally:
            timer.join()


step_ = updates.step_
