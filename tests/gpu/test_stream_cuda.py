"""The engine on a real GPU: streamed equals resident bit for bit, and a loop runs as on CPU."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

import fluxtrain
from fluxtrain.core.wrap.engine import engine_of
from tests.gpu.exactly import exactly
from tests.gpu.numbers_of_cards import NUMBERS_OF_CARDS
from tests.wrap_with import wrap_with

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 256,
}


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    with exactly():
        yield


def build(family: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    if family == "llama":
        model: nn.Module = LlamaForCausalLM(LlamaConfig(**SHAPE))
    elif family == "tied":
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True))
    elif family == "gpt2":
        model = GPT2LMHeadModel(
            GPT2Config(n_embd=256, n_layer=6, n_head=4, vocab_size=1024, n_positions=256)
        )
    else:
        model = MixtralForCausalLM(
            MixtralConfig(**SHAPE, num_local_experts=4, output_router_logits=True)
        )
    return model.to(dtype).train()


def train(
    model: nn.Module, steps: int = 4, rows: int = 8
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of some clipped steps, and the weights afterwards."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(7)
    losses = []
    for _ in range(steps):
        ids = torch.randint(0, 1024, (rows, 64))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        engine_of(model).clip_grad_norm(0.3)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    fluxtrain.sync(model)
    weights = {n: p.detach().float().cpu().clone() for n, p in model.named_parameters()}
    return [float(loss) for loss in losses], weights


@pytest.mark.parametrize("cards", NUMBERS_OF_CARDS)
@pytest.mark.parametrize(
    ("family", "dtype", "chunk_rows"),
    [
        *itertools.product(("llama", "tied", "gpt2"), (torch.bfloat16, torch.float32), (8, 2)),
        ("mixtral", torch.bfloat16, 8),
    ],
)
def test_every_placement_trains_to_the_same_bits(
    family: str, dtype: torch.dtype, chunk_rows: int, cards: int
) -> None:
    results = {}
    for offload, overlap in (
        ("optimizer", False),
        ("weights", False),
        ("weights", True),
        ("max", True),
    ):
        model = wrap_with(
            build(family, dtype),
            device="cuda",
            cards=cards,
            offload=offload,
            chunk_rows=chunk_rows,
            overlap=overlap,
            device_groups=0,
            resident_blocks=0,
        )
        results[offload, overlap] = train(model)
    reference_losses, reference_weights = results["optimizer", False]
    for losses, weights in results.values():
        assert losses == reference_losses
        assert all(torch.equal(weights[n], w) for n, w in reference_weights.items())


def test_a_users_loop_follows_the_plain_model_on_the_gpu() -> None:
    plain = build("llama", torch.float32).cuda()
    wrapped = wrap_with(
        copy.deepcopy(plain).cpu(),
        device="cuda",
        offload="weights",
        device_groups=0,
        resident_blocks=0,
    )
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (plain, wrapped)]
    torch.manual_seed(3)
    for _ in range(4):
        ids = torch.randint(0, 1024, (4, 64))
        found = []
        for model, optimizer in zip((plain, wrapped), optimizers, strict=True):
            loss = model(input_ids=ids.cuda(), labels=ids.cuda()).loss
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            found.append((float(loss.detach()), float(norm)))
        assert found[1] == pytest.approx(found[0], rel=1e-4)
    prompt = torch.arange(8).reshape(1, 8)
    tokens = [
        m.eval()
        .generate(prompt.to("cuda"), max_new_tokens=8, do_sample=False, pad_token_id=0)
        .cpu()
        for m in (plain, wrapped)
    ]
    assert torch.equal(*tokens)


def test_the_arenas_are_page_locked_and_moves_are_counted() -> None:
    model = wrap_with(
        build("llama", torch.bfloat16),
        device="cuda",
        offload="weights",
        device_groups=0,
        resident_blocks=0,
    )
    engine = engine_of(model)
    train(model, steps=2)
    memory, traffic = engine.memory(), engine.traffic()
    weights = sum(g.weight_bytes for g in engine.groups)
    assert memory.host_pinned_bytes >= 2 * weights
    streamed = sum(g.weight_bytes for g in engine.groups if g.kind == "block")
    assert traffic.h2d_bytes >= 2 * streamed
    assert traffic.d2h_bytes == 2 * sum(s.size_bytes for g in engine.groups for s in g.trained)
    moves, _ = engine.take_moves(16)
    assert any(move.duration_s and move.duration_s > 0 for move in moves)
