"""Tensors as large as the input of a block that are alive at once: the footprint counts as many."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen2Config, Qwen2ForCausalLM

import fluxtrain
from fluxtrain.core.block import block
from fluxtrain.core.head import loss as head_loss
from fluxtrain.core.memory.activation_offload import ActivationOffload, PinnedBuffer
from fluxtrain.core.memory.unit import Unit
from fluxtrain.core.runtime.context import Context
from fluxtrain.core.runtime.passes import bound
from fluxtrain.core.wrap.engine import engine_of
from fluxtrain.plan.footprint import HIDDEN_AT_LOSS, INPUTS_IN_FLIGHT
from tests.wrap_with import wrap_with

LAYERS, TOKENS, HIDDEN, CHUNK = 4, 16, 64, 2
WARM_STEPS = 2


class Live(TorchDispatchMode):
    """Bytes of what torch's operations made and nobody has let go of, at their peak by phase."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = ""
        self.peaks: dict[str, int] = {}
        self._bytes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if type(value) is Tensor:
                self._saw(value)
        return out

    def leave_out(self, tensor: Tensor) -> None:
        """It stands for host memory."""
        self._bytes[tensor.untyped_storage()._cdata] = 0

    def _saw(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._bytes and storage.nbytes():
            self._bytes[storage._cdata] = storage.nbytes()
            weakref.finalize(storage, self._bytes.pop, storage._cdata, None)
            self.enters(self.phase)

    def enters(self, phase: str) -> None:
        self.phase = phase
        self.peaks[phase] = max(self.peaks.get(phase, 0), sum(self._bytes.values()))


class WayHome:
    """A copy that has ended when the next one begins, and not before: neither faster than the
    blocks nor slower."""

    def __init__(self, transfer: Any) -> None:
        self._transfer = transfer
        self._ended = False

    def ends(self) -> None:
        self._transfer.wait_host()
        self._ended = True

    def done(self) -> bool:
        return self._ended

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transfer, name)


@pytest.fixture
def copies_keep_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each input is on the host when the next one leaves."""
    offload = ActivationOffload.offload

    def in_turn(self: ActivationOffload, *arguments: Any) -> Any:
        device: Any = self._device
        download = device.download
        for one in self._downloading:
            cast(WayHome, one.download).ends()
        with monkeypatch.context() as patch:
            patch.setattr(device, "download", lambda *copied: WayHome(download(*copied)))
            return offload(self, *arguments)

    monkeypatch.setattr(ActivationOffload, "offload", in_turn)


def peaks(rows: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Of the third step with boundaries on the host, in phases: within blocks and between them."""
    config = Qwen2Config(
        hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=32, max_position_embeddings=64,
        tie_word_embeddings=False,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).to(torch.bfloat16).train()
    live, place = Live(), ActivationOffload._host_memory

    def on_host(self: ActivationOffload, tensor: Tensor) -> tuple[PinnedBuffer | None, Tensor]:
        buffer, host = place(self, tensor)
        live.leave_out(host)
        return buffer, host

    @contextmanager
    def watched(context: Context, unit: Unit, does: str = "forward") -> Iterator[None]:
        live.enters(f"{does} {unit.group.kind}")
        with bound(context, unit, does):
            yield
        live.enters(f"after {does}")

    monkeypatch.setattr(ActivationOffload, "_host_memory", on_host)
    for module in (block, head_loss):
        monkeypatch.setattr(module, "bound", watched)
    wrap_with(model, device="cpu", offload="weights", activations="host", chunk_rows=CHUNK)
    engine = engine_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, 32, (rows, TOKENS))
    for _ in range(WARM_STEPS + 1):
        live.peaks.clear()
        with live:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.flush()
        gc.collect()
    fluxtrain.unwrap(model)
    return live.peaks


def test_as_many_boundaries_are_on_the_device_as_the_footprint_says(
    monkeypatch: pytest.MonkeyPatch, copies_keep_up: None
) -> None:
    """Chunks of two rows, four and eight of them: what is more then grows with the batch,
    and not with a chunk."""
    with monkeypatch.context() as patch:
        few = peaks(8, patch)
    with monkeypatch.context() as patch:
        many = peaks(16, patch)
    block_input_bytes = 8 * TOKENS * HIDDEN * 2
    grown = {phase: (many[phase] - few[phase]) / block_input_bytes for phase in few}
    arriving_and_earlier_chunks = 2
    assert grown["backward block"] == pytest.approx(
        INPUTS_IN_FLIGHT + arriving_and_earlier_chunks, abs=0.25
    )
    assert grown["after head"] == pytest.approx(INPUTS_IN_FLIGHT + HIDDEN_AT_LOSS, abs=0.25)


def test_a_block_that_keeps_its_activations_keeps_its_input_on_the_device(tiny: Any) -> None:
    model = tiny("llama")
    wrap_with(model, device="cpu", offload="none", activations="host", blocks_without_recompute=1)
    engine = engine_of(model)
    blocks = sum(unit.group.kind == "block" for unit in engine.units)
    ids = torch.zeros(2, 8, dtype=torch.int64)
    model(input_ids=ids, labels=ids).loss.backward()
    last_norm = 1
    assert engine.cards[0].activation_offload.offloaded_count == blocks - 1 + last_norm
