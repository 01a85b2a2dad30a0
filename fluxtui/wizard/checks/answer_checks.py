"""Checks one answer: the facts found, and why the wizard cannot go on with it.

Pure functions over the answers and the file system; they may take a while on a slow disk, so the
screen calls them in a thread.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fluxtrain.data.shapes.columns import ColumnReading, UnclearColumns
from fluxtrain.errors import BadInput
from fluxtrain.events.run_folder.run_dir import RunDir
from fluxtui.answers.answers import (
    HUB_DATA,
    HUB_SCHEME,
    Answers,
    hub_id_problem,
    is_hub_id,
)
from fluxtui.answers.configuring import answers_from_file, configuration
from fluxtui.answers.questions import ListOption
from fluxtui.answers.rows import StepName
from fluxtui.home import expanded
from fluxtui.wizard.checks.data_facts import Sample, demo_samples, read_data, read_data_file
from fluxtui.wizard.checks.known_runs import RESUMABLE, run_rows
from fluxtui.wizard.checks.model_facts import cached_hub_folder, read_model_folder

_DEMO_MODEL = (
    ("architecture", "Llama, a few million parameters"),
    ("weights", "random, created when the run starts; nothing is downloaded"),
)
_IMAGE_DEMO_MODEL = (
    ("architecture", "FLUX.1 Kontext, 0.6 million parameters; learns from pairs of images"),
    ("weights", "random, but for its VAE, which is trained in a minute when the run starts"),
)
_IMAGE_DEMO_DATA = (("format", "pairs of images, drawn when the run starts"),)
_DEMO_DATA = (
    ("format", "text, one document for each docstring"),
    ("source", "the standard library of this Python, read when the run starts"),
)
_TRUE = ("1", "true", "yes", "on")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """The facts about an answer.

    With an `error` the wizard does not go on; `open` means not answered yet, so no error is shown.
    `readings` are the ways to read the columns of the data, where several are possible.
    """

    facts: tuple[tuple[str, str], ...] = ()
    warnings: tuple[str, ...] = ()
    error: str | None = None
    open: bool = False
    samples: tuple[Sample, ...] = ()
    loaded: Answers | None = None  # what a configuration file says
    readings: tuple[ColumnReading, ...] = ()


def checked(step: StepName, answers: Answers) -> Check:
    """Check this step's answer; files that cannot be read are its error."""
    try:
        return CHECKS[step](answers)
    except OSError as error:
        return Check(error=f"{error.filename} cannot be read: {error.strerror}")


def check_start(answers: Answers) -> Check:
    """Look at the run or the configuration file that the user wants to begin with."""
    if answers.start == "new":
        return Check()
    if answers.start == "file":
        return _check_file(answers)
    path = answers.resume_run if answers.start == "resume" else answers.attach_run
    if not path:
        return Check(error="choose another line: there is nothing to choose from", open=True)
    try:
        run = RunDir(path).summary()
    except OSError as error:
        return Check(error=f"{path} cannot be read: {error.strerror}")
    if answers.start == "resume" and run.state not in RESUMABLE:
        return Check(error=f"{run.run_id} is {run.state}: attach to it instead")
    return Check(facts=run_rows(run))


def check_model(answers: Answers, environment: Mapping[str, str] = os.environ) -> Check:
    """Look at the chosen model without loading it."""
    if answers.model_source == "demo":
        return Check(facts=_DEMO_MODEL)
    if answers.model_source == "images":
        return Check(facts=_IMAGE_DEMO_MODEL)
    if answers.model_source == "recent" and not answers.model_path:
        return Check(error="no model was trained here yet: choose another line", open=True)
    trusted = _said(answers, "model.trust_remote_code").lower() == "true"
    try:
        if answers.model_source == "hub" or is_hub_id(answers.model_path):
            return _check_hub(answers.model_path, trusted, environment)
        facts = read_model_folder(answers.model_path, trusted)
    except BadInput as error:
        return Check(error=str(error), open=not answers.model_path)
    return Check(facts=facts.rows(), warnings=facts.warnings)


_LISTED = "[a.jsonl, {path: b.csv, weight: 2}]"


