"""Describes a plan beyond its numbers."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from fluxtrain.errors import BadInput
from fluxtrain.events.answers.asking import ask_engine
from fluxtrain.events.answers.plan import PlanAnswer, PlanOption
from fluxtrain.units import count_text
from fluxtui.answers.answers import Answers
from fluxtui.answers.configuring import AGGRESSIVENESS, yaml_text
from fluxtui.answers.launching import engine_arguments
from fluxtui.words import counted

Fit = Literal["fits", "fits with offload", "does not fit"]

AUTO_CHECKPOINTS = 10
CHECKPOINT_PERIOD_S = 600.0


def fit(plan: PlanAnswer) -> Fit:
    """Return whether the plan fits, and whether it takes host memory besides the GPU's."""
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
    """Return why no plans are ranked; "" where some are."""
    if plan.predicted is not None and plan.changed.get("placement.offload") == "max":
        return "placement.offload=max takes the least of the GPU, and the dial has no effect"
    return plan.predicted_because


def checkpoints(plan: PlanAnswer) -> int:
    """Return about how many checkpoints are written: `auto` is ten, or one in ten minutes."""
    every = plan.config["train"]["checkpoint_every"]
    if every == "end":
        return 1
    if isinstance(every, int):
        return -(-plan.steps // every)
    long = 0 if plan.predicted is None else round(plan.predicted.eta_s / CHECKPOINT_PERIOD_S)
    return max(AUTO_CHECKPOINTS, long)


def dial_settings(cards: Sequence[PlanOption], dial: str) -> dict[str, Any]:
    """Return the settings of the ranked plan of this name; none for `auto`.

    The trainer's own dial decides about the offload itself; without a GPU there is none.
    """
    for card in cards:
        if card.name == dial:
            own = AGGRESSIVENESS in card.settings
            return {**({} if own else {"placement.offload": card.layout.offload}), **card.settings}
    return {}


def with_settings_of_the_dial(answers: Answers, program: tuple[str, ...] = ()) -> Answers:
    """Add the settings of the chosen dial to the answers, for which the engine is asked.

    Raises:
        EngineRefused: there is no plan.
        BadInput: there are no ranked plans, such as where this machine's rates are not known.
    """
    if answers.dial == "auto" or answers.dial_settings:
        return answers
    with tempfile.TemporaryDirectory(prefix="fluxtrain-wizard-") as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(yaml_text(answers), encoding="utf-8")
        arguments = engine_arguments(answers, config)
        plan = asyncio.run(ask_engine(PlanAnswer, *arguments, program=program))
    settings = dial_settings(plan.plans, answers.dial)
    if not settings:
        raise BadInput(
            f"--aggressiveness {answers.dial} cannot be planned: {unranked_because(plan)}"
        )
    return dataclasses.replace(answers, dial_settings=settings)
