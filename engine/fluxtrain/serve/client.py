"""A client for what the openai SDK lacks: one job a request whatever the network does, events that
are followed through reconnections, changes of a running job, promotion by a gate.

    with Client("http://127.0.0.1:8199/v1", key) as client:
        job = client.create_job(model="demo", training_file="file-...")
        for event in client.follow(job["id"]):
            print(event["message"])
        client.promote("best", client.wait(job["id"])["fine_tuned_model"])
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx

from fluxtrain.errors import FluxTrainError

T = TypeVar("T")
RETRIED = (408, 429, 500, 502, 503, 504)
LONGEST_PAUSE_S = 30.0
ENDED = ("succeeded", "failed", "cancelled")


class ServerRefused(FluxTrainError):
    """The server answered with an error; the message is its own."""

    exit_code = 2

    def __init__(self, message: str, status: int, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class AsyncClient:
    """Talks with one server. Requests are tried again while they can be; none is done twice."""

    def __init__(
        self, base_url: str, api_key: str, *, tries: int = 8, timeout_s: float = 600.0
    ) -> None:
        """Prepare a client. base_url: as the openai SDK takes it, with /v1. timeout_s:
        of one try."""
        self._http = httpx.AsyncClient(
            base_url=base_url.rstrip("/") + "/",
            headers={"Authorization": f"Bearer {api_key}"},
            timeout=timeout_s,
        )
        self._tries = tries

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def upload(self, path: Path | str) -> dict[str, Any]:
        """Upload a file of training data. Raises ServerRefused with the line that is wrong."""
        path = Path(path)
        files = {"file": (path.name, path.read_bytes())}
        return await self.request("POST", "files", data={"purpose": "fine-tune"}, files=files)

    async def create_job(self, *, key: str | None = None, **body: Any) -> dict[str, Any]:
        """Create a job; `body` is that of the SDK. Sent again under one Idempotency-Key, `key` or a
        new one, it makes one job."""
        headers = {"Idempotency-Key": key or secrets.token_hex(16)}
        return await self.request("POST", "fine_tuning/jobs", json=body, headers=headers)

    async def job(self, job_id: str) -> dict[str, Any]:
        """Tell how a job stands."""
        return await self.request("GET", f"fine_tuning/jobs/{job_id}")

    async def wait(self, job_id: str) -> dict[str, Any]:
        """Wait until a job has ended."""
        async for _ in self.follow(job_id):
            pass
        while (found := await self.job(job_id))["status"] not in ENDED:
            await asyncio.sleep(1.0)
        return found

    async def follow(self, job_id: str) -> AsyncIterator[dict[str, Any]]:
        """Yield a job's events, each once, until it has ended; connections are made again."""
        last, failures = "", 0
        while True:
            headers = {"Last-Event-ID": last} if last else {}
            address = f"fine_tuning/jobs/{job_id}/events"
            try:
                async with self._http.stream(
                    "GET", address, params={"stream": "true"}, headers=headers
                ) as answer:
                    if answer.status_code != 200:
                        await answer.aread()
                        raise _refused(answer)
                    async for line in answer.aiter_lines():
                        if line.startswith("id: "):
                            last = line[4:]
                        elif line.startswith("data: "):
                            failures = 0
                            yield json.loads(line[6:])
                return
            except (httpx.TransportError, ServerRefused) as error:
                failures += 1
                may = not isinstance(error, ServerRefused) or error.status in RETRIED
                if not may or failures >= self._tries:
                    raise
                await asyncio.sleep(_pause_s(failures))

    async def change(self, job_id: str, command: str, **arguments: int | str) -> str:
        """Change a running job: `apply` with a setting, `undo`, or `checkpoint`. Returns the
        trainer's answer."""
        path = f"fluxtrain/jobs/{job_id}/{command}"
        return str((await self.request("POST", path, json=arguments))["message"])

    async def promote(
        self, alias: str, version: str, *, file: str | None = None, min_gain: float = 0.0
    ) -> dict[str, Any]:
        """Let an alias point to a version; with a `file`, only if its loss there is at least
        `min_gain` lower than that of the present version."""
        gate = None if file is None else {"file": file, "min_gain": min_gain}
        body = {"version": version, "gate": gate}
        return await self.request("POST", f"fluxtrain/aliases/{alias}", json=body)

    async def request(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        """Send a request, again after a pause where the server could not answer it.

        Raises:
            ServerRefused: with the server's reason and cure.
            httpx.TransportError: the server cannot be reached.
        """
        for failures in range(1, self._tries + 1):
            try:
                answer = await self._http.request(method, path, **options)
            except httpx.TransportError:
                if failures == self._tries:
                    raise
                await asyncio.sleep(_pause_s(failures))
                continue
            if answer.is_success:
                found: dict[str, Any] = answer.json()
                return found
            final = answer.status_code not in RETRIED or failures == self._tries
            if final or answer.headers.get("x-should-retry") == "false":
                raise _refused(answer)
            told = answer.headers.get("retry-after", "")
            await asyncio.sleep(float(told) if told.isdecimal() else _pause_s(failures))
        raise AssertionError("the last try returns or raises")


class Client:
    """The same without async: each method of `AsyncClient`, run to its end."""

    def __init__(self, base_url: str, api_key: str, **options: Any) -> None:
        """Prepare a client, as `AsyncClient`."""
        self._runner = asyncio.Runner()
        self._client = AsyncClient(base_url, api_key, **options)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._client.close())
        self._runner.close()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)
        return lambda *args, **options: self._run(method(*args, **options))

    def follow(self, job_id: str) -> Iterator[dict[str, Any]]:
        """Yield a job's events, each once, until it has ended."""
        events = self._client.follow(job_id)
        while (event := self._run(anext(events, None))) is not None:
            yield event

    def _run(self, awaited: Awaitable[T]) -> T:
        async def result() -> T:
            return await awaited

        return self._runner.run(result())


def _pause_s(failures: int) -> float:
    """Return a pause that doubles, spread so that many clients do not come back at once."""
    return min(LONGEST_PAUSE_S, 0.25 * 2.0**failures) * random.uniform(0.5, 1.0)


def _refused(answer: httpx.Response) -> ServerRefused:
    try:
        error = answer.json()["error"]
        return ServerRefused(str(error["message"]), answer.status_code, error.get("code"))
    except (ValueError, KeyError, TypeError):
        return ServerRefused(f"HTTP {answer.status_code}", answer.status_code)
