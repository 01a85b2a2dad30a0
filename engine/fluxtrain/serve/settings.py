"""The settings of the service (`serve.yaml`), which belong to the operator."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from fluxtrain.config.errors import explain
from fluxtrain.config.schema import MethodSettings
from fluxtrain.config.section import Section
from fluxtrain.config.text import parse_yaml, read_text
from fluxtrain.errors import BadInput
from fluxtrain.plan.states import PackedFormat

MIB, GIB = 1 << 20, 1 << 30


class ServedModel(Section):
    """A model that jobs may train and users may ask."""

    path: str = Field(min_length=1, description="a folder, a hub id, or `demo`")
    method: Literal["full", "lora", "qlora"] = Field(
        default="lora", description="how jobs train it; qlora keeps the base packed"
    )
    packing: PackedFormat = Field(
        default=MethodSettings.model_fields["base"].default, description="of qlora's base"
    )
    trust_remote_code: bool = Field(default=False, description="run code that lies with the model")
    tasks: Path | None = Field(
        default=None, description="a folder of lm-eval's tasks, which each job's model is put to"
    )
    settings: dict[str, Any] = Field(
        default={}, description="settings of a run's configuration that its jobs start from"
    )

    @model_validator(mode="after")
    def _the_demo_is_trained_whole(self) -> ServedModel:
        if self.path == "demo" and self.method != "full":
            raise ValueError(
                "the demo's weights are random and made anew for each seed, so that an adapter "
                "has no base: use method: full"
            )
        return self


class Quotas(Section):
    """What one project may use."""

    queued_jobs: int = Field(default=100, ge=1)
    running_jobs: int = Field(default=8, ge=1)
    card_hours: float = Field(default=720.0, gt=0, description="in 30 days")
    file_bytes: int = Field(default=512 * MIB, ge=1, description="of one upload")
    stored_bytes: int = Field(default=16 * GIB, ge=1, description="of all files together")
    tokens_per_minute: int = Field(default=200_000, ge=1, description="of prompts and answers")


class KubernetesSettings(Section):
    """How trainers run as Jobs of a cluster."""

    namespace: str | None = Field(
        default=None, description="of the Jobs; left out: that of the server's pod, or `default`"
    )
    queue: str = Field(default="fluxtrain", description="the LocalQueue of Kueue that admits them")
    image: str = Field(default=f"fluxtrain-serve:{version('fluxtrain')}")
    claim: str = Field(default="fluxtrain", description="of the volume with the service's folder")
    mount: Path = Field(default=Path("/data"), description="where server and trainers have it")
    resources: dict[str, str] = Field(
        default={"cpu": "4", "memory": "32Gi", "nvidia.com/gpu": "1"},
        description="what a trainer asks for and gets",
    )
    machine: Path | None = Field(
        default=None,
        description="what `fluxtrain probe --json` wrote in such a pod, to plan jobs by; left out: "
        "they are planned by the server's own machine",
    )
    pod: dict[str, Any] = Field(
        default={}, description="more of a pod's specification, such as nodeSelector, tolerations"
    )


class ServeSettings(Section):
    """Everything that an operator decides."""

    folder: Path = Field(default=Path("service"), description="database, files and models")
    db: str | None = Field(
        default=None, description="postgresql://..., for several servers; else SQLite in the folder"
    )
    models: dict[str, ServedModel] = Field(
        default={
            "demo": ServedModel(
                path="demo", method="full", settings={"data": {"chat_template": "chatml"}}
            )
        },
        min_length=1,
    )
    cards: tuple[int, ...] = Field(
        default=(), description="GPUs that jobs get, one each; empty: one job at a time, on all"
    )
    backend: Literal["processes", "kubernetes"] = Field(
        default="processes", description="where jobs train: on this machine, or in a cluster"
    )
    kubernetes: KubernetesSettings = Field(default_factory=KubernetesSettings)
    inference: (
        Literal["yield", "beside", "off"] | Annotated[str, Field(pattern=r"^vllm=https?://\S+$")]
    ) = Field(
        default="yield",
        description="yield: the worker leaves while a job trains; vllm=URL: one answers elsewhere",
    )
    slots: int = Field(default=8, ge=1, le=256, description="adapters that answer at once")
    slot_rank: int = Field(default=64, ge=1, description="the largest rank of these")
    retention_days: float | None = Field(
        default=None, gt=0, description="after which files, ended runs and usage are deleted"
    )
    quotas: Quotas = Field(default_factory=Quotas)

    @property
    def vllm_url(self) -> str | None:
        """Return the address of the vLLM that answers, if one does."""
        kind, _, url = self.inference.partition("=")
        return url if kind == "vllm" else None


def with_inference(settings: ServeSettings, inference: str) -> ServeSettings:
    """Return the settings with another `inference`. Raises BadInput for one that is not known."""
    try:
        return ServeSettings.model_validate({**settings.model_dump(), "inference": inference})
    except ValidationError:
        raise BadInput(
            f"--inference is {inference!r}: use yield, beside, off, or vllm=http://HOST:PORT"
        ) from None


def load_settings(path: Path | None) -> ServeSettings:
    """Read `serve.yaml`; without one the demo's model alone is served.

    Raises:
        BadInput: every mistake, with its key and the cure.
    """
    if path is None:
        return ServeSettings()
    raw = parse_yaml(read_text(path), str(path))
    try:
        return ServeSettings.model_validate(raw)
    except ValidationError as error:
        keys = [*ServeSettings.model_fields, *(f"quotas.{name}" for name in Quotas.model_fields)]
        raise BadInput(f"{path}: {explain(error, keys, raw)}") from None
