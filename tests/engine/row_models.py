"""Small models with an embedding, trained with the whole of it on the device or with rows of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from fluxtrain.gradients.host_gradients import Arrival
from fluxtrain.optim.row_adamw import weights_of_rows
from fluxtrain.optim.stepping import Flat
from fluxtrain.stream import updates
from fluxtrain.stream.engine import Engine, engine_of
from tests.engine.deferred_models import GIVEN_UP_S
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
    eager: bool = False,
    loss_of: Callable[[nn.Module, int], Tensor] | None = None,
    steps: int = 4,
    **options: Any,
) -> Result:
    """Losses and norms, the gradients of the third step, and the weights after the last."""
    engine = wrapped(model, embedding, eager=eager, **options)
    assert by_rows(engine) == (embedding == "rows")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    told: list[float] = []
    gradients: dict[str, Tensor] = {}
    for step in range(steps):
        for part in range(passes):
            seed = step * passes + part
            loss = loss_of(model, seed) if loss_of else model(**inputs(seed)).loss
            if eager:
                engine.begin_eager_step(optimizer, loss)
            loss.backward()
            told.append(float(loss.detach()))
        told.append(engine.clip_grad_norm(None if eager else 0.5).value())
        if step == 2 and not eager:
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


class Watch:
    """In which order a table's pieces are written and its rows are found."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        self.threads: list[int | None] = []  # that rows were found with; None: a few
        self.in_piece: Callable[[], None] = lambda: None
        self.in_rows: Callable[[], None] = lambda: None
        self._asked, self._asking = threading.Event(), False
        segment, rows_ahead, wait = (
            engine.groups[0].trained[0],
            updates._Step.rows_ahead,
            Arrival.wait,
        )

        def answered(*args: Any, **options: Any) -> None:
            self.seen.append("rows")
            self.threads.append(options["threads"])
            self.in_rows()
            weights_of_rows(*args, **options)

        def asks(step: Any, *args: Any) -> bool:
            self._asking = True
            return rows_ahead(step, *args)

        def waited(arrival: Arrival) -> None:
            if self._asking:  # whoever asks looks for the gradients when the next piece is his
                self._asked.set()
            wait(arrival)

        def noted(step: Any) -> Any:
            def run(flat: Flat, **options: Any) -> None:
                assert segment.weights is not None
                begins, at = segment.weights.data_ptr(), flat.weights.data_ptr()
                if begins <= at < begins + segment.size_bytes:
                    self.seen.append("piece")
                    self.in_piece()
                step(flat, **options)

            return run

        monkeypatch.setattr(updates, "weights_of_rows", answered)
        monkeypatch.setattr(updates._Step, "rows_ahead", asks)
        monkeypatch.setattr(Arrival, "wait", waited)
        for name in ("step_on_host_", "step_weights_on_host_"):
            monkeypatch.setattr(updates, name, noted(getattr(updates, name)))

    def hold_piece(self, number: int) -> threading.Event:
        """Piece `number` (from 1) does not end before somebody asks for rows; set when it began."""
        reached = threading.Event()

        def held_back() -> None:
            if len(self.seen) == number:
                reached.set()
                assert self._asked.wait(GIVEN_UP_S), "nobody asks"

        self.in_piece = held_back
        return reached
