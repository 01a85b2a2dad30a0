"""Answers by a vLLM that has its known faults (T3)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import sqlalchemy as sa

from fluxtrain.commands.serve_cli import _settings
from fluxtrain.errors import BadInput
from fluxtrain.serve.settings import ServedModel
from fluxtrain.serve.store import versions
from tests.serve.conftest import Served
from tests.serve.fake_vllm import WORDS, FakeVllm
from tests.serve.test_registry import call

MODEL = ServedModel(path="demo", method="full")


@pytest.fixture
def vllm() -> Iterator[FakeVllm]:
    made = FakeVllm()
    yield made
    made.stop()


def adapters(served: Served, count: int, rank: int = 8) -> dict[str, str]:
    """Register adapters as jobs make them; return their digests by name."""
    from fluxtrain.serve.registry import keep

    found, store = {}, served.service.store
    for number in range(count):
        folder = store.folder / f"made-{rank}-{number}"
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps({"r": rank, "number": number}))
        name = f"ft:demo:default:a{number}:{rank}"
        found[name] = keep(folder, store.models)
        row = {"id": name, "project": "default", "job": name, "base": "demo", "method": "lora",
               "artifact": found[name], "facts": {}, "created_s": float(number)}  # fmt: skip
        with store.write() as connection:
            connection.execute(sa.insert(versions), row)
    return found


def said(client: openai.OpenAI, model: str) -> set[str]:
    """Return the adapters whose words are in an answer."""
    message: Any = {"role": "user", "content": "x"}
    answer = client.chat.completions.create(model=model, messages=[message])
    assert answer.usage is not None and answer.usage.completion_tokens == WORDS
    return set(str(answer.choices[0].message.content).split())


def test_many_adapters_answer_as_themselves_whatever_is_loaded_meanwhile(
    serve: Callable[..., Served], vllm: FakeVllm
) -> None:
    served = serve(models={"demo": MODEL}, inference=f"vllm={vllm.url}", slots=3)
    client, names = served.client(), adapters(served, 6)
    *together, last = names
    wanted = {"demo": "base", **{name: names[name] for name in together}}
    with ThreadPoolExecutor(8) as pool:
        asked = list(wanted) * 3
        for model, words in zip(asked, pool.map(lambda one: said(client, one), asked), strict=True):
            assert words == {wanted[model]}
    assert said(client, last) == {names[last]}
    assert len(vllm.adapters) <= 3  # the least recently used were unloaded
    assert set(vllm.loads) == set(names.values())  # a name is a digest of the content
    used = call(served, "GET", "usage")[1]["data"]
    tokens = [one["amount"] for one in used if one["kind"] == "answer_tokens"]
    assert sum(tokens) == WORDS * (len(asked) + 1)


def test_what_vllm_forgets_loses_or_does_not_see_is_noticed(
    serve: Callable[..., Served], vllm: FakeVllm
) -> None:
    served = serve(models={"demo": MODEL}, inference=f"vllm={vllm.url}")
    client, (first, second) = served.client(), list(names := adapters(served, 2))
    assert said(client, first) == {names[first]}
    vllm.restart()
    assert said(client, first) == {names[first]}
    vllm.blind = True  # it answers 200
    with pytest.raises(openai.InternalServerError, match="same path"):
        said(client, second)
    (large,) = adapters(served, 1, rank=128)
    with pytest.raises(openai.BadRequestError, match="rank 128"):
        said(client, large)
    with pytest.raises(openai.NotFoundError):
        said(client, "ft:demo:default:other:9")
    assert not set(vllm.loads) & {names.get(large)}
    vllm.stop()
    with pytest.raises(openai.InternalServerError) as refused:
        said(client, first)
    assert refused.value.status_code == 503 and refused.value.response.headers["retry-after"]


def test_an_alias_that_moves_does_not_change_the_answer_under_way(
    serve: Callable[..., Served], vllm: FakeVllm
) -> None:
    served = serve(models={"demo": MODEL}, inference=f"vllm={vllm.url}")
    client, (first, second) = served.client(), list(names := adapters(served, 2))
    assert call(served, "POST", "aliases/best", version=first)[0] == 200
    vllm.word_s = 0.3
    message: Any = {"role": "user", "content": "x"}
    stream = client.chat.completions.create(model="best", messages=[message], stream=True)
    words = [next(stream).choices[0].delta.content, next(stream).choices[0].delta.content]
    assert call(served, "POST", "aliases/best", version=second)[0] == 200
    with ThreadPoolExecutor(1) as pool:
        after = pool.submit(said, client, "best")
        words += [one.choices[0].delta.content for one in stream if one.choices]
        assert set("".join(map(str, filter(None, words))).split()) == {names[first]}
        assert after.result() == {names[second]}


def test_another_way_to_answer_is_refused_with_those_there_are() -> None:
    assert _settings(None, None, inference="vllm=http://x:8000").vllm_url == "http://x:8000"
    with pytest.raises(BadInput, match="vllm=http://HOST:PORT"):
        _settings(None, None, inference="vllm")
