"""Several adapters and their base through the server, answered by one real worker."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import sqlalchemy as sa
import torch

from fluxtrain.events.answers.asking import FLUXTRAIN
from fluxtrain.models.generate.batch import write
from fluxtrain.models.generate.prompts import Prompting, UserPrompt
from fluxtrain.models.generate.sampling import Sampling
from fluxtrain.serve.registry import keep
from fluxtrain.serve.settings import ServedModel
from fluxtrain.serve.store import versions
from tests.engine.adapter_folders import make_adapter
from tests.engine.conftest import SENTENCES, VOCABULARY, tiny_model, train_tokenizer
from tests.engine.used_models import opened
from tests.serve.conftest import Served


def test_one_worker_answers_for_adapters_and_base_at_once(
    serve: Callable[..., Served], tmp_path: Path
) -> None:
    base = tmp_path / "base"
    train_tokenizer(SENTENCES, base, VOCABULARY)
    tiny_model("llama", torch.float32).save_pretrained(base)
    settings: Any = {"four": {"r": 4, "lora_alpha": 64}, "eight": {"r": 8, "lora_alpha": 48}}
    folders = {name: make_adapter(base, tmp_path / name, **more) for name, more in settings.items()}
    too_large = make_adapter(base, tmp_path / "large", r=32)
    served = serve(
        program=FLUXTRAIN, models={"base": ServedModel(path=str(base))}, slots=2, slot_rank=16
    )
    store = served.service.store
    for name, folder in {**folders, "large": too_large}.items():
        row: dict[str, Any] = {
            "id": f"ft:base:default::{name}", "project": "default", "job": name, "base": "base",
            "method": "lora", "artifact": keep(folder, store.models), "facts": {},
            "created_s": time.time(),
        }  # fmt: skip
        with store.write() as connection:
            connection.execute(sa.insert(versions), row)
    client = served.client()
    message: Any = {"role": "user", "content": "the fox"}

    def ask(model: str) -> str:
        answer = client.chat.completions.create(
            model=model, messages=[message], max_tokens=8, temperature=0, timeout=120
        )
        return str(answer.choices[0].message.content)

    names = {f"ft:base:default::{name}": folder for name, folder in folders.items()}
    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(ask, [*names, "base"] * 2))
    for at, folder in enumerate([*names.values(), base]):
        with opened(folder) as model:
            tokens = Prompting(model).tokens(UserPrompt(messages=[message]))
            alone = write(model, [tokens], Sampling(max_new_tokens=8, temperature=0))[0].text
        assert answers[at] == answers[at + 3] == alone
    with pytest.raises(openai.BadRequestError, match="- the adapter cannot .*--slot-rank 32"):
        ask("ft:base:default::large")
    with pytest.raises(openai.NotFoundError):
        ask("ft:base:default::unknown")
    assert ask("base") == answers[2]
    facts = client.models.retrieve("base").model_extra or {}
    assert facts["fluxtrain"]["pass_s"] > 0 and facts["fluxtrain"]["slots"] == 2
    stopped = client.chat.completions.create(
        model="base", messages=[message], max_tokens=8, temperature=0, stop=[answers[2][1:3]]
    )
    assert stopped.choices[0].message.content == answers[2][:1]
