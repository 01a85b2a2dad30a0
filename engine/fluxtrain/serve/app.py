"""The HTTP interface: OpenAI's routes over the store, the queue and the worker."""

from __future__ import annotations

import asyncio
import json
import re
import traceback
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Depends, FastAPI, Header, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.exceptions import HTTPException

from fluxtrain.errors import EXIT_NO_SPACE, FluxTrainError
from fluxtrain.events.answers.generation import Answered, Ask
from fluxtrain.events.run_folder.control import send_command
from fluxtrain.serve import job_events, registry, uploads
from fluxtrain.serve.chat import ChatRequest, CompletionRequest, GenerateRequest, OpenAIAnswer
from fluxtrain.serve.jobs import (
    SHOWN,
    JobRequest,
    TuningRequest,
    find_job,
    job_object,
    run_of,
    want,
)
from fluxtrain.serve.keys import Caller, Scope, caller_of
from fluxtrain.serve.refusal import Refusal, not_found, without_folders
from fluxtrain.serve.registry import Promotion
from fluxtrain.serve.service import Service
from fluxtrain.serve.store import files, jobs, new_id
from fluxtrain.serve.worker import AGAIN_S, Said

JSON_BYTES = 16 << 20
FORM_BYTES = 1 << 16  # of an upload's form besides the file
SEND_JSON = "send one JSON object as application/json"
NOT_JSON = f"the body is not valid JSON{{}}: {SEND_JSON}"
NO_FORM = "the upload is no form that can be read: send multipart/form-data as the openai SDK does"
_SHOULD = re.compile(r"^\w+ should")
_WORDS = {  # in place of pydantic's
    "missing": "is missing",
    "extra_forbidden": "is not known here",
    **dict.fromkeys(("too_short", "string_too_short"), "must not be empty"),
    **dict.fromkeys(("dict_type", "model_attributes_type"), "must be a JSON object"),
}
_MEMBER = re.compile(r"int|float|str|list\[.*\]|literal\[.*\]")  # as pydantic names them
Limit = Annotated[int, Query(ge=1, le=1000)]
After = Annotated[str | None, Query()]


def allowed(scope: Scope) -> Callable[[Request], Caller]:
    """Return a dependency that admits requests with a key of this scope, before their body is
    read."""

    def check(request: Request) -> Caller:
        service: Service = request.app.state.service
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        caller = caller_of(service.store, key.strip()) if kind.lower() == "bearer" else None
        if caller is None:
            raise Refusal(
                "the key is not known: send one of `fluxtrain serve keys` as a bearer token",
                status=401,
                code="invalid_api_key",
            )
        if not caller.may(scope):
            raise Refusal(
                f"the key has the scope {caller.scope}, and this needs {scope}",
                status=403,
                code="insufficient_permissions",
            )
        return caller

    return check


def page(
    rows: Sequence[Any], limit: int, shown: Callable[[Any], Any] = lambda row: row
) -> Response:
    """Return a page of a list as the SDK reads it: the first `limit` of `rows`, each through
    `shown`; one row more means that more exist."""
    data = [shown(row) for row in rows[:limit]]
    listed = {
        "object": "list",
        "data": data,
        "has_more": len(rows) > limit,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
    }
    return Response(msgspec.json.encode(listed), media_type="application/json")


Reads = Annotated[Caller, Depends(allowed("read"))]
Infers = Annotated[Caller, Depends(allowed("infer"))]
Trains = Annotated[Caller, Depends(allowed("train"))]


def make_app(service: Service) -> FastAPI:
    """Return the application; its start starts the queue, its end leaves trainers running."""

    @asynccontextmanager
    async def running(_: FastAPI) -> AsyncIterator[None]:
        async with service.running():
            yield

    app = FastAPI(title="FluxTrain", version=version("fluxtrain"), lifespan=running)
    app.state.service = service
    _answer_errors(app, service)
    _add_files(app, service)
    _add_jobs(app, service)
    _add_models(app, service)
    _add_answers(app, service)

    _add_more(app, service)
    app.add_middleware(_CutWhenStopping)
    return app


