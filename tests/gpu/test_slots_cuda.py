"""On a GPU, a swapped adapter reaches copies that stay on the card, and rows keep their own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fluxtrain.events.answers.generation import Answered, Ask, Event, Mount, Refused, encoded
from fluxtrain.models.generate.prompts import Prompting
from fluxtrain.models.generate.sampling import Sampling
from fluxtrain.results.generation_session import GenerationSession
from fluxtrain.results.serving import Stopping, serve
from tests.engine.adapter_folders import make_adapter
from tests.engine.conftest import SENTENCES, VOCABULARY, tiny_model, train_tokenizer
from tests.engine.used_models import opened

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
GREEDY = Sampling(max_new_tokens=8, temperature=0)


def told(session: GenerationSession, requests: Sequence[Ask | Mount]) -> dict[str, str]:
    events: list[Event] = []
    serve(session, map(encoded, requests), events.extend, Stopping())
    assert not [one for one in events if isinstance(one, Refused)]
    return {one.id: one.text for one in events if isinstance(one, Answered)}


def answers(folder: Path, *requests: Ask | Mount, **settings: Any) -> dict[str, str]:
    with opened(folder, **{"device": DEVICE, "dtype": "float32", **settings}) as model:
        return told(GenerationSession.of(model, Prompting(model), GREEDY), requests)


@pytest.mark.parametrize("packed", [None, "nf4-double"])
@pytest.mark.parametrize("offload", ["max", "none"])
def test_a_swap_reaches_blocks_that_stay_on_the_card(
    offload: str, packed: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fluxtrain.plan.states.LEAST_PACKED", 512)
    base = tmp_path / "base"
    train_tokenizer(SENTENCES, base, VOCABULARY)
    tiny_model("llama", torch.float32).save_pretrained(base)
    adapters = {
        str(alpha): make_adapter(base, tmp_path / str(alpha), r=8, lora_alpha=alpha)
        for alpha in (32, 64, 128)
    }
    how: Any = {"offload": offload, "packed": packed}
    alone = {
        name: answers(path, Ask(id=name, prompt="the fox"), **how)[name]
        for name, path in adapters.items()
    }
    events: dict[str, str] = {}
    with opened(base, device=DEVICE, dtype="float32", slots=1, slot_rank=16, **how) as model:
        session = GenerationSession.of(model, Prompting(model), GREEDY)
        for name, path in adapters.items():  # one slot: each takes the place of the last
            asks: list[Ask | Mount] = [
                Mount(name=name, path=str(path)),
                Ask(id=name, prompt="the fox", adapter=name),
            ]
            events |= told(session, asks)
    assert events == alone and len(set(alone.values())) > 1
    mounts = [Mount(name=name, path=str(path)) for name, path in adapters.items()]
    asks = [*mounts, *(Ask(id=name, prompt="the fox", adapter=name) for name in adapters)]
    assert answers(base, *asks, slots=3, slot_rank=16, **how) == alone