def check_data(answers: Answers) -> Check:
    """Look at the chosen data: format, size and the first documents. The engine alone reads pairs
    of images, whose pixels need more than the standard library."""
    if answers.of_images:
        return _check_pairs(answers)
    if answers.data_source == "demo":
        return Check(facts=_DEMO_DATA, samples=demo_samples())
    if answers.data_source == "hub" or answers.data_file.startswith(HUB_SCHEME):
        return _check_hub_data(answers.data_file)
    try:
        settings = _data_settings(answers)
        torn = answers.data_file.startswith("[") and answers.data_file == answers.data_sources
        if torn and not Path(answers.data_file).exists():
            return Check(error=f"{answers.data_file} is no list: write {_LISTED}")
        if answers.data_file != answers.data_sources:
            facts = read_data({**settings, "path": answers.data_sources})
        else:
            facts = read_data_file(answers.data_file, settings=settings)
    except UnclearColumns as error:
        return Check(error=str(error), readings=error.readings)
    except BadInput as error:
        return Check(error=str(error), open=not answers.data_file)
    return Check(facts=facts.rows(), samples=facts.samples, warnings=facts.notes)


def _check_pairs(answers: Answers) -> Check:
    if answers.data_source == "demo":
        return Check(facts=_IMAGE_DEMO_DATA)
    if answers.data_source == "hub" or not answers.data_file:
        return Check(error="type the path of pairs.jsonl, a CSV, or a folder of pairs", open=True)
    if not Path(answers.data_file).exists():
        return Check(error=f"{answers.data_file} does not exist")
    return Check()


def _data_settings(answers: Answers) -> Mapping[str, Any]:
    """Return `data` settings that the wizard does not ask: the file's, overridden by `--set`."""
    from fluxtrain.config.text import apply_overrides

    own = [override for override in answers.overrides if override.startswith("data.")]
    settings: Mapping[str, Any] = apply_overrides(configuration(answers), own)
    return settings["data"] or {}


def _said(answers: Answers, key: str) -> str:
    """Return a setting that the wizard does not ask: from `--set`, or a file; else ""."""
    section, _, name = key.partition(".")
    said = str(answers.base.get(section, {}).get(name, ""))
    for override in answers.overrides:
        named, _, value = override.partition("=")
        said = value.strip() if named.strip() == key else said
    return said


def _check_file(answers: Answers) -> Check:
    if not answers.config_path.strip():
        return Check(error="type the path of a configuration file, such as run.yaml", open=True)
    place = Path(expanded(answers.config_path))
    if place.exists() and not place.is_file():
        return Check(error=f"{place} is no file: name one such as run.yaml")
    try:
        loaded = answers_from_file(answers.config_path, answers.overrides)
    except BadInput as error:
        return Check(error=str(error))
    facts = (("model", loaded.model_path), ("data", loaded.data_file))
    return Check(facts=facts, loaded=loaded)


def _check_hub_data(address: str) -> Check:
    """Check only the spelling: the engine fetches the data when it reads the first documents."""
    if not address.startswith(HUB_DATA):
        written = f"{HUB_DATA}owner/name or {HUB_DATA}owner/name/file.jsonl"
        return Check(error=f"{address} is not {written}")
    name = address.removeprefix(HUB_DATA).partition("?")[0]
    owner, _, rest = name.partition("/")
    problem = hub_id_problem("/".join((owner, rest.partition("/")[0])) if name else "")
    if problem:
        return Check(error=problem.replace("Qwen/Qwen2.5-0.5B", "HuggingFaceH4/no_robots"),
                     open=not name)  # fmt: skip
    return Check(facts=(("place", "the hub: a single file is fetched once, a data set streamed"),))


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
    return Check(
        warnings=(f"{hub_id} is not on this machine: the next page downloads it, or says why not",)
    )


def reading_options(check: Check | None) -> tuple[ListOption, ...]:
    """Offer the ways to read the columns, by their number."""
    return tuple(
        ListOption(
            str(number),
            reading.because.replace(" is taken as the ", ": "),
            f"without {', '.join(reading.ignore)}" if reading.ignore else "",
        )
        for number, reading in enumerate(check.readings if check else ())
    )


def reading_settings(reading: ColumnReading) -> dict[str, Any]:
    """Return the settings that choose a reading."""
    return {
        "data.columns": dict(reading.columns) or None,
        "data.ignore": list(reading.ignore) or None,
    }


CHECKS: Mapping[StepName, Callable[[Answers], Check]] = {
    "start": check_start,
    "model": check_model,
    "data": check_data,
}
