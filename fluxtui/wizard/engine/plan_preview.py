"""Describes a plan beyond its numbers."""

from __future__ import annotations

from typing import Any, Literal

from fluxtrain.events.answers.plan import PlanAnswer
from fluxtrain.units import count_text
from fluxtui.words import counted

Fit = Literal["fits", "fits with offload", "does not fit"]

AUTO_CHECKPOINTS = 10
CHECKPOINT_PERIOD_S = 600.0


def fit(plan: PlanAnswer) -> Fit:
    """Tell whether it fits, and whether that takes host memory beside the GPU's."""
    if not plan.fits:
        return "does not fit"
    return "fits" if plan.device == "cpu" or plan.layout.offload == "none" else "fits with offload"


def model_line(plan: PlanAnswer) -> str:
    """Describe the model in one line: its name, size, blocks and dtype."""
    model = plan.model
    parameters = f"{count_text(model.parameters)} parameters"
    return " · ".join((model.name, parameters, counted(model.blocks, "block"), model.dtype))


def config_text(plan: PlanAnswer) -> str:
    """Write the settings that are not the defaults as the YAML of a configuration file."""
    import yaml

    sections: dict[str, dict[str, Any]] = {}
    for key, value in plan.changed.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return yaml.safe_dump(sections, sort_keys=False, allow_unicode=True)


def unranked_because(plan: PlanAnswer) -> str:
    """Why there are no ranked plans, where there are none."""
    if plan.predicted is not None and plan.changed.get("placement.offload") == "max":
        return "placement.offload=max takes the least of the GPU, and the dial has no effect"
    return plan.predicted_because


def checkpoints(plan: PlanAnswer) -> int:
    """About how many checkpoints are written: `auto` is ten, or one in ten minutes."""
    every = plan.config["train"]["checkpoint_every"]
    if every == "end":
        return 1
    if isinstance(every, int):
        return -(-plan.steps // every)
    long = 0 if plan.predicted is None else round(plan.predicted.eta_s / CHECKPOINT_PERIOD_S)
    return max(AUTO_CHECKPOINTS, long)
