"""The service: its store, queue and worker, and what needs several of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import sqlalchemy as sa
from fastapi.concurrency import run_in_threadpool

from fluxtrain.errors import EXIT_DOES_NOT_FIT
from fluxtrain.events.answers.asking import FLUXTRAIN, EngineRefused, ask_engine
from fluxtrain.events.answers.generation import Answered, Ask
from fluxtrain.events.answers.plan import PlanAnswer
from fluxtrain.events.run_folder.launch import TRAINER
from fluxtrain.files.atomic import replace_file, storage_error
from fluxtrain.serve import jobs as job_rows
from fluxtrain.serve.jobs import JobRequest
from fluxtrain.serve.queue import TICK_S, Queue
from fluxtrain.serve.refusal import Refusal, not_found
from fluxtrain.serve.registry import CHECKPOINT, model_name
from fluxtrain.serve.settings import ServeSettings
from fluxtrain.serve.store import Store, versions
from fluxtrain.serve.worker import Opened, Said, Worker

PLANS_AT_ONCE = 2


class Service:
    """What one server has; the routes in `app` are its only users."""

    def __init__(
        self,
        store: Store,
        settings: ServeSettings,
        trainer: tuple[str, ...] = TRAINER,
        program: tuple[str, ...] = FLUXTRAIN,
    ) -> None:
        """trainer, program: what starts `fluxtrain train` and other commands of `fluxtrain`."""
        self.store, self.settings, self._program = store, settings, program
        self.queue = Queue(store, settings, trainer)
        self.worker = Worker(self._may_answer, program)
        self._planning = asyncio.Semaphore(PLANS_AT_ONCE)
        self._asking: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the queue, and end the worker in time for jobs."""
        self.queue.start()
        yielding = asyncio.create_task(self._yield_to_jobs())
        try:
            yield
        finally:
            yielding.cancel()
            await run_in_threadpool(self.queue.close)
            await self.worker.leave()
            self.store.close()

    # -- jobs

    async def create_job(
        self, project: str, asked: JobRequest, repeat_key: str | None, retry: bool
    ) -> dict[str, Any]:
        """Check, plan and queue a job; a repeated request gets the job of the first.

        Raises Refusal for what cannot be trained, with the reason of the reader or the planner.
        """
        digest = job_rows.digest_of(project, asked)
        name = f"{project}:{repeat_key or digest}"
        lock = self._asking.setdefault(name, asyncio.Lock())
        async with lock:  # a repeat may come while the first is still planned
            found = await run_in_threadpool(
                job_rows.repeated, self.store, project, digest, repeat_key, retry
            )
            if found is not None:
                return dict(found)
            config, blobs = await run_in_threadpool(
                job_rows.config_of, self.store, self.settings, project, asked
            )
            job_id = job_rows.new_job_id()
            plan = await self._planned(job_id, config)
            if plan is not None:
                config = job_rows.with_rate(config, asked, plan)
            row = await run_in_threadpool(
                job_rows.add_job,
                self.store,
                self.settings,
                project,
                asked,
                job_id=job_id,
                config=config,
                plan=_facts(plan),
                blobs=blobs,
                digest=digest,
                repeat_key=repeat_key,
            )
        self.queue.wake()
        return row

    async def _planned(self, job_id: str, config: dict[str, Any]) -> PlanAnswer | None:
        """Return the plan of a run; None where the memory is in use by a job that trains now."""
        path = job_rows.config_path(self.store, job_id)
        try:
            replace_file(path, json.dumps(config).encode())
            async with self._planning:
                run = str(job_rows.run_of(job_id).path)
                return await ask_engine(
                    PlanAnswer, str(path), "--run-dir", run, program=self._program
                )
        except EngineRefused as error:
            if error.exit_code == EXIT_DOES_NOT_FIT and self.queue.busy:
                return None
            raise Refusal(str(error), code="plan_refused") from error
        except OSError as error:
            raise storage_error(path, error) from error
        finally:
            path.unlink(missing_ok=True)

    def newest(
        self, table: sa.Table, project: str, limit: int | None, after: str | None
    ) -> list[Any]:
        """Return a project's rows, newest first, from behind the row `after`; one more than
        `limit` where there are more."""
        order = table.c.number if "number" in table.c else table.c.created_s
        query = sa.select(table).where(table.c.project == project)
        if after is not None:
            last = self.store.one(sa.select(order.label("at")).where(table.c.id == after))
            if last is None:
                raise not_found(table.name, after)
            query = query.where(order < last["at"])
        query = query.order_by(order.desc())
        return self.store.rows(query if limit is None else query.limit(limit + 1))

    # -- models

    def models(self, project: str) -> list[dict[str, Any]]:
        """Return the models that can be asked: those of the operator and the project's own."""
        own = self.store.rows(
            sa.select(versions)
            .where(versions.c.project == project)
            .order_by(versions.c.created_s.desc())
        )
        return [*map(_version_object, own), *map(_base_object, self.settings.models)]

    def model(self, project: str, name: str) -> dict[str, Any]:
        """Return what is known of a model. Raises Refusal (404)."""
        if name in self.settings.models:
            return _base_object(name)
        return _version_object(self._version(project, name))

    def _version(self, project: str, name: str) -> Mapping[str, Any]:
        mine = (versions.c.id == name, versions.c.project == project)
        found = self.store.one(sa.select(versions).where(*mine))
        if found is None:
            raise not_found("model", name)
        return found

    # -- answers

    async def ask(self, project: str, name: str, asked: Ask) -> AsyncIterator[Said]:
        """Return the pieces of a model's answer. Raises Refusal."""
        if self.settings.inference == "off":
            raise Refusal("this server answers no questions (inference: off)", status=404)
        opened = await run_in_threadpool(self._opened, project, name)
        return self.worker.answer(opened, asked)

    async def count(self, project: str, model: str, answer: Answered) -> None:
        """Add an answer to a project's usage."""
        await run_in_threadpool(
            self.store.note_usage,
            project,
            model,
            prompt_tokens=answer.prompt_tokens,
            answer_tokens=answer.tokens,
        )

    def _opened(self, project: str, name: str) -> Opened:
        base = self.settings.models.get(name)
        if base is not None:
            return Opened(model=base.path, options=_trusted(base.trust_remote_code))
        of_run, _, step = name.partition(CHECKPOINT)
        if step:
            return self._checkpoint(project, name, of_run, step)
        version = self._version(project, name)
        folder: Path = self.store.models / version["artifact"]
        served = self.settings.models.get(version["base"])
        return Opened(
            model=str(folder), options=_trusted(served is not None and served.trust_remote_code)
        )

    def _checkpoint(self, project: str, name: str, of_run: str, step: str) -> Opened:
        """Return a checkpoint of a job's run. Raises Refusal (404)."""
        job = job_rows.find_job(self.store, project, f"ftjob-{of_run.rpartition(':')[2]}")
        run = job_rows.run_of(job["id"])
        steps = [path.name[5:].lstrip("0") for path in run.checkpoints.glob("step-*")]
        if model_name(job) != of_run or step not in steps:
            raise not_found("model", name)
        return Opened(model=str(run.path), options=("--step", step))

    def _may_answer(self) -> bool:
        return self.settings.inference == "beside" or not self.queue.busy

    async def _yield_to_jobs(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                await self.worker.yield_to_jobs()
            await asyncio.sleep(TICK_S)


def _trusted(trust: bool) -> tuple[str, ...]:
    return ("--trust-remote-code",) if trust else ()


def _facts(plan: PlanAnswer | None) -> dict[str, Any]:
    """Return what a job keeps of its plan."""
    if plan is None:
        return {}
    return {
        "steps": plan.steps,
        "device_bytes": plan.device_bytes,
        "host_bytes": plan.host_bytes,
        "disk_bytes": plan.disk_bytes,
        "step_s": None if plan.predicted is None else plan.predicted.step_s,
        "eta_s": None if plan.predicted is None else plan.predicted.eta_s,
        "notes": list(plan.notes),
    }


def _base_object(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "operator"}


def _version_object(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": row["id"],
        "object": "model",
        "created": int(row["created_s"]),
        "owned_by": row["project"],
        "fluxtrain": {"base": row["base"], "method": row["method"], "job": row["job"]},
    }
