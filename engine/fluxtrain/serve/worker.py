"""The process that answers: one base, opened by `fluxtrain generate --json`, with its adapters."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from fastapi.concurrency import run_in_threadpool

from fluxtrain.events.answers.asking import FLUXTRAIN, EngineRefused, Talk
from fluxtrain.events.answers.generation import (
    Answered,
    Ask,
    Mounted,
    Progress,
    Ready,
    Refused,
    Text,
)
from fluxtrain.serve.refusal import Refusal
from fluxtrain.serve.store import new_id

OPEN_LIMIT_S = 1800.0  # a model larger than memory is read from its disk
AGAIN_S = 5.0
Said = Text | Answered | Refused


@dataclass(frozen=True, kw_only=True)
class WorkerModel:
    """What a worker opens: options of `fluxtrain generate`, and the model's folder or id."""

    model: str
    options: tuple[str, ...] = ()


@dataclass
class _Worker:
    opened: WorkerModel
    talk: Talk
    ready: asyncio.Future[Ready]
    waiting: dict[str, asyncio.Queue[Said | None]] = field(default_factory=dict)
    mounted: frozenset[str] = frozenset()
    refused: dict[str, Refused] = field(default_factory=dict)  # mounts by adapter
    reader: asyncio.Task[None] | None = None
    why: str = ""  # it ended

    async def read(self) -> None:
        """Pass the process's lines to the waiting callers, until it ends."""
        try:
            async for event in self.talk.events():
                if isinstance(event, Ready):
                    self.ready.set_result(event)
                elif isinstance(event, Text | Answered | Refused):
                    asked = self.waiting.get(event.id)
                    if asked is not None:
                        asked.put_nowait(event)
                    elif isinstance(event, Refused):
                        self.refused[event.id] = event
                elif isinstance(event, Mounted):
                    self.mounted = frozenset(event.mounted)
                else:
                    assert isinstance(event, Progress)
            self.why = "the worker ended"
        except EngineRefused as error:
            self.why = str(error)
        if not self.ready.done():
            self.ready.set_exception(Refusal(f"the model cannot be opened: {self.why}", status=503))
            self.ready.exception()  # reported to the caller that waits, if any
        for asked in self.waiting.values():
            asked.put_nowait(None)

    async def close(self) -> None:
        await self.talk.close()
        if self.reader is not None:
            await asyncio.wait([self.reader])


class ModelWorker:
    """Keeps the process for the model that was asked for last; another one replaces it as soon as
    no answer is under way."""

    def __init__(
        self,
        why_not: Callable[[], str],
        check: Callable[[Path], object],
        program: tuple[str, ...] = FLUXTRAIN,
    ) -> None:
        """Prepare a worker.

        why_not: tells what holds the memory that a worker needs, "" where nothing does; check:
        raises Refusal for an adapter whose files were changed.
        """
        self._why_not, self._check, self._program = why_not, check, program
        self._worker: _Worker | None = None
        self._changing = asyncio.Lock()

    async def answer(
        self, opened: WorkerModel, asked: Ask, adapter: Path | None
    ) -> AsyncIterator[Said]:
        """Yield the pieces of an answer, and in the end the whole.

        `adapter` is the folder of the adapter that answers; its name is that of the adapter.

        Raises Refusal: 503 where the worker is busy with another model, died or has to wait for a
        job, 400 for what the model cannot answer.
        """
        worker = await self._for(opened)
        named = msgspec.structs.replace(asked, id=new_id("ask"))
        heard: asyncio.Queue[Said | None] = asyncio.Queue()
        worker.waiting[named.id] = heard
        ended = False
        try:
            if adapter is not None:
                if adapter.name not in worker.mounted:
                    await run_in_threadpool(self._check, adapter)
                await worker.talk.mount(adapter.name, str(adapter))
                named = msgspec.structs.replace(named, adapter=adapter.name)
            await worker.talk.ask(named)
            while not ended:
                event = await heard.get() if not worker.why or heard.qsize() else None
                if event is None:
                    ended = True
                    raise try_again(f"the worker ended in mid-answer ({worker.why})")
                if isinstance(event, Refused):
                    ended = True
                    refused = worker.refused.pop(named.adapter or "", event)
                    told = refused.message.replace(str(adapter), "the adapter")
                    raise try_again(told) if refused.later else Refusal(told)
                ended = isinstance(event, Answered)
                yield event
        finally:
            del worker.waiting[named.id]
            if not ended:
                await worker.talk.stop(named.id)

    def ready(self, opened: WorkerModel) -> Ready | None:
        """Return the facts of a model that is open; None for another one."""
        worker = self._worker
        if worker is None or worker.opened != opened or not worker.ready.done():
            return None
        return None if worker.ready.exception() else worker.ready.result()

    async def leave(self) -> bool:
        """End the process; return whether one was running."""
        async with self._changing:
            return await self._close()

    async def yield_to_jobs(self) -> None:
        """End the process while it may not run."""
        if self._worker is not None and self._why_not():
            await self.leave()

    async def _for(self, opened: WorkerModel) -> _Worker:
        if why := self._why_not():
            raise try_again(why)
        async with self._changing:
            worker = self._worker
            if worker is not None and (worker.opened != opened or worker.why):
                if worker.waiting and not worker.why:
                    raise try_again("the worker answers with another model now")
                await self._close()
                worker = None
            if worker is None:
                worker = self._worker = await self._begin(opened)
            try:
                await asyncio.wait_for(asyncio.shield(worker.ready), OPEN_LIMIT_S)
            except TimeoutError:
                await self._close()
                raise try_again(f"the model was not open after {OPEN_LIMIT_S:.0f} s") from None
        return worker

    async def _begin(self, opened: WorkerModel) -> _Worker:
        talk = await Talk.begin(opened.model, *opened.options, program=self._program)
        worker = _Worker(opened, talk, asyncio.get_running_loop().create_future())
        worker.reader = asyncio.create_task(worker.read())
        return worker

    async def _close(self) -> bool:
        worker, self._worker = self._worker, None
        if worker is not None:
            with contextlib.suppress(ProcessLookupError):
                await worker.close()
        return worker is not None


def try_again(why: str) -> Refusal:
    """Return the refusal of an ask that can be answered later."""
    return Refusal(why, status=503, code="worker_unavailable", retry_after_s=AGAIN_S)
