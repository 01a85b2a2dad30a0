"""The stock openai SDK, strict, from a file to a chat with the new model."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import openai
import psutil
import pytest

from fluxtrain.events.run_folder.run_dir import find_run
from tests.serve.conftest import Command, ended, upload


def test_a_file_becomes_a_model_that_answers(command: Command) -> None:
    client = openai.OpenAI(
        base_url=command.url, api_key=command.key, _strict_response_validation=True
    )
    file = upload(client)
    job = client.fine_tuning.jobs.create(
        model="demo",
        training_file=file,
        suffix="mine",
        hyperparameters={"learning_rate_multiplier": 0.5},
        extra_body={"fluxtrain": {"train": {"steps": 4, "batch_rows": 1}}},
    )
    assert job.status == "queued"
    runs = Path(psutil.Process(command.process.pid).environ()["FLUXTRAIN_RUNS"])
    done = ended(client, job.id, 240)
    assert (done.status, done.trained_tokens is not None) == ("succeeded", True), done
    assert find_run(job.id, runs).name == job.id  # what `fluxtrain-tui --attach JOB` looks for
    events = list(client.fine_tuning.jobs.list_events(job.id, limit=5))
    steps = [event for event in events if re.match(r"Step \d/4: loss", event.message)]
    assert [event.data["step"] for event in steps] == [4, 3, 2, 1]
    assert len({event.id for event in events}) == len(events)
    assert done.fine_tuned_model in [model.id for model in client.models.list()]

    question = {
        "model": done.fine_tuned_model,
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

    async def asynchronous() -> openai.types.chat.ChatCompletion:
        async with openai.AsyncOpenAI(
            base_url=command.url, api_key=command.key, _strict_response_validation=True
        ) as client:
            assert [job.id async for job in client.fine_tuning.jobs.list()] == [job.id]
            return await client.chat.completions.create(**question)

    assert asyncio.run(asynchronous()).choices[0].message == whole.choices[0].message
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**{**question, "model": "ft:demo:default:mine:other"})


def test_the_server_imports_no_torch_and_stays_small(command: Command) -> None:
    process = psutil.Process(command.process.pid)
    maps = {Path(one.path).name for one in process.memory_maps()}
    assert not [name for name in maps if name.startswith(("libtorch", "_multiarray"))]
    assert process.memory_info().rss < 100 << 20
