"""The check of one answer: what was found, and why the wizard cannot go on with it.

Pure functions over the answers and the file system; they may take a while on a slow disk, so the
screen calls them in a thread.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from fluxtrain.errors import BadInput
from fluxtui.wizard.answers import Answers, hub_id_problem
from fluxtui.wizard.data_facts import Sample, demo_samples, read_data_file
from fluxtui.wizard.model_facts import cached_hub_folder, read_model_folder

_DEMO_MODEL = (
    ("architecture", "Llama, a few million parameters"),
    ("weights", "random; made when the run starts, nothing is downloaded"),
)
_DEMO_DATA = (
    ("format", "text, one document for each docstring"),
    ("source", "the standard library of this Python, read when the run starts"),
)
_TRUE = ("1", "true", "yes", "on")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """What is known about an answer. With an `error` the wizard stays where it is; nothing was
    given yet when it is `open`, so there is nothing to blame."""

    facts: tuple[tuple[str, str], ...] = ()
    warnings: tuple[str, ...] = ()
    error: str | None = None
    open: bool = False
    samples: tuple[Sample, ...] = ()


def check_model(answers: Answers, environment: Mapping[str, str] = os.environ) -> Check:
    """Look at the chosen model without loading it."""
    if answers.model_source == "demo":
        return Check(facts=_DEMO_MODEL)
    trusted = answers.base.get("model", {}).get("trust_remote_code") is True
    try:
        if answers.model_source == "hub":
            return _check_hub(answers.model_path, trusted, environment)
        facts = read_model_folder(answers.model_path, trusted)
    except BadInput as error:
        return Check(error=str(error), open=not answers.model_path)
    return Check(facts=facts.rows(), warnings=facts.warnings)


def check_data(answers: Answers) -> Check:
    """Look at the chosen data: format, size and the first documents."""
    if answers.data_source == "demo":
        return Check(facts=_DEMO_DATA, samples=demo_samples())
    try:
        facts = read_data_file(answers.data_file)
    except BadInput as error:
        return Check(error=str(error), open=not answers.data_file)
    return Check(facts=facts.rows(), samples=facts.samples)


def _check_hub(hub_id: str, trusted: bool, environment: Mapping[str, str]) -> Check:
    problem = hub_id_problem(hub_id)
    if problem:
        return Check(error=problem, open=not hub_id)
    folder = cached_hub_folder(hub_id, environment)
    if folder is not None:
        facts = read_model_folder(str(folder), trusted)
        return Check(
            facts=(*facts.rows(), ("place", "already on this machine")), warnings=facts.warnings
        )
    if environment.get("HF_HUB_OFFLINE", "").lower() in _TRUE:
        return Check(
            error=f"{hub_id} is not on this machine and HF_HUB_OFFLINE is set: unset it, or "
            "choose a folder"
        )
    return Check(facts=(("place", "not on this machine yet: downloaded before it is planned"),))
