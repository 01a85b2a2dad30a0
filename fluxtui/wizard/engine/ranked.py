"""The dial's stops as settings of the trainer."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fluxtrain.errors import BadInput
from fluxtrain.events.answers.asking import ask_engine
from fluxtrain.events.answers.plan import PlanAnswer, PlanOption
from fluxtui.answers.answers import Answers
from fluxtui.answers.configuring import AGGRESSIVENESS, yaml_text
from fluxtui.answers.launching import engine_arguments
from fluxtui.wizard.engine.plan_preview import unranked_because


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
