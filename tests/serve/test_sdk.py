"""The stock openai SDK, strict, from a file to a chat with the new model."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from docs.write_service import PAGE, run_page
from fluxtrain.events.run_folder.run_dir import find_run
from tests.serve.conftest import Command


def test_the_transcripts_of_the_page_run_and_the_strict_sdk_agrees(
    command: Command, tmp_path: Path
) -> None:
    text, names = run_page(PAGE.read_text(), command.url, command.key, tmp_path)
    assert [len(one) for one in re.findall(r"```text\n```", text)] == []  # each printed something
    client = openai.OpenAI(
        base_url=command.url, api_key=command.key, _strict_response_validation=True
    )
    job = client.fine_tuning.jobs.retrieve(names["job"].id)
    assert (job.status, job.trained_tokens is not None) == ("succeeded", True), job
    runs = Path(psutil.Process(command.process.pid).environ()["FLUXTRAIN_RUNS"])
    assert find_run(job.id, runs).name == job.id  # what `fluxtrain-tui --attach JOB` looks for
    events = list(client.fine_tuning.jobs.list_events(job.id, limit=5))
    steps = [event for event in events if re.match(r"Step \d/4: loss", event.message)]
    assert [event.data["step"] for event in steps] == [4, 3, 2, 1]
    assert len({event.id for event in events}) == len(events)
    checkpoints = list(client.fine_tuning.jobs.checkpoints.list(job.id, limit=1))
    assert checkpoints[0].step_number == 4 and checkpoints[0].metrics.valid_loss is not None
    assert job.fine_tuned_model in [model.id for model in client.models.list()]

    question: Any = {
        "model": job.fine_tuned_model,
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 8,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**question)
    pieces = client.chat.completions.create(
        **question, stream=True, stream_options={"include_usage": True}
    )
    told = list(pieces)
    text = "".join(one.choices[0].delta.content or "" for one in told if one.choices)
    assert text == whole.choices[0].message.content
    assert told[-1].usage == whole.usage
    check_probabilities(client, question, whole, text)

    async def asynchronous() -> openai.types.chat.ChatCompletion:
        async with openai.AsyncOpenAI(
            base_url=command.url, api_key=command.key, _strict_response_validation=True
        ) as client:
            assert [job.id async for job in client.fine_tuning.jobs.list()] == [job.id]
            return await client.chat.completions.create(**question)

    assert asyncio.run(asynchronous()).choices[0].message == whole.choices[0].message
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**{**question, "model": "ft:demo:default:mine:other"})


def check_probabilities(client: openai.OpenAI, question: Any, whole: Any, text: str) -> None:
    likely = client.chat.completions.create(**question, logprobs=True, top_logprobs=2)
    tokens = likely.choices[0].logprobs.content
    assert likely.choices[0].message == whole.choices[0].message
    assert len(tokens) == whole.usage.completion_tokens
    assert (
        "".join(one.token for one in tokens)
        == text
        == bytes(byte for one in tokens for byte in one.bytes).decode()
    )
    assert all(one.logprob == one.top_logprobs[0].logprob <= 0 for one in tokens)
    streamed = client.chat.completions.create(
        **question, logprobs=True, top_logprobs=2, stream=True
    )
    of_pieces = [one.choices[0].logprobs for one in streamed]
    assert [one for part in of_pieces if part for one in part.content] == tokens
    completion = client.completions.create(
        model=question["model"], prompt="It is", max_tokens=4, logprobs=2
    )
    assert completion.choices[0].finish_reason in ("length", "stop")
    told_of = completion.choices[0].logprobs
    assert "".join(told_of.tokens) == completion.choices[0].text
    assert told_of.text_offset == [
        len("".join(told_of.tokens[:at])) for at in range(len(told_of.tokens))
    ]
    assert all(len(top) == 2 for top in told_of.top_logprobs)


def test_the_server_imports_no_torch_and_stays_small(command: Command) -> None:
    process = psutil.Process(command.process.pid)
    maps = {Path(one.path).name for one in process.memory_maps()}
    assert not [name for name in maps if name.startswith(("libtorch", "_multiarray"))]
    assert process.memory_info().rss < 100 << 20