class _CutWhenStopping:
    """Lets uvicorn cut the streams that are open when it stops, without a traceback for each."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            if scope["type"] != "http":
                raise


# -- errors ---------------------------------------------------------------------------------------


def _answer_errors(app: FastAPI, service: Service) -> None:
    """Give every error OpenAI's form, and every answer an id."""

    @app.exception_handler(FluxTrainError)
    def _(_: Request, error: FluxTrainError) -> JSONResponse:
        if isinstance(error, Refusal):
            return _error(error.status, str(error), error.code, error.param, error.retry_after_s)
        full = error.exit_code == EXIT_NO_SPACE
        return _error(507 if full else 400, str(error), "no_space" if full else None)

    @app.exception_handler(RequestValidationError)
    def _(_: Request, error: RequestValidationError) -> JSONResponse:
        return _unfit(error.errors())

    @app.exception_handler(HTTPException)
    def _(request: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == 400:  # the only ones are of the body's form
            is_upload = request.url.path == "/v1/files"
            return _error(400, (NO_FORM if is_upload else NOT_JSON).format(""))
        if error.status_code not in (404, 405):
            return _error(error.status_code, str(error.detail))
        told = (
            f"this server has no {request.method} {request.url.path.lstrip('/')}: it has files, "
            "fine_tuning/jobs, models, chat/completions and completions under /v1, and what "
            "docs/service.md names"
        )
        return _error(error.status_code, told, "unknown_url")

    @app.middleware("http")
    async def _(request: Request, go_on: Callable[[Request], Any]) -> Any:
        try:
            answer = _refused_size(request, service) or await go_on(request)
        except asyncio.CancelledError:  # uvicorn's, of what has not ended when it stops
            answer = _error(503, "the server is stopping: ask again", retry_after_s=AGAIN_S)
        except Exception:  # noqa: BLE001 - whatever it is, the client gets an answer
            traceback.print_exc()
            answer = _error(500, "a bug of FluxTrain: the server's log has the traceback")
        answer.headers["x-request-id"] = new_id("req")
        return answer


def _unfit(found: Sequence[Any]) -> JSONResponse:
    """Return the answer to a body that is no JSON, or has fields that do not fit."""
    if found[0]["type"] == "json_invalid":
        return _error(400, NOT_JSON.format(f" (character {int(found[0]['loc'][-1]) + 1})"))
    param = _named(found[0]["loc"])
    same = [one for one in found if _named(one["loc"]) == param]  # of a union, all its members
    told = " or ".join(dict.fromkeys(map(_said, same))).replace(" or must be ", " or ")
    cure = "" if param or found[0]["type"] == "value_error" else f": {SEND_JSON}"
    told = f"{param or 'the body'} {told}{cure}"
    return _error(400, told, "invalid_request", param or None)


def _said(error: Mapping[str, Any]) -> str:
    """Return what is wrong with a field of a body, as the end of a sentence."""
    text = str(error["msg"]).removeprefix("Value error, ").partition(", unable to")[0]
    return _WORDS.get(error["type"], _SHOULD.sub("must", text))


def _named(place: Sequence[int | str]) -> str:
    """Return the field that an error of the body is about, without the member of its union."""
    names = [str(part) for part in place[1:]]
    return ".".join(part for part in names if not _MEMBER.fullmatch(part))


def _refused_size(request: Request, service: Service) -> JSONResponse | None:
    """Refuse a body that is too large, or may be, before any of it is read."""
    if request.method in ("GET", "DELETE", "HEAD", "OPTIONS"):
        return None
    length = request.headers.get("content-length", "")
    if not length.isdecimal() and "transfer-encoding" in request.headers:
        return _error(411, "the body's length is not told: send Content-Length")
    is_upload = request.url.path == "/v1/files"
    most = service.settings.quotas.file_bytes + FORM_BYTES if is_upload else JSON_BYTES
    if int(length or 0) <= most:
        return None
    return _error(413, str(uploads.too_large(most)), "too_large")


def _error(
    status: int,
    message: str,
    code: str | None = None,
    param: str | None = None,
    retry_after_s: float | None = None,
) -> JSONResponse:
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    told = without_folders(message)
    content = {"error": {"message": told, "type": kind, "param": param, "code": code}}
    headers = {} if retry_after_s is None else {"Retry-After": f"{retry_after_s:.0f}"}
    if status == 507:  # the SDK would send the whole upload twice more
        headers["x-should-retry"] = "false"
    return JSONResponse(content, status, headers)


# -- files ----------------------------------------------------------------------------------------


def _add_files(app: FastAPI, service: Service) -> None:
    store = service.store

    @app.post("/v1/files")
    async def create_file(request: Request, caller: Trains) -> dict[str, Any]:
        """Upload a file of training data (multipart: `purpose`, `file`)."""
        async with request.form(max_files=1, max_fields=8) as form:
            file, purpose = form.get("file"), form.get("purpose")
            if purpose != uploads.PURPOSE:
                told = f"purpose is {purpose!r}: this server takes {uploads.PURPOSE!r} only"
                raise Refusal(told, param="purpose")
            if file is None or isinstance(file, str):
                raise Refusal("there is no file in the form", param="file")
            row = await run_in_threadpool(
                uploads.add_file,
                store,
                service.settings.quotas,
                caller.project,
                file.filename or "",
                file.file,
            )
        return uploads.file_object(row)

    @app.get("/v1/files")
    def list_files(
        caller: Reads, limit: Limit = 1000, after: After = None, purpose: str | None = None
    ) -> Response:
        """List the project's files, newest first."""
        if purpose not in (None, uploads.PURPOSE):
            return page([], limit)
        return page(service.newest(files, caller.project, limit, after), limit, uploads.file_object)

    @app.get("/v1/files/{file_id}")
    def get_file(file_id: str, caller: Reads) -> dict[str, Any]:
        """Return the facts of a file."""
        return uploads.file_object(uploads.find_file(store, caller.project, file_id))

    @app.get("/v1/files/{file_id}/content")
    def get_content(file_id: str, caller: Reads) -> FileResponse:
        """Download a file."""
        row = uploads.find_file(store, caller.project, file_id)
        return FileResponse(uploads.content_of(store, row), filename=row["name"])

    @app.delete("/v1/files/{file_id}")
    def delete_file(file_id: str, caller: Trains) -> dict[str, Any]:
        """Delete a file."""
        uploads.delete_file(store, caller.project, file_id)
        return {"id": file_id, "object": "file", "deleted": True}


# -- jobs -----------------------------------------------------------------------------------------


def _add_jobs(app: FastAPI, service: Service) -> None:
    @app.post("/v1/fine_tuning/jobs")
    async def create_job(
        asked: JobRequest,
        caller: Trains,
        idempotency_key: Annotated[str | None, Header(max_length=255)] = None,
        x_stainless_retry_count: Annotated[str, Header()] = "0",
    ) -> dict[str, Any]:
        """Plan and queue a job."""
        retry = x_stainless_retry_count.strip() not in ("", "0")
        return job_object(await service.create_job(caller.project, asked, idempotency_key, retry))

    @app.get("/v1/fine_tuning/jobs")
    def list_jobs(
        request: Request, caller: Reads, limit: Limit = 20, after: After = None
    ) -> Response:
        """List the project's jobs, newest first; `metadata[key]=value` chooses among them."""
        wished = {
            name[len("metadata[") : -1]: value
            for name, value in request.query_params.items()
            if name.startswith("metadata[") and name.endswith("]")
        }
        rows = service.newest(jobs, caller.project, None if wished else limit, after, SHOWN)
        if wished:
            rows = [
                row
                for row in rows
                if wished.items() <= (row["request"].get("metadata") or {}).items()
            ][: limit + 1]
        return page(rows, limit, job_object)

    @app.get("/v1/fine_tuning/jobs/{job_id}")
    def get_job(job_id: str, caller: Reads) -> dict[str, Any]:
        """Tell how a job stands."""
        return job_object(find_job(service.store, caller.project, job_id))

    @app.post("/v1/fine_tuning/jobs/{job_id}/{verb}")
    def change_job(
        job_id: str, verb: Literal["cancel", "pause", "resume"], caller: Trains
    ) -> dict[str, Any]:
        """Cancel or pause a job after a checkpoint, or let it go on."""
        wanted = "run" if verb == "resume" else verb
        row = want(service.store, caller.project, job_id, wanted)
        service.queue.wake()
        return job_object(row)

    @app.get("/v1/fine_tuning/jobs/{job_id}/events")
    def list_events(
        job_id: str,
        caller: Reads,
        limit: Limit = 20,
        after: After = None,
        stream: bool = False,
        last_event_id: Annotated[str, Header()] = "",
    ) -> Any:
        """List a job's events, newest first; `stream=true` sends them as they come (SSE)."""
        find = partial(find_job, service.store, caller.project, job_id)
        row, run = find(), run_of(job_id)
        if stream:
            return _sse(job_events.followed(service.store, find, run, last_event_id))
        return page(job_events.events_of(row, run, limit, after), limit)

    @app.get("/v1/fine_tuning/jobs/{job_id}/checkpoints")
    def list_checkpoints(
        job_id: str, caller: Reads, limit: Limit = 10, after: After = None
    ) -> Response:
        """List the checkpoints that a job has kept, newest first; each can be asked as a model."""
        found = job_events.checkpoints_of(
            find_job(service.store, caller.project, job_id), run_of(job_id)
        )
        ids = [one["id"] for one in found]
        return page(found[ids.index(after) + 1 if after in ids else 0 :], limit)


# -- models and answers ---------------------------------------------------------------------------


def _add_models(app: FastAPI, service: Service) -> None:
    store = service.store

    @app.get("/v1/models")
    def list_models(caller: Reads) -> Response:
        """List the models that can be trained or asked."""
        return page(service.models(caller.project), 1000)

    @app.post("/v1/fluxtrain/aliases/{name}")
    async def promote(name: str, asked: Promotion, caller: Trains) -> dict[str, Any]:
        """Move an alias to a version, if it passes the gate."""
        return await service.promote(caller.project, name, asked)

    @app.get("/v1/fluxtrain/aliases/{name}")
    def alias_history(name: str, caller: Reads) -> Response:
        """List where an alias has led to, newest first."""
        return page(registry.history(store, caller.project, name), 1000, registry.alias_object)

    @app.get("/v1/fluxtrain/aliases")
    def list_aliases(caller: Reads) -> Response:
        """List the project's aliases."""
        moves = registry.history(store, caller.project)
        newest = {row["name"]: row for row in reversed(moves)}
        rows = [row for row in newest.values() if row["version"] is not None]
        return page(rows, 1000, registry.alias_object)

    @app.delete("/v1/fluxtrain/aliases/{name}")
    def delete_alias(name: str, caller: Trains) -> dict[str, Any]:
        """Let an alias lead nowhere; its history stays."""
        if registry.current(store, caller.project, name) is None:
            raise not_found("alias", name)
        return registry.move(store, caller.project, name, None, {"deleted": True})

    @app.delete("/v1/models/{model_id:path}")
    def delete_model(model_id: str, caller: Trains) -> dict[str, Any]:
        """Delete a version of a model."""
        if model_id in service.settings.models:
            raise Refusal(f"{model_id} is a model of the operator, which no key deletes")
        registry.delete_version(store, caller.project, model_id)
        return {"id": model_id, "object": "model", "deleted": True}

    @app.get("/v1/models/{model_id:path}")
    def get_model(model_id: str, caller: Reads) -> dict[str, Any]:
        """Return the facts of a model."""
        return service.model(caller.project, model_id)


def _add_answers(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions")
    async def chat(asked: ChatRequest, caller: Infers) -> Any:
        """Answer a conversation."""
        return await _answer(service, asked, caller)

    @app.post("/v1/completions")
    async def complete(asked: CompletionRequest, caller: Infers) -> Any:
        """Continue a text."""
        return await _answer(service, asked, caller)

    @app.post("/generate")
    async def generate(asked: GenerateRequest, adapter: str, caller: Infers) -> dict[str, Any]:
        """Answer one user's words with an adapter."""
        question = Ask(
            prompt=asked.prompt, max_new_tokens=asked.max_new_tokens, temperature=asked.temperature
        )
        said = await service.ask(caller.project, adapter, question)
        shown = CompletionRequest(model=adapter, prompt=asked.prompt)
        whole, answered = await OpenAIAnswer(shown).whole(said)
        await service.count(caller.project, adapter, answered)
        return whole


async def _answer(
    service: Service, asked: ChatRequest | CompletionRequest, caller: Caller
) -> dict[str, Any] | StreamingResponse:
    """Answer whole, or as a stream whose first piece says that it can be answered."""
    said = await service.ask(caller.project, asked.model, asked.ask())
    written = OpenAIAnswer(asked)
    if not asked.stream:
        whole, answered = await written.whole(said)
        await service.count(caller.project, asked.model, answered)
        return whole
    begun = await anext(said)
    pieces = written.pieces(_behind(begun, said))

    async def lines() -> AsyncIterator[str]:
        try:
            async for piece in pieces:
                if isinstance(piece, Answered):
                    await service.count(caller.project, asked.model, piece)
                else:
                    yield _line(piece)
        except Refusal as error:  # the status is sent already
            told = without_folders(str(error))
            yield _line({"error": {"message": told, "type": "server_error"}})
            return
        yield "data: [DONE]\n\n"

    return _sse(lines())


async def _behind(first: Said, rest: AsyncIterator[Said]) -> AsyncIterator[Said]:
    yield first
    async for one in rest:
        yield one


# -- what the SDK does not know -------------------------------------------------------------------


def _add_more(app: FastAPI, service: Service) -> None:
    store = service.store

    @app.post("/v1/tunings.create")
    async def create_tuning(asked: TuningRequest, caller: Trains) -> dict[str, Any]:
        """Plan and queue a job, in fewer words."""
        body = asked.job(service.settings)
        return job_object(await service.create_job(caller.project, body, None, False))

    @app.get("/v1/tunings.get")
    def get_tuning(id: str, caller: Reads) -> dict[str, Any]:
        """Tell how a job stands."""
        return job_object(find_job(store, caller.project, id))

    @app.post("/v1/fluxtrain/jobs/{job_id}/{command}")
    def change_run(
        job_id: str,
        command: Literal["apply", "undo", "checkpoint"],
        caller: Trains,
        arguments: dict[str, int | str] | None = None,
    ) -> dict[str, Any]:
        """Change the running training of a job as `fluxtrain apply` and `undo` do."""
        find_job(store, caller.project, job_id)
        answer = send_command(run_of(job_id).socket, command, dict(arguments or {}))
        if not answer.ok:
            raise Refusal(answer.message)
        return {"id": job_id, "message": answer.message}

    @app.get("/v1/fluxtrain/usage")
    def usage(caller: Reads, days: Annotated[float, Query(gt=0, le=3660)] = 30.0) -> dict[str, Any]:
        """Sum tokens and seconds of cards by model; an admin's key sees all projects."""
        project = None if caller.may("admin") else caller.project
        rows = store.usage(project, store.now_s() - days * 86400)
        return {"object": "list", "data": rows}

    @app.get("/metrics", include_in_schema=False)
    def metrics(caller: Annotated[Caller, Depends(allowed("metrics"))]) -> Response:
        """Return the metrics for Prometheus: of all projects to keys of the scopes metrics and
        admin, of the key's own project to others."""
        project = None if caller.scope in ("metrics", "admin") else caller.project
        return Response(service.watched.exposition(project), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    @app.get("/health", include_in_schema=False)
    def health() -> dict[str, Any]:
        return {"status": "ok", "training": bool(service.queue.running)}

    @app.get("/ready", include_in_schema=False)
    def ready() -> JSONResponse:
        is_ready = service.queue.is_alive
        return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)


def _sse(lines: AsyncIterator[str]) -> StreamingResponse:
    return StreamingResponse(
        lines, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
    )


def _line(value: Any) -> str:
    return f"data: {json.dumps(value)}\n\n"
