"""The trainer's own loop over a small model and packed rows, without files, sockets or a screen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import fluxtrain
from fluxtrain.config.cadence import Cadence
from fluxtrain.core.updates.loss_scale import LossScale
from fluxtrain.core.wrap.engine import Engine, engine_of
from fluxtrain.data.batches import Batch, BatchSource
from fluxtrain.data.packing import PackedRows
from fluxtrain.data.splitting import Spans
from fluxtrain.data.store.tokens import Tokens
from fluxtrain.events.emitter import Announcer
from fluxtrain.events.events import StepFinished
from fluxtrain.methods.objective import BoundTask
from fluxtrain.methods.optimizer import EngineAdamW
from fluxtrain.methods.text_task import CausalLM
from fluxtrain.train.checkpoint.run_state import RunState
from fluxtrain.train.loop import LoopSettings, TrainingLoop
from fluxtrain.train.requests import Requests
from tests.wrap_with import wrap_with

LAYERS, ROWS, TOKENS, WORDS, WIDTH = 6, 8, 128, 4096, 512
VOCAB_CHUNK_BYTES = (
    WORDS // 4 * WIDTH * 2
)  # of a head that comes in vocabulary chunks: `plan.heads.VOCAB_CHUNK_BYTES`
USED_WORDS = 64  # of them, so that a few steps learn which
STREAMED: dict[str, Any] = {"offload": "weights", "device_groups": 0, "resident_blocks": 0}


class Batches(BatchSource):
    """Tells the number of each step, from 1, before its batches are made."""

    def __init__(self, rows: PackedRows, accumulation: int = 1) -> None:
        super().__init__(rows, ROWS, accumulation)
        self.steps = 0
        self.before_step: Callable[[int], None] = lambda _: None

    def next_step(self) -> list[Batch]:
        self.steps += 1
        self.before_step(self.steps)
        return super().next_step()


class Nothing:
    """Stands for what only a run with a directory and a socket has: nothing is due, nobody asks."""

    waiting = False

    def is_due(self, _step: int) -> bool:
        return False

    def emit(self, _event: object) -> None: ...
    def carry_out(self, *_given: object) -> None: ...
    def step_took(self, _step: object) -> None: ...
    def disturbed(self) -> None: ...
    def finish(self, *_step: int) -> None: ...
    def poll(self, _step: int) -> None: ...
    def close(self) -> None: ...
    def wait_copied(self) -> None: ...
    def make_room(self, *_given: object, **_more: object) -> None: ...
    def keep_room(self, *_given: object) -> None: ...
    def last_text(self) -> str:
        return "there is no checkpoint"


def packed_rows(rows: int = 64, *, documents: int = 1) -> PackedRows:
    """Rows of TOKENS tokens that hold so many documents each, of random words among a few."""
    random = np.random.default_rng(0)
    lengths = np.full(rows * documents, TOKENS // documents, dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    ids = random.integers(0, USED_WORDS, int(starts[-1]), dtype=np.uint32)
    return PackedRows(Tokens(ids, starts), Spans(starts[:-1], lengths), TOKENS)


class Training:
    """A wrapped model and its loop; `run` makes `steps` steps."""

    def __init__(
        self,
        steps: int,
        *,
        device: str = "cuda",
        dtype: torch.dtype = torch.bfloat16,
        max_grad_norm: float | None = 1.0,
        documents: int = 1,
        accumulation: int = 1,
        tied: bool = False,
        **placement: Any,
    ) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=LAYERS,
            num_attention_heads=8, num_key_value_heads=4, vocab_size=WORDS,
            max_position_embeddings=TOKENS, tie_word_embeddings=tied,
        )  # fmt: skip
        model: Any = LlamaForCausalLM
        self.model: nn.Module = model(config).to(dtype)
        wrap_with(self.model, device=device, chunk_rows=4, overlap=True, **placement)
        self.engine: Engine = engine_of(self.model)
        self._is_placed_as(placement)
        if dtype is torch.float16:
            self.engine.loss_scale = LossScale(self.engine.device.torch_device)
        self.batches = Batches(packed_rows(documents=documents), accumulation)
        self.told: list[StepFinished] = []
        nothing: Any = Nothing()
        self.loop = TrainingLoop(
            model=self.model,
            optimizer=EngineAdamW(self.engine, self.model.parameters(), lr=1e-3),
            task=BoundTask(objective=CausalLM(), data=self.batches, held_out=lambda: ()),
            settings=LoopSettings(
                total_steps=steps,
                max_grad_norm=max_grad_norm,
                evaluations=Cadence(every="end", total_steps=steps + 1, share=1.0),
                learning_rate_at=lambda _: 1e-3,
            ),
            checkpoints=nothing,
            announcer=Announcer(nothing, self._note),
            requests=Requests(),
            changes=nothing,
            state=RunState(),
        )

    def _is_placed_as(self, wished: dict[str, Any]) -> None:
        """What only has an effect beside other choices has it."""
        by_rows = any(group.rows is not None for group in self.engine.groups)
        assert by_rows == (wished.get("embedding") == "rows")
        chunks = [unit.vocab_chunks for unit in self.engine.units if unit.vocab_chunks is not None]
        assert bool(chunks) == (wished.get("head") == "chunks")
        assert all(4 * each.rows <= WORDS for each in chunks)

    def _note(self, event: object) -> None:
        if isinstance(event, StepFinished):
            self.told.append(event)

    def run(self) -> list[StepFinished]:
        """What every step gave; the engine is closed afterwards."""
        try:
            self.loop.run()
        finally:
            fluxtrain.unwrap(self.model)
        return self.told
