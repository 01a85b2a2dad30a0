"""The service: its store, queue and worker, and what needs several of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
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
from fluxtrain.serve.backend import Backend, Processes
from fluxtrain.serve.evaluation import Evaluations
from fluxtrain.serve.jobs import JobRequest
from fluxtrain.serve.kubernetes_jobs import KubernetesJobs
from fluxtrain.serve.metrics import AnswerCounts, Watched
from fluxtrain.serve.mirror import mirror_of
from fluxtrain.serve.queue import TICK_S, Queue
from fluxtrain.serve.refusal import Refusal, not_found
from fluxtrain.serve.registry import (
    CHECKPOINT,
    Promotion,
    PromotionGate,
    checked,
    compared_tasks,
    current,
    find_version,
    model_name,
    move,
    refuse_below_gate,
    version_object,
)
from fluxtrain.serve.settings import ServeSettings
from fluxtrain.serve.store import Store, new_id, versions
from fluxtrain.serve.uploads import content_of, find_file
from fluxtrain.serve.vllm import VllmWorker
from fluxtrain.serve.worker import ModelWorker, Said, WorkerModel

PLANS_AT_ONCE = 2


class Service:
    """The state of one server; the routes in `app` are its only users."""

    def __init__(
        self,
        store: Store,
        settings: ServeSettings,
        trainer: tuple[str, ...] = TRAINER,
        program: tuple[str, ...] = FLUXTRAIN,
    ) -> None:
        """Prepare the service; trainer, program: commands that start `fluxtrain train` and other
        commands of `fluxtrain`."""
        self.store, self.settings, self._program = store, settings, program
        in_cluster = settings.backend == "kubernetes"
        backend: Backend = KubernetesJobs(settings) if in_cluster else Processes(trainer)
        self.queue = Queue(store, settings, backend)
        check, url = partial(checked, store), settings.vllm_url
        self.worker = (
            ModelWorker(self._why_no_answer, check, program)
            if url is None
            else VllmWorker(url, settings.slots, settings.slot_rank, check)
        )
        self.watched = Watched(
            store=store, settings=settings, queue=self.queue, answers=AnswerCounts()
        )
        self.evaluations = Evaluations(
            store,
            settings,
            self._why_no_answer,
            self.worker.leave,
            program,
            lambda: self.queue.lease.leads,
        )
        self.mirror = mirror_of(store, lambda: self.queue.lease.leads)
        self._planning = asyncio.Semaphore(PLANS_AT_ONCE)
        self._asking: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the queue, and end the worker in time for jobs."""
        self.queue.start()
        if self.mirror is not None:
            self.mirror.start()
        beside = [
            asyncio.create_task(self._yield_to_jobs()),
            asyncio.create_task(self.evaluations.follow_jobs()),
        ]
        try:
            yield
        finally:
            for task in beside:
                task.cancel()
            if self.mirror is not None:
                await run_in_threadpool(self.mirror.close)
            await run_in_threadpool(self.queue.close)
            await self.worker.leave()
            if isinstance(self.worker, VllmWorker):
                await self.worker.close()
            self.store.close()

    # -- jobs

    async def create_job(
        self, project: str, asked: JobRequest, repeat_key: str | None, retry: bool
    ) -> dict[str, Any]:
        """Check, plan and queue a job; a repeated request gets the job of the first.

        Raises Refusal for what cannot be trained, with the reason of the reader or the planner.
        """
        sent = job_rows.Sending(job_rows.digest_of(project, asked), repeat_key, retry)
        name = f"{project}:{repeat_key or sent.digest}"
        lock = self._asking.setdefault(name, asyncio.Lock())
        async with lock:  # a repeat may come while the first is still planned
            found = await run_in_threadpool(job_rows.repeated, self.store, project, sent)
            if found is not None:
                return dict(found)
            config, blobs = await run_in_threadpool(
                job_rows.config_of, self.store, self.settings, project, asked
            )
            job_id = new_id("ftjob")  # the name of its run's folder too
            plan = await self._planned(job_id, config, asked)
            job_rows.refuse_endless(plan, asked)
            config = job_rows.with_rate(config, asked, plan)
            values = {"id": job_id, "project": project, "config": config}
            values |= {"plan": _facts(plan), "blobs": blobs}
            most = self.settings.quotas.queued_jobs
            row = await run_in_threadpool(job_rows.add_job, self.store, most, asked, sent, values)
        self.queue.wake()
        return row

    async def _planned(
        self, job_id: str, config: dict[str, Any], asked: JobRequest
    ) -> PlanAnswer | None:
        """Return the plan of a run; None where the memory is in use by a job that trains now."""
        path = job_rows.config_path(self.store, job_id, "plan")
        machine = self.settings.kubernetes.machine
        in_pods = self.settings.backend == "kubernetes" and machine is not None
        options = ("--machine", str(machine)) if in_pods else ()
        try:
            replace_file(path, json.dumps(config).encode())
            async with self._planning:
                run = str(job_rows.run_of(job_id).path)
                return await ask_engine(
                    PlanAnswer, str(path), "--run-dir", run, *options, program=self._program
                )
        except EngineRefused as error:
            if error.exit_code == EXIT_DOES_NOT_FIT:
                if self.queue.busy:
                    return None
                if self.settings.inference == "yield" and await self.worker.leave():
                    return await self._planned(job_id, config, asked)  # with the worker's memory
            raise job_rows.refused_by(str(error), asked, code="plan_refused") from error
        except OSError as error:
            raise storage_error(path, error, option="--folder") from error
        finally:
            path.unlink(missing_ok=True)

    def newest(
        self,
        table: sa.Table,
        project: str,
        limit: int | None,
        after: str | None,
        columns: Sequence[sa.Column[Any]] = (),
    ) -> list[Any]:
        """Return a project's rows, newest first, from behind the row `after`; one more than
        `limit` where there are more. columns: the ones to read; () for all."""
        order = table.c.number if "number" in table.c else table.c.created_s
        query = sa.select(*(columns or table.c)).where(table.c.project == project)
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
        own = self.newest(versions, project, None, None)
        return [*map(version_object, own), *map(_base_object, self.settings.models)]

    def model(self, project: str, name: str) -> dict[str, Any]:
        """Return the facts of a model; of an open one also the cost of a token. Raises Refusal
        (404)."""
        known = name in self.settings.models
        shown = (
            _base_object(name) if known else version_object(find_version(self.store, project, name))
        )
        ready = self.worker.ready(self._opened(project, name)[0])
        if ready is not None:
            told = ("pass_s", "dtype", "placed", "context", "slots", "slot_bytes")
            shown["fluxtrain"] |= {key: getattr(ready, key) for key in told}
        return shown

    async def promote(self, project: str, alias: str, asked: Promotion) -> dict[str, Any]:
        """Move an alias to a version, if the version passes the gate.

        Raises Refusal, with both losses, where it does not.
        """
        if alias in self.settings.models:
            raise Refusal(f"{alias} is a model of the operator: choose another name")
        version = await run_in_threadpool(find_version, self.store, project, asked.version)
        now = await run_in_threadpool(current, self.store, project, alias)
        why: dict[str, Any] = {"gate": None}
        if asked.gate is not None:
            before = None
            if now is not None and now != version["id"]:
                before = await run_in_threadpool(find_version, self.store, project, now)
            why = {"gate": asked.gate.model_dump()}
            why |= await self._compared(project, asked.gate, version, before)
            refuse_below_gate(asked, now, why)
        return await run_in_threadpool(move, self.store, project, alias, version["id"], why)

    async def _compared(
        self,
        project: str,
        gate: PromotionGate,
        version: Mapping[str, Any],
        before: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        """Return what a gate compares: both losses on its file, or both results in a task."""
        if gate.metric != "loss":
            return compared_tasks(gate.metric, version, before)
        if gate.file is None:
            raise Refusal("gate.file is needed for the loss: name held-out rows", param="gate.file")
        row = await run_in_threadpool(find_file, self.store, project, gate.file)
        data = content_of(self.store, row)
        loss = await self.evaluations.loss(version, data)
        return {
            "loss": loss,
            "loss_before": None if before is None else await self.evaluations.loss(before, data),
        }

    # -- answers

    async def ask(self, project: str, name: str, asked: Ask) -> AsyncIterator[Said]:
        """Return the pieces of a model's answer. Raises Refusal."""
        if self.settings.inference == "off":
            raise Refusal("this server answers no questions (inference: off)", status=404)
        await run_in_threadpool(self._refuse_over_quota, project)
        opened, folder = await run_in_threadpool(self._opened, project, name)
        said = self.worker.answer(opened, asked, folder)
        return self.watched.answers.watched(project, name, said)

    def _refuse_over_quota(self, project: str) -> None:
        most = self.settings.quotas.tokens_per_minute
        kinds = ("prompt_tokens", "answer_tokens")
        if self.store.used(project, kinds, self.store.now_s() - 60) >= most:
            raise Refusal(
                f"the project has used its {most:,} tokens of this minute: ask again in the next",
                status=429,
                code="rate_limit_exceeded",
                retry_after_s=30.0,
            )

    async def count(self, project: str, model: str, answer: Answered) -> None:
        """Add an answer to a project's usage."""
        await run_in_threadpool(
            self.store.note_usage,
            project,
            model,
            prompt_tokens=answer.prompt_tokens,
            answer_tokens=answer.tokens,
        )

    def _opened(self, project: str, name: str) -> tuple[WorkerModel, Path | None]:
        """Return the model for a worker to open, and the folder of its adapter."""
        if name in self.settings.models:
            return self._base(name), None
        of_run, _, step = name.partition(CHECKPOINT)
        if step:
            return self._checkpoint(project, name, of_run, step), None
        version = find_version(self.store, project, name)
        folder: Path = self.store.models / version["artifact"]
        served = self.settings.models.get(version["base"])
        if version["method"] != "full" and served is not None:
            return self._base(version["base"]), folder
        checked(self.store, folder)
        trust = served is not None and served.trust_remote_code
        return WorkerModel(model=str(folder), options=_trusted(trust)), None

    def _base(self, name: str) -> WorkerModel:
        """Return how a base is opened, with slots where its jobs make adapters."""
        served = self.settings.models[name]
        options = _trusted(served.trust_remote_code)
        if served.method != "full":
            slots, rank = self.settings.slots, self.settings.slot_rank
            options += ("--slots", str(slots), "--slot-rank", str(rank))
        if served.method == "qlora":
            options += ("--packed", served.packing)
        return WorkerModel(model=served.path, options=options)

    def _checkpoint(self, project: str, name: str, of_run: str, step: str) -> WorkerModel:
        """Return a checkpoint of a job's run. Raises Refusal (404)."""
        job = job_rows.find_job(self.store, project, f"ftjob-{of_run.rpartition(':')[2]}")
        run = job_rows.run_of(job["id"])
        steps = [path.name[5:].lstrip("0") for path in run.checkpoints.glob("step-*")]
        if model_name(job) != of_run or step not in steps:
            raise not_found("model", name)
        return WorkerModel(model=str(run.path), options=("--step", step))

    def _why_no_answer(self) -> str:
        """Tell what holds the memory that answers need; "" where they may be given."""
        if self.settings.inference == "beside" or not self.queue.busy:
            return ""
        return (
            f"{self.queue.held}: ask again when training has ended, or let the operator set "
            "inference: beside in serve.yaml, which answers meanwhile where there is memory for "
            "both"
        )

    async def _yield_to_jobs(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                await self.worker.yield_to_jobs()
            await asyncio.sleep(TICK_S)


def _trusted(trust: bool) -> tuple[str, ...]:
    return ("--trust-remote-code",) if trust else ()


def _facts(plan: PlanAnswer | None) -> dict[str, Any]:
    """Return the part of a plan that a job keeps."""
    if plan is None:
        return {}
    return {
        "steps": plan.steps,
        "device_bytes": plan.device_bytes,
        "host_bytes": plan.host_bytes,
        "disk_bytes": plan.disk_bytes,
        "checkpoint_bytes": plan.checkpoint_bytes,
        "step_s": None if plan.predicted is None else plan.predicted.step_s,
        "eta_s": None if plan.predicted is None else plan.predicted.eta_s,
        "notes": list(plan.notes),
    }


def _base_object(name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "operator",
        "fluxtrain": {},
    }
