"""An embedding by rows on a GPU: the bits of the whole one, no waiting, no memory for a copy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from fluxtrain.core.wrap.engine import engine_of
from tests.gpu.exactly import exactly
from tests.wrap_with import wrap_with

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

VOCABULARY, HIDDEN = 32_000, 256


def build(dtype: torch.dtype = torch.bfloat16, *, tied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=1024,
        tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype).train()


def batch(seed: int, rows: int = 8, length: int = 64) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (rows, length), generator=draw)
    ids[:, ::3] = 11  # a row that many tokens share
    return ids.pin_memory()


@pytest.fixture
def plainly() -> Iterator[None]:
    with exactly():
        yield
    torch.cuda.set_sync_debug_mode("default")


Trained = tuple[list[float], dict[str, torch.Tensor]]


def trained(
    embedding: str,
    *,
    dtype: torch.dtype,
    length: int = 64,
    passes: int = 1,
    on_device: bool = False,
    tied: bool = False,
    deferred: bool = False,
    in_backward: bool = False,
) -> Trained:
    """Losses and norms of some steps, clipped where they do not update in backward, and the weights
    after."""
    model = build(dtype, tied=tied)
    wrap_with(
        model, device="cuda", offload="weights", device_groups=0, resident_blocks=0, chunk_rows=4,
        overlap=True, embedding=embedding, deferred_moments=deferred,
        optimizer_in_backward=in_backward,
    )  # fmt: skip
    engine = engine_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    told = []
    for step in range(5):
        for part in range(passes):
            ids = batch(step * passes + part, length=length)
            ids = ids.to("cuda") if on_device else ids
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            if in_backward:
                engine.begin_step_in_backward(optimizer, loss)
            loss.backward()
            told.append(loss.detach())
        told.append(engine.clip_grad_norm(None if in_backward else 0.3).value())
        optimizer.step()
        optimizer.zero_grad()
    engine.flush()
    assert (engine.groups[0].rows is not None) == (embedding == "rows")
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return [float(value) for value in told], weights


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("length", [64, 1024])  # torch's embedding has a kernel for few tokens
@pytest.mark.parametrize("passes", [1, 2])
def test_rows_give_the_bits_of_the_whole_table(
    dtype: torch.dtype, length: int, passes: int, plainly: None
) -> None:
    whole = trained("whole", dtype=dtype, length=length, passes=passes)
    rows = trained("rows", dtype=dtype, length=length, passes=passes)
    assert rows[0] == whole[0]
    assert [n for n in whole[1] if not torch.equal(whole[1][n], rows[1][n])] == []


@pytest.mark.parametrize("tied", [False, True])
def test_rows_of_a_table_whose_update_in_backward_has_begun_keep_the_bits(
    tied: bool, plainly: None
) -> None:
    whole = trained("whole", dtype=torch.bfloat16, tied=tied, in_backward=True)
    rows = trained("rows", dtype=torch.bfloat16, tied=tied, in_backward=True)
    assert rows[0] == whole[0]
    assert [n for n in whole[1] if not torch.equal(whole[1][n], rows[1][n])] == []
