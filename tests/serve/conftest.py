"""A server in this process with a fake engine, for what is not of training; and the real one."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.routing import APIRoute

from docs.write_service import server
from fluxtrain.serve.app import make_app
from fluxtrain.serve.keys import SCOPES, add_key
from fluxtrain.serve.service import Service
from fluxtrain.serve.settings import ServeSettings
from fluxtrain.serve.store import Store
from tests.serve.postgres import Postgres

FAKE = (sys.executable, str(Path(__file__).parent / "fake_engine.py"))
ON_POSTGRES = os.environ.get("FLUXTRAIN_TEST_DB") == "postgresql"  # all tests of a server
ROW = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}


def rows(count: int = 4) -> bytes:
    return b"".join(json.dumps({**ROW, "id": number}).encode() + b"\n" for number in range(count))


@dataclass
class Served:
    """A server that runs, and its keys by scope."""

    service: Service
    url: str
    keys: dict[Any, str]
    close: Callable[[], None]
    app: FastAPI

    def service_routes(self) -> list[APIRoute]:
        return [one for one in self.app.routes if isinstance(one, APIRoute)]

    def client(self, scope: str = "admin", **options: Any) -> openai.OpenAI:
        options = {"max_retries": 0, "_strict_response_validation": True, **options}
        return openai.OpenAI(base_url=self.url, api_key=self.keys[scope], **options)


def upload(client: openai.OpenAI, content: bytes = b"", name: str = "data.jsonl") -> str:
    file = client.files.create(file=(name, content or rows()), purpose="fine-tune")
    return file.id


def create(client: openai.OpenAI, *words: str, file: str = "", **more: Any) -> Any:
    """Create a job whose fake trainer does what `words` say."""
    extra = {"fluxtrain": {"samples": {"prompts": list(words)}}} if words else {}
    return client.fine_tuning.jobs.create(
        model="demo", training_file=file or upload(client), extra_body=extra, **more
    )


def ended(client: openai.OpenAI, job_id: str, timeout_s: float = 60.0) -> Any:
    """Wait for a job's end."""
    until_s = time.monotonic() + timeout_s
    while time.monotonic() < until_s:
        job = client.fine_tuning.jobs.retrieve(job_id)
        if job.status in ("succeeded", "failed", "cancelled"):
            return job
        time.sleep(0.05)
    raise AssertionError(f"{job_id} did not end: {job}")


def wait_for(true: Callable[[], Any], timeout_s: float = 60.0) -> None:
    until_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < until_s, "waited too long"
        time.sleep(0.02)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    server = Postgres()
    yield server
    server.remove()


@pytest.fixture
def db(request: pytest.FixtureRequest) -> str | None:
    """The database of this test's servers: None for SQLite."""
    return request.getfixturevalue("postgres").new_database() if ON_POSTGRES else None


@pytest.fixture
def serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, db: str | None
) -> Iterator[Callable[..., Served]]:
    """`serve(**settings)` starts a server on this test's folder."""
    monkeypatch.setenv("FLUXTRAIN_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    monkeypatch.setattr("fluxtrain.serve.queue.TICK_S", 0.05)
    started: list[Served] = []

    def start(port: int = 0, program: tuple[str, ...] = FAKE, **settings: Any) -> Served:
        chosen = ServeSettings(folder=tmp_path / "service", db=db, **settings)
        store = Store(chosen.folder, db=db)
        service = Service(store, chosen, trainer=(*FAKE, "train"), program=program)
        keys = {scope: add_key(store, scope, scope) for scope in SCOPES}
        listener = socket.create_server(("127.0.0.1", port))
        app = make_app(service)
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()

        def close() -> None:
            server.should_exit = True
            thread.join(30)
            listener.close()

        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        started.append(Served(service, url, keys, close, app))
        return started[-1]

    yield start
    for one in started:
        one.close()
    for pid in tmp_path.glob("runs/*/pid"):  # trainers that still wait
        with pid.open() as mark:
            found = re.search(r'"pid":(\d+)', mark.read())
        if found is not None:
            try:
                os.kill(int(found[1]), signal.SIGKILL)
            except ProcessLookupError:
                continue


@pytest.fixture
def served(serve: Callable[..., Served]) -> Served:
    return serve()


@dataclass
class Command:
    """`fluxtrain serve` as users start it."""

    process: subprocess.Popen[str]
    url: str
    key: str


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    with server(tmp_path_factory.mktemp("serve")) as (url, key, process):
        yield Command(process, url, key)
