"""Evaluates versions: on a file for a gate, and on the operator's tasks after each job."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from fastapi.concurrency import run_in_threadpool

from fluxtrain.errors import FluxTrainError
from fluxtrain.events.answers.answers import Answer, EvaluationAnswer, TasksAnswer
from fluxtrain.events.answers.asking import EngineRefused, ask_engine
from fluxtrain.serve.refusal import Refusal, without_folders
from fluxtrain.serve.registry import checked
from fluxtrain.serve.settings import ServeSettings
from fluxtrain.serve.store import Store, versions

PAUSE_S, TICK_S = 2.0, 0.5
A = TypeVar("A", bound=Answer)


class Evaluations:
    """Runs `fluxtrain evaluate`, one at a time, while no job needs the memory."""

    def __init__(
        self,
        store: Store,
        settings: ServeSettings,
        why_not: Callable[[], str],
        leave: Callable[[], Awaitable[object]],
        program: tuple[str, ...],
        leads: Callable[[], bool] = lambda: True,
    ) -> None:
        """Prepare; why_not: says why memory allows no evaluation now; leave: ends the worker;
        leads: whether this is the one of several servers that evaluates after jobs."""
        self._store, self._settings, self._program = store, settings, program
        self._why_not, self._leave, self._leads = why_not, leave, leads
        self._one = asyncio.Lock()

    async def loss(self, version: Mapping[str, Any], data: Path) -> float:
        """Return a version's loss on a file. Raises Refusal, also while a job has the memory."""
        if why := self._why_not():
            raise Refusal(why, status=503, retry_after_s=60.0)
        return (await self._asked(EvaluationAnswer, version, str(data))).loss

    async def follow_jobs(self) -> None:
        """Evaluate each version once on the tasks of its base (`models.NAME.tasks`), if any."""
        with_tasks = [name for name, one in self._settings.models.items() if one.tasks is not None]
        if not with_tasks:
            return
        wanted = sa.select(versions).where(versions.c.base.in_(with_tasks))
        seen = -1
        while True:
            await asyncio.sleep(PAUSE_S)
            changes = self._store.changes
            if changes == seen or not self._leads() or self._why_not():
                continue
            with suppress(Refusal):  # without a database it is asked again
                for version in await run_in_threadpool(self._store.rows, wanted):
                    if "tasks" not in version["facts"] and not self._why_not():
                        await self._while_no_job_trains(version)
                seen = changes

    async def _while_no_job_trains(self, version: Mapping[str, Any]) -> None:
        """Evaluate a version; where a job needs the memory meanwhile, it begins again later."""
        evaluating = asyncio.create_task(self._evaluate(version))
        try:
            while not (await asyncio.wait({evaluating}, timeout=TICK_S))[0]:
                if self._why_not():
                    return
            await evaluating
        finally:
            evaluating.cancel()
            await asyncio.wait({evaluating})

    async def _evaluate(self, version: Mapping[str, Any]) -> None:
        """Keep a version's results on the tasks, or why there are none."""
        folder = self._settings.models[version["base"]].tasks
        try:
            found = await self._asked(TasksAnswer, version, "--tasks", str(folder))
            results: dict[str, Any] = {
                f"{one.task}/{one.metric}": {
                    "value": one.value,
                    "error": one.error,
                    "higher_is_better": one.higher_is_better,
                }
                for one in found.results
            }
        except FluxTrainError as error:
            results = {"error": without_folders(str(error))}
        await run_in_threadpool(partial(self._keep, version["id"], results))

    def _keep(self, name: str, results: Mapping[str, Any]) -> None:
        with self._store.write() as connection:
            query = sa.select(versions.c.facts).where(versions.c.id == name)
            facts = connection.execute(query).scalar_one_or_none()
            if facts is not None:  # it was not deleted meanwhile
                changed = sa.update(versions).where(versions.c.id == name)
                connection.execute(changed.values(facts={**facts, "tasks": dict(results)}))

    async def _asked(self, answer: type[A], version: Mapping[str, Any], *options: str) -> A:
        folder = await run_in_threadpool(
            checked, self._store, self._store.models / version["artifact"]
        )
        served = self._settings.models.get(version["base"])
        trusted = ("--trust-remote-code",) if served and served.trust_remote_code else ()
        async with self._one:
            await self._leave()
            try:
                return await ask_engine(
                    answer, str(folder), *options, *trusted, program=self._program
                )
            except EngineRefused as error:
                raise Refusal(f"{version['id']} cannot be evaluated: {error}") from error
