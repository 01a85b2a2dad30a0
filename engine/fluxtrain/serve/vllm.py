"""Answers by a vLLM elsewhere: adapters are loaded there, under names that never change content.

vLLM's runtime loading has known faults, which shape this module: a name that is loaded again with
other content is answered from the old cache (#42125), so names are digests of the contents; an
adapter that is loaded while others decode can answer for them (#47724), so nothing is in flight
meanwhile; an unloaded adapter can stay in the engine (#42633), which does no harm under such names.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
from fastapi.concurrency import run_in_threadpool

from fluxtrain.events.answers.generation import Answered, Ask, Ended, Ready, Text
from fluxtrain.files.atomic import read_json
from fluxtrain.serve.refusal import Refusal
from fluxtrain.serve.store import new_id
from fluxtrain.serve.worker import Said, WorkerModel, try_again

LIMITS = httpx.Timeout(60.0, connect=5.0, read=120.0)  # read: between two pieces of an answer
DIGEST = re.compile(r"[0-9a-f]{64}")
ENDS: dict[str, Ended] = {"stop": "end", "length": "length"}


class VllmWorker:
    """Routes asks to one vLLM, which reads adapters from the service's own folder."""

    def __init__(self, url: str, slots: int, rank: int, check: Callable[[Path], object]) -> None:
        """Prepare the router.

        Args:
            url: of vLLM, without `/v1`.
            slots: adapters that stay loaded; the least recently used is unloaded.
            rank: the largest of an adapter (vLLM's --max-lora-rank).
            check: raises Refusal for an adapter whose files were changed.
        """
        self._url, self._slots, self._rank, self._check = url.rstrip("/"), slots, rank, check
        self._client = httpx.AsyncClient(timeout=LIMITS)
        self._bases: dict[str, str] = {}  # names at vLLM by model
        self._loaded: dict[str, None] = {}  # least recently used first
        self._asked: Counter[str] = Counter()  # asks by adapter, waiting ones too
        self._in_flight = 0
        self._turn = asyncio.Condition()
        self._loading = False

    async def answer(
        self, opened: WorkerModel, asked: Ask, adapter: Path | None
    ) -> AsyncIterator[Said]:
        """Yield the pieces of an answer, and in the end the whole, as `ModelWorker` does.

        Raises Refusal: 503 where vLLM is gone or too slow, 400 for what it cannot answer.
        """
        if asked.logprobs is not None:
            raise Refusal("logprobs are not there beside vLLM: leave them out", param="logprobs")
        wanted = "" if adapter is None else adapter.name
        self._asked[wanted] += 1
        try:
            async for piece in self._answer(opened, asked, adapter):
                yield piece
        finally:
            self._asked[wanted] -= 1

    async def _answer(
        self, opened: WorkerModel, asked: Ask, adapter: Path | None
    ) -> AsyncIterator[Said]:
        again = True
        while True:
            try:
                name = await self._base(opened)
                if adapter is not None:
                    name = adapter.name
                    await self._load(adapter)
                async with self._flying():
                    async for piece in self._pieces(name, asked):
                        again = False
                        yield piece
                return
            except _Forgotten:  # it was started anew since
                self._loaded.clear()
                self._bases.clear()
                if not again:
                    raise try_again("vLLM has lost the model in mid-answer") from None
                again = False
            except (httpx.HTTPError, ValueError) as error:
                self._loaded.clear()
                raise try_again(f"vLLM does not answer ({error!r})") from error

    def ready(self, opened: WorkerModel) -> Ready | None:
        """Return None: what a pass takes there is not known here."""
        return None

    async def leave(self) -> bool:
        """Return False: it takes no memory here."""
        return False

    async def yield_to_jobs(self) -> None:
        """Do nothing, as it has cards of its own."""

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    # -- models

    async def _base(self, opened: WorkerModel) -> str:
        """Return vLLM's name of a base. Raises Refusal for a model that it does not serve."""
        if opened.model not in self._bases:
            for one in await self._models():
                if not one.get("parent"):
                    self._bases |= {
                        str(one[key]): one["id"] for key in ("root", "id") if one.get(key)
                    }
        if opened.model not in self._bases or "--step" in opened.options:
            raise Refusal(
                "vLLM answers with its base and adapters of it alone: ask one of these, or let "
                "the operator serve with `inference: yield`",
                code="model_not_served",
                param="model",
            )
        return self._bases[opened.model]

    async def _models(self) -> list[dict[str, Any]]:
        answer = await self._client.get(f"{self._url}/v1/models")
        answer.raise_for_status()
        found: list[dict[str, Any]] = answer.json()["data"]
        return found

    async def _load(self, adapter: Path) -> None:
        """Load an adapter unless it is there, while nothing is in flight.

        Raises Refusal for one that was changed, is too large, or that vLLM does not take.
        """
        name = adapter.name
        if name in self._loaded:
            self._loaded[name] = self._loaded.pop(name)
            return
        await run_in_threadpool(self._check, adapter)
        rank = (await run_in_threadpool(read_json, adapter / "adapter_config.json") or {}).get("r")
        if not isinstance(rank, int) or rank > self._rank:
            raise Refusal(
                f"the adapter has rank {rank}, and this server answers with rank {self._rank} at "
                "most (slot_rank): train with that or less"
            )
        async with self._alone():
            await self._look()
            if name not in self._loaded:
                told = await self._post("load_lora_adapter", lora_name=name, lora_path=str(adapter))
                await self._look()
                if name not in self._loaded:  # it says 200 for a path that it does not see
                    raise Refusal(
                        f"vLLM did not load the adapter ({told}): it has to see the service's "
                        "folder under the same path, and needs VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
                        status=503,
                    )
            self._loaded[name] = self._loaded.pop(name)
            unused = [one for one in self._loaded if not self._asked[one]]
            for oldest in unused[: max(0, len(self._loaded) - self._slots)]:
                del self._loaded[oldest]
                await self._post("unload_lora_adapter", lora_name=oldest)

    async def _look(self) -> None:
        """Read which adapters of this service are loaded; those of others stay theirs."""
        there = {str(one["id"]) for one in await self._models() if one.get("parent")}
        ours = [name for name in there if DIGEST.fullmatch(name) and name not in self._loaded]
        kept = [name for name in self._loaded if name in there]
        self._loaded = dict.fromkeys([*ours, *kept])

    async def _post(self, verb: str, **body: str) -> str:
        answer = await self._client.post(f"{self._url}/v1/{verb}", json=body)
        return f"{answer.status_code} {answer.text[:200]}"

    # -- turns: many answers, or one that loads

    @asynccontextmanager
    async def _flying(self) -> AsyncIterator[None]:
        async with self._turn:
            await self._turn.wait_for(lambda: not self._loading)
            self._in_flight += 1
        try:
            yield
        finally:
            async with self._turn:
                self._in_flight -= 1
                self._turn.notify_all()

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        async with self._turn:
            await self._turn.wait_for(lambda: not self._loading)
            self._loading = True  # no new answer begins
            try:
                await self._turn.wait_for(lambda: self._in_flight == 0)
            except BaseException:
                self._loading = False
                self._turn.notify_all()
                raise
        try:
            yield
        finally:
            async with self._turn:
                self._loading = False
                self._turn.notify_all()

    # -- one answer

    async def _pieces(self, name: str, asked: Ask) -> AsyncIterator[Said]:
        began_s, ask_id, text = time.monotonic(), new_id("ask"), ""
        ended: Ended = "end"
        usage: dict[str, Any] = {}
        path, body = _request(name, asked)
        request = self._client.stream("POST", f"{self._url}/v1/{path}", json=body)
        async with request as answer:
            if answer.status_code != 200:
                _refuse(answer.status_code, (await answer.aread()).decode(errors="replace"))
            whole = False
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    whole = True
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise try_again(f"vLLM failed in mid-answer ({event['error']})")
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    piece = choice.get("text") or choice.get("delta", {}).get("content") or ""
                    ended = ENDS.get(choice.get("finish_reason") or "", ended)
                    text += piece
                    if piece:
                        yield Text(id=ask_id, text=piece)
            if not whole:
                raise try_again("vLLM ended in mid-answer")
        yield Answered(
            id=ask_id,
            text=text,
            ended=ended,
            tokens=usage.get("completion_tokens", 0),
            prompt_tokens=usage.get("prompt_tokens", 0),
            seconds=time.monotonic() - began_s,
        )


class _Forgotten(Exception):
    """vLLM does not know a model that it had."""


def _request(name: str, asked: Ask) -> tuple[str, dict[str, Any]]:
    """Return path and body of vLLM's request."""
    given = {
        "max_tokens": asked.max_new_tokens,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "seed": asked.seed,
        "stop": asked.stop and list(asked.stop),
    }
    body: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    body |= {"model": name, "stream": True, "stream_options": {"include_usage": True}}
    if asked.plain:
        return "completions", {**body, "prompt": asked.prompt}
    messages = asked.messages or ({"role": "user", "content": asked.prompt},)
    return "chat/completions", {**body, "messages": list(messages)}


def _refuse(status: int, text: str) -> None:
    if status == 404:
        raise _Forgotten
    if status >= 500 or status == 429:
        raise try_again(f"vLLM is not able to answer now ({status})")
    try:
        told = msgspec.json.decode(text)
        message = told.get("error", told).get("message", text)
    except (msgspec.DecodeError, AttributeError):
        message = text
    raise Refusal(f"vLLM refuses: {str(message)[:500]}")
