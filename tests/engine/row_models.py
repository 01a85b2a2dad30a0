"""Small models with an embedding, trained with the whole of it on the device or with rows of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from fluxtrain.core.wrap.engine import Engine, engine_of
from tests.wrap_with import wrap_with

VOCABULARY, HIDDEN = 600, 32
Result = tuple[list[float], dict[str, Tensor], dict[str, Tensor]]


def llama(dtype: torch.dtype = torch.bfloat16, **changes: Any) -> nn.Module:
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, **changes}
    config = LlamaConfig(
        intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, **sizes,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype).train()


def inputs(seed: int, rows: int = 4, length: int = 10) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (rows, length), generator=draw)
    ids[:, ::3] = 7  # a row that many tokens share
    return {"input_ids": ids, "labels": ids}


def wrapped(model: nn.Module, embedding: str, **options: Any) -> Engine:
    options = {"offload": "weights", "chunk_rows": 2, "overlap": True, **options}
    wrap_with(model, device="cpu", embedding=embedding, **options)
    return engine_of(model)


def by_rows(engine: Engine) -> bool:
    return any(group.rows is not None for group in engine.groups)


def trained(
    model: nn.Module,
    embedding: str,
    *,
    passes: int = 1,
    in_backward: bool = False,
    loss_of: Callable[[nn.Module, int], Tensor] | None = None,
    steps: int = 4,
    **options: Any,
) -> Result:
    """Losses and norms, the gradients of the third step, and the weights after the last."""
    engine = wrapped(model, embedding, optimizer_in_backward=in_backward, **options)
    assert by_rows(engine) == (embedding == "rows")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    told: list[float] = []
    gradients: dict[str, Tensor] = {}
    for step in range(steps):
        for part in range(passes):
            seed = step * passes + part
            loss = loss_of(model, seed) if loss_of else model(**inputs(seed)).loss
            if in_backward:
                engine.begin_step_in_backward(optimizer, loss)
            loss.backward()
            told.append(float(loss.detach()))
        told.append(engine.clip_grad_norm(None if in_backward else 0.5).value())
        if step == 2 and not in_backward:
            named = model.named_parameters()
            gradients = {n: p.grad.detach().clone() for n, p in named if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    engine.flush()
    assert by_rows(engine) == (embedding == "rows"), "it fell back to the whole table"
    return told, gradients, {n: p.detach().clone() for n, p in model.named_parameters()}


def equal(a: Result, b: Result) -> None:
    assert a[0] == b[0]
    for one, other in zip(a[1:], b[1:], strict=True):
        assert one.keys() == other.keys()
        assert [n for n in one if not torch.equal(one[n], other[n])] == []


class Twice(nn.Module):
    """An embedding that is called twice, and blocks."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(VOCABULARY, HIDDEN, **options)
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(3))

    def forward(self, ids: Tensor, *, again: bool = True) -> Tensor:
        hidden = self.embed(ids)
        if again:
            hidden = hidden + self.embed(input=(ids + 1) % VOCABULARY)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return hidden


def squares(model: nn.Module, seed: int) -> Tensor:
    result: Tensor = model(inputs(seed)["input_ids"]).float().square().mean()
    return result
