"""The engine's plan as the wizard shows it, read from `fluxtrain plan --json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fluxtrain.telemetry.choices import setting_name
from fluxtrain.units import count_text
from fluxtui.words import counted

Fit = Literal["fits", "fits with offload", "does not fit"]

AUTO_CHECKPOINTS = 10
CHECKPOINT_PERIOD_S = 600.0
_DEFAULT_REASON = "the default"


@dataclasses.dataclass(frozen=True)
class ReasonedChoice:
    """One choice of the plan and why it was made."""

    name: str
    value: str
    because: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Predicted:
    """How long a step takes, and why."""

    step_s: float
    tokens_per_s: float
    eta_s: float
    binds: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankedPlan:
    """One of the plans between as fast as possible and as small as possible."""

    name: str
    offload: str
    batch_rows: int
    chunk_rows: int
    device_bytes: int | None
    host_bytes: int | None
    predicted: Predicted
    settings: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanPreview:
    """What the run will do and need. `None` means that the engine did not say.

    `changed` holds the settings that differ from the defaults, by their dotted keys.
    """

    model: str
    device: str
    offload: str
    steps: int | None
    device_bytes: int | None
    device_budget_bytes: int | None
    host_bytes: int | None
    host_limit_bytes: int | None
    choices: tuple[ReasonedChoice, ...]
    changed: Mapping[str, Any]
    batch_rows: int | None = None
    chunk_rows: int | None = None
    disk_bytes: int | None = None
    checkpoint_bytes: int | None = None
    checkpoint_every: int | str = "auto"
    predicted: Predicted | None = None
    predicted_because: str = ""
    ranked: tuple[RankedPlan, ...] = ()

    @property
    def config_text(self) -> str:
        """The settings that are not the defaults, as the YAML of a configuration file."""
        import yaml

        sections: dict[str, dict[str, Any]] = {}
        for key, value in self.changed.items():
            section, _, name = key.partition(".")
            sections.setdefault(section, {})[name] = value
        return yaml.safe_dump(sections, sort_keys=False, allow_unicode=True)

    @property
    def fits(self) -> bool:
        """No predicted peak is over its limit, as far as both are known."""
        return not (
            _over(self.device_bytes, self.device_budget_bytes)
            or _over(self.host_bytes, self.host_limit_bytes)
        )

    @property
    def unranked_because(self) -> str:
        """Why there are no ranked plans, where there are none."""
        if self.predicted is not None and self.changed.get("placement.offload") == "max":
            return "placement.offload=max takes the least of the GPU, and the dial has no effect"
        return self.predicted_because

    @property
    def checkpoints(self) -> int | None:
        """About how many checkpoints are written: `auto` is ten, or one in ten minutes."""
        if self.checkpoint_every == "end":
            return 1
        if isinstance(self.checkpoint_every, int):
            return None if self.steps is None else -(-self.steps // self.checkpoint_every)
        long = 0 if self.predicted is None else round(self.predicted.eta_s / CHECKPOINT_PERIOD_S)
        return max(AUTO_CHECKPOINTS, long)

    @property
    def fit(self) -> Fit:
        """Whether it fits, and whether that takes host memory beside the GPU's."""
        if not self.fits:
            return "does not fit"
        return "fits" if self.device == "cpu" or self.offload == "none" else "fits with offload"


def read_plan(answer: Mapping[str, Any]) -> PlanPreview:
    """Read the engine's answer; what is missing becomes None, never an invented number."""
    choices = tuple(
        ReasonedChoice(
            setting_name(str(item.get("name", ""))),
            str(item.get("value", "")),
            str(item.get("because", "")) or _DEFAULT_REASON,
        )
        for item in answer.get("choices") or ()
    )
    return PlanPreview(
        model=_model_line(answer.get("model")),
        device=str(answer.get("device") or ""),
        offload=str(answer.get("offload") or ""),
        steps=_number(answer, "steps"),
        device_bytes=_number(answer, "device_bytes"),
        device_budget_bytes=_number(answer, "device_budget_bytes"),
        host_bytes=_number(answer, "host_bytes"),
        host_limit_bytes=_number(answer, "host_limit_bytes"),
        choices=choices,
        changed=_changed(answer.get("settings") or ()),
        batch_rows=_number(answer, "batch_rows"),
        chunk_rows=_number(answer, "chunk_rows"),
        disk_bytes=_number(answer, "disk_bytes"),
        checkpoint_bytes=_number(answer, "checkpoint_bytes"),
        checkpoint_every=_train_setting(answer, "checkpoint_every", "auto"),
        predicted=_predicted(answer["predicted"]) if answer.get("predicted") else None,
        predicted_because=str(answer.get("predicted_because") or ""),
        ranked=tuple(_ranked(plan) for plan in answer.get("plans") or ()),
    )


def _predicted(told: Mapping[str, Any]) -> Predicted:
    return Predicted(
        step_s=told["seconds_per_step"],
        tokens_per_s=told["tokens_per_s"],
        eta_s=told["eta_s"],
        binds=str(told.get("binds", "")),
    )


def _ranked(plan: Mapping[str, Any]) -> RankedPlan:
    return RankedPlan(
        name=plan["name"],
        offload=str(plan.get("offload", "")),
        batch_rows=plan["batch_rows"],
        chunk_rows=plan["chunk_rows"],
        device_bytes=_number(plan, "device_bytes"),
        host_bytes=_number(plan, "host_bytes"),
        predicted=_predicted(plan),
        settings=dict(plan["settings"]),
    )


def _model_line(model: Any) -> str:
    if not isinstance(model, Mapping):
        return str(model or "")
    parameters = model.get("parameters")
    parts = [
        str(model.get("name") or ""),
        f"{count_text(parameters)} parameters" if parameters else "",
        counted(model["blocks"], "block") if model.get("blocks") else "",
        str(model.get("dtype") or "").replace("torch.", ""),
    ]
    return " · ".join(part for part in parts if part)


def _changed(settings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What differs from the defaults; model and data are always told."""
    always = ("model.path", "data.path")
    return {
        item["key"]: item["value"] for item in settings if item["changed"] or item["key"] in always
    }


def _train_setting(answer: Mapping[str, Any], name: str, default: str) -> int | str:
    train = (answer.get("config") or {}).get("train") or {}
    value = train.get(name)
    return value if isinstance(value, int | str) else default


def _number(answer: Mapping[str, Any], name: str) -> int | None:
    value = answer.get(name)
    return int(value) if isinstance(value, int | float) else None


def _over(used: int | None, limit: int | None) -> bool:
    return used is not None and limit is not None and used > limit
