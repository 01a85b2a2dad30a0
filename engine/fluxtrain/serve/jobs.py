"""Fine-tuning jobs: a request becomes a run's configuration, and a run what the API says."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import sqlalchemy as sa
from pydantic import Field, ValidationInfo, field_validator

from fluxtrain.config.schema import RunConfig, validate
from fluxtrain.errors import BadInput, brief
from fluxtrain.events.answers.plan import PlanAnswer
from fluxtrain.events.journal import read_end
from fluxtrain.events.run_folder.run_dir import RunDir, RunSummary, runs_root
from fluxtrain.serve.refusal import Body, Refusal, not_found
from fluxtrain.serve.settings import ServedModel, ServeSettings
from fluxtrain.serve.store import Store, jobs
from fluxtrain.serve.uploads import content_of, find_file

REPEAT_S = 600.0  # a repeated request within this time is the same one
Auto = Literal["auto"]
# What a job may not set: paths and names, which are the operator's, and what the queue decides.
_CLOSED_SECTIONS = ("model", "trackers", "parallel", "fsdp", "trainer", "comm")
_CLOSED = (
    "data.path",
    "data.held_out_path",
    "data.token_cache",
    "method.name",
    "method.base",
    "placement.device",
    "placement.disk",
    "placement.disk_path",
    "placement.host_gib",
    "image.cache",
)
_KEYS = {  # of OpenAI's hyperparameters
    "n_epochs": "train.epochs",
    "batch_size": "train.batch_rows",
    "learning_rate_multiplier": "train.learning_rate",
}
_RANGES: dict[str, tuple[float, int, str]] = {
    "n_epochs": (1, 1000, "passes over the file"),
    "batch_size": (1, 65_536, "rows of one step"),
    "learning_rate_multiplier": (1e-6, 1000, "times the usual learning rate"),
}
MOST_STEPS = 10_000_000  # of a job: weeks of steps that take a tenth of a second
SHOWN = [  # what `job_object` needs of a row; to decode the rest takes a list half as long again
    jobs.c[name]
    for name in (
        *("id", "created_s", "project", "request", "config", "plan"),
        *("outcome", "wanted", "card"),
    )
]
_TEMPLATE_NAME = re.compile(r"[a-z0-9][a-z0-9.-]*(?<!\.jinja)")


class Hyperparameters(Body):
    """OpenAI's three, within ranges beyond which a job is a mistake."""

    n_epochs: Auto | int = "auto"
    batch_size: Auto | int = "auto"
    learning_rate_multiplier: Auto | float = "auto"

    @field_validator("*", mode="before")
    @classmethod
    def _within_range(cls, value: Any, info: ValidationInfo) -> Any:
        least, most, what = _RANGES[str(info.field_name)]
        kinds = int if isinstance(least, int) else (int, float)
        is_number = isinstance(value, kinds) and not isinstance(value, bool)
        if value == "auto" or (is_number and least <= value <= most):
            return value
        kind = "whole number" if kinds is int else "number"
        raise ValueError(
            f"must be 'auto' or a {kind} from {least} to {most:,} ({what}), not "
            f"{brief(json.dumps(value), 40)}"
        )


class Supervised(Body):
    """Settings of the supervised method."""

    hyperparameters: Hyperparameters = Field(default_factory=Hyperparameters)


class JobMethod(Body):
    """OpenAI's name of a training method."""

    type: str = "supervised"
    supervised: Supervised = Field(default_factory=Supervised)
    dpo: Any = None
    reinforcement: Any = None


class JobRequest(Body):
    """The body of `POST /v1/fine_tuning/jobs`."""

    model: str
    training_file: str
    validation_file: str | None = None
    suffix: str | None = Field(default=None, max_length=64)
    seed: int | None = Field(default=None, ge=0, le=2**31 - 1)
    hyperparameters: Hyperparameters = Field(default_factory=Hyperparameters)
    method: JobMethod | None = None
    integrations: list[Any] | None = None
    metadata: dict[str, str] | None = None
    fluxtrain: dict[str, Any] = Field(default_factory=dict)

    @property
    def asked(self) -> Hyperparameters:
        """Return the hyperparameters of both of their places; those within the method count."""
        if self.method is None:
            return self.hyperparameters
        within = self.method.supervised.hyperparameters.model_dump(exclude_unset=True)
        return self.hyperparameters.model_copy(update=within)

    def check(self) -> None:
        """Raise Refusal for fields that this service does not support."""
        kind = "supervised" if self.method is None else self.method.type
        if kind != "supervised":
            raise Refusal(
                f"method.type is {kind!r}: this server trains with `supervised` only",
                param="method",
            )
        if self.integrations:
            raise Refusal("integrations are the operator's: leave them out", param="integrations")


class TuningRequest(Body):
    """The body of `POST /v1/tunings.create`."""

    model: str
    file: str
    method: str | None = None
    rank: int | None = Field(default=None, ge=1)
    steps: int | None = Field(default=None, ge=1)

    def job(self, settings: ServeSettings) -> JobRequest:
        """Return the same as OpenAI's request. Raises Refusal for another method than is served."""
        served = settings.models.get(self.model)
        if served is not None and self.method not in (None, served.method):
            raise Refusal(f"{self.model} is trained with {served.method} here", param="method")
        chosen = {"method": {"rank": self.rank}, "train": {"steps": self.steps}}
        given = {
            section: values for section, values in chosen.items() if None not in values.values()
        }
        return JobRequest(model=self.model, training_file=self.file, fluxtrain=given)


def config_of(
    store: Store, settings: ServeSettings, project: str, asked: JobRequest
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the configuration of a job's run, and the blobs of its data.

    Raises Refusal, which names the key, for settings that a job may not make or a run cannot use.
    """
    asked.check()
    served = settings.models.get(asked.model)
    if served is None:
        names = ", ".join(settings.models)
        raise Refusal(
            f"no model {asked.model!r} can be trained here: use one of {names}",
            status=404,
            code="model_not_found",
            param="model",
        )
    _refuse_closed(asked.fluxtrain)
    raw = _merged(served.settings, asked.fluxtrain)
    raw["model"] = {
        **raw.get("model", {}),
        "path": served.path,
        "trust_remote_code": served.trust_remote_code,
    }
    raw["method"] = {**raw.get("method", {}), **_method(served)}
    raw["parallel"] = {"mode": "layers", **raw.get("parallel", {})}  # a job is one process
    data, train = raw.setdefault("data", {}), raw.setdefault("train", {})
    blobs = {"training": find_file(store, project, asked.training_file)}
    if asked.validation_file is not None:
        blobs["validation"] = find_file(store, project, asked.validation_file)
    for kind, row in blobs.items():
        key = "path" if kind == "training" else "held_out_path"
        data[key] = str(content_of(store, row))
    wished = asked.asked
    for name in ("n_epochs", "batch_size"):
        if (value := getattr(wished, name)) != "auto":
            train[_KEYS[name].removeprefix("train.")] = value
    if asked.seed is not None:
        train["seed"] = data["seed"] = asked.seed
    rank = raw["method"].get("rank", 0)
    if served.method != "full" and isinstance(rank, int) and rank > settings.slot_rank:
        raise Refusal(
            f"method.rank is {rank}, and this server answers with adapters of rank "
            f"{settings.slot_rank} at most: use that or less",
            param="method.rank",
        )
    config = _validated(raw, asked).model_dump(mode="json", exclude_defaults=True)
    return config, {kind: row["blob"] for kind, row in blobs.items()}


def with_rate(config: dict[str, Any], asked: JobRequest, plan: PlanAnswer | None) -> dict[str, Any]:
    """Return the configuration with its learning rate, set or usual, times the multiplier.

    Raises Refusal where the usual rate is not known, as there is no plan.
    """
    times = asked.asked.learning_rate_multiplier
    if times == "auto":
        return config
    planned = {one.name: one.value for one in plan.choices} if plan is not None else {}
    usual = config.get("train", {}).get("learning_rate", planned.get("train.learning_rate"))
    if usual is None:
        raise Refusal(
            "the usual learning rate is planned, and a job has the memory now: set "
            "train.learning_rate, or ask again when it has ended",
            status=503,
            retry_after_s=60.0,
        )
    changed = _merged(config, {"train": {"learning_rate": float(usual) * times}})
    return _validated(changed, asked).model_dump(mode="json", exclude_defaults=True)


def _validated(raw: dict[str, Any], asked: JobRequest) -> RunConfig:
    """Return the configuration of a run. Raises Refusal."""
    try:
        return validate(raw, "fluxtrain")
    except BadInput as error:
        raise refused_by(str(error), asked, param="fluxtrain") from error


def refused_by(told: str, asked: JobRequest, **more: Any) -> Refusal:
    """Return the refusal of a job by its configuration or plan, with the name that the request has
    for a setting."""
    for name, key in _KEYS.items():
        if f" {key}" in told and getattr(asked.asked, name) != "auto":
            named = f"hyperparameters.{name}"
            told = told.removeprefix("fluxtrain: ").replace(key, named)
            return Refusal(told, **{**more, "param": named})
    return Refusal(told, **more)


def refuse_endless(plan: PlanAnswer | None, asked: JobRequest) -> None:
    """Raise Refusal for a plan of more steps than anybody means."""
    if plan is not None and plan.steps > MOST_STEPS:
        raise refused_by(
            f"the job would make {plan.steps:,} steps, and {MOST_STEPS:,} are the most: lower "
            "train.steps or train.epochs",
            asked,
            code="plan_refused",
        )


def _method(served: ServedModel) -> dict[str, Any]:
    packed = {"base": served.packing} if served.method == "qlora" else {}
    return {"name": served.method, **packed}


def _refuse_closed(given: Mapping[str, Any]) -> None:
    for section, values in given.items():
        keys = [f"{section}.{name}" for name in values] if isinstance(values, dict) else []
        closed = [key for key in keys if section in _CLOSED_SECTIONS or key in _CLOSED]
        if section in _CLOSED_SECTIONS or closed:
            named = (closed or [section])[0]
            raise Refusal(f"{named} is the operator's and no job's: leave it out", param=named)
    data, samples = given.get("data"), given.get("samples")
    template = data.get("chat_template") if isinstance(data, dict) else None
    if template is not None and not _TEMPLATE_NAME.fullmatch(str(template)):
        raise Refusal(
            "data.chat_template takes a name here, not a file", param="data.chat_template"
        )
    if isinstance(samples, dict) and isinstance(samples.get("prompts"), str):
        raise Refusal("samples.prompts takes a list here, not a file", param="samples.prompts")


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return mappings of settings as one; the second's values count."""
    result = deepcopy(dict(first))
    for name, value in second.items():
        both = isinstance(value, Mapping) and isinstance(result.get(name), Mapping)
        result[name] = _merged(result[name], value) if both else deepcopy(value)
    return result


# -- what was asked -------------------------------------------------------------------------------


def digest_of(project: str, body: JobRequest) -> str:
    """Return a hash that is equal for equal requests of a project."""
    text = json.dumps([project, body.model_dump(mode="json")], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Sending:
    """What tells whether a request was sent before."""

    digest: str  # of its body and project
    key: str | None  # its Idempotency-Key
    is_retry: bool  # by the SDK's own count


def repeated(store: Store, project: str, sent: Sending) -> Any:
    """Return the job that an earlier copy of a request made; None where there is none.

    Raises Refusal (422) where the same Idempotency-Key came with another request.
    """
    digest, key = sent.digest, sent.key
    if key is not None:
        found = store.one(
            sa.select(jobs).where(jobs.c.project == project, jobs.c.repeat_key == key)
        )
        if found is not None and found["digest"] != digest:
            raise Refusal(
                "this Idempotency-Key came with another request before: use a new one", status=422
            )
        return found
    if not sent.is_retry:
        return None
    recent = (jobs.c.digest == digest, jobs.c.created_s > store.now_s() - REPEAT_S)
    return store.one(sa.select(jobs).where(*recent).order_by(jobs.c.number.desc()))


def add_job(
    store: Store, most: int, asked: JobRequest, sent: Sending, values: Mapping[str, Any]
) -> dict[str, Any]:
    """Queue a job, `values` of whose row are given; it is on the disk when this returns.

    Where another server queued a copy of the request meanwhile, its job is returned. Raises Refusal
    where the project has `most` jobs that have not ended.
    """
    project, count = values["project"], sa.func.count()
    with store.write() as connection:
        if (found := repeated(store, project, sent)) is not None:
            return dict(found)
        mine = sa.select(count).where(jobs.c.project == project, jobs.c.outcome.is_(None))
        if (waiting := connection.execute(mine).scalar_one()) >= most:
            raise Refusal(
                f"the project has {waiting} jobs that have not ended, the most it may: wait for "
                "one, or cancel one",
                status=429,
                code="quota_exceeded",
                retry_after_s=60.0,
            )
        newest = connection.execute(sa.select(sa.func.max(jobs.c.number))).scalar_one()
        row = {
            **values,
            "number": (newest or 0) + 1,
            "created_s": store.now_s(),
            "request": asked.model_dump(mode="json", exclude={"fluxtrain", "method"})
            | {"hyperparameters": asked.asked.model_dump()},
            "digest": sent.digest,
            "repeat_key": sent.key,
        }
        connection.execute(sa.insert(jobs), row)
    return find_job(store, project, values["id"])


def find_job(store: Store, project: str, job_id: str) -> dict[str, Any]:
    """Return the row of a project's job. Raises Refusal (404)."""
    row = store.one(sa.select(jobs).where(jobs.c.id == job_id, jobs.c.project == project))
    if row is None:
        raise not_found("job", job_id)
    return row


def want(store: Store, project: str, job_id: str, wanted: str) -> dict[str, Any]:
    """Ask for a job to run, pause or be cancelled. Raises Refusal for one that has ended."""
    row = find_job(store, project, job_id)
    ended = row["outcome"]
    if ended is not None or row["wanted"] == "cancel":
        how = ended["status"] if ended is not None else "cancelled"
        if wanted == "cancel" and how == "cancelled":
            return row
        raise Refusal(f"{job_id} has {how} already", code="job_ended")
    with store.write() as connection:
        change = sa.update(jobs).where(jobs.c.id == job_id, jobs.c.outcome.is_(None))
        connection.execute(change.values(wanted=wanted, not_before_s=0.0))
    return find_job(store, project, job_id)


# -- what happened --------------------------------------------------------------------------------


def run_of(job_id: str) -> RunDir:
    """Return the run directory of a job."""
    return RunDir(runs_root() / job_id)


def state_of(row: Mapping[str, Any], run: RunSummary | None) -> str:
    """Return the word for a job's state: of the API's six, or paused."""
    if row["outcome"] is not None:
        return str(row["outcome"]["status"])
    if row["wanted"] == "cancel":
        return "cancelled"
    if run is not None and run.state == "running":
        return "running"
    return "paused" if row["wanted"] == "pause" else "queued"


def summary_of(run: RunDir) -> RunSummary | None:
    """Return the facts of a run's files; None where it has not begun."""
    try:
        return run.summary() if run.holds_run() else None
    except OSError:
        return None


def job_object(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a job as the API shows it."""
    outcome = row["outcome"]
    run = None if outcome is not None else summary_of(run_of(row["id"]))
    state = state_of(row, run)
    asked = row["request"]  # as it was dumped; to check it again would take longer than all else
    hyper = asked["hyperparameters"]
    status = "queued" if state == "paused" else state
    failed = outcome if outcome is not None and status == "failed" else None
    eta = run.eta_s if run is not None and status == "running" else None
    ended = outcome or {}
    return {
        "id": row["id"],
        "object": "fine_tuning.job",
        "created_at": int(row["created_s"]),
        "error": failed
        and {"code": str(failed["code"]), "message": failed["message"], "param": None},
        "fine_tuned_model": ended.get("version"),
        "finished_at": int(ended["at_s"]) if ended else None,
        "hyperparameters": hyper,
        "model": asked["model"],
        "organization_id": row["project"],
        "result_files": [],
        "seed": asked["seed"] or 0,
        "status": status,
        "trained_tokens": ended.get("trained_tokens"),
        "training_file": asked["training_file"],
        "validation_file": asked["validation_file"],
        "estimated_finish": None if eta is None or run is None else int(run.stepped_s + eta),
        "integrations": [],
        "metadata": asked["metadata"],
        "method": {"type": "supervised", "supervised": {"hyperparameters": hyper}},
        "user_provided_suffix": asked["suffix"],
        "fluxtrain": {
            "state": state,
            "step": ended.get("step") if run is None else run.step,
            "total_steps": ended.get("total_steps") if run is None else run.total_steps,
            "loss": ended.get("loss") if run is None else run.loss,
            "evaluation_loss": ended.get("evaluation_loss"),
            "card": row["card"] if row["card"] != -1 else None,
            "plan": row["plan"],
            "measured": ended.get("measured"),
            "config": {key: one for key, one in row["config"].items() if key != "model"}
            | {"data": {k: v for k, v in row["config"].get("data", {}).items() if "path" not in k}},
        },
    }


def trained_tokens(run: RunDir) -> int | None:
    """Return the tokens that a run has trained on, by its journal's end."""
    step = read_end(run.journal).step
    return None if step is None else step.total_tokens


def config_path(store: Store, job_id: str, reader: str) -> Path:
    """Return where a job's configuration is written for the planner or one server's trainer."""
    return store.configs / f"{job_id}-{reader}.yaml"


def remove_configs(store: Store, job_id: str) -> None:
    """Remove what was written for trainers of a job."""
    for path in store.configs.glob(f"{job_id}*.yaml"):
        path.unlink(missing_ok=True)
