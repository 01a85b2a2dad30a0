"""The user's answers so far, as one value.

Pure values and functions: no Textual, no torch, and no file is read here.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Mapping
from typing import Any, Literal, get_args

from fluxtrain.models.model_files import IMAGE_DEMO, is_pipeline
from fluxtui.answers.rows import BY_KEY, METHODS, RUN_FOLDER, StepName
from fluxtui.home import expanded

StartSource = Literal["new", "resume", "attach", "file"]
ModelSource = Literal["demo", "images", "recent", "folder", "hub"]
DataSource = Literal["demo", "path", "hub"]
Dial = Literal["auto", "fast", "balanced", "fit"]

STEPS: tuple[StepName, ...] = get_args(StepName)
DIAL: tuple[Dial, ...] = get_args(Dial)
DEMO = "demo"
HUB_DATA = "hf://datasets/"
HUB_SCHEME = "hf:"  # what begins so is no file
OF_COLUMNS = {"data.columns": None, "data.ignore": None}  # as they are unset
_DATA = ("data_source", "data_path", "data_hub")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answers:
    """Every answer of the wizard. The defaults are the demo, so accepting them all starts it.

    Attributes:
        resume_run, attach_run, config_path, model_recent, model_folder, model_hub, data_path,
            data_hub: kept when another source is chosen, so that nothing typed is lost.
        data_path: a file, a folder or a pattern; or a list of sources, written as in YAML.
        loaded_from: the configuration file that the answers were read from.
        settings: what differs from the defaults, by the keys of `rows.ROWS`.
        dial, dial_settings: the chosen one of the ranked plans, and the settings it consists of.
        base: keys of a configuration file that the wizard does not ask, carried through unchanged.
        overrides: `key=value` settings from the command line, handed to the trainer as they are.
        step: where the user is.
    """

    start: StartSource = "new"
    resume_run: str = ""
    attach_run: str = ""
    config_path: str = ""
    loaded_from: str = ""
    model_source: ModelSource = "demo"
    model_recent: str = ""
    model_folder: str = ""
    model_hub: str = ""
    data_source: DataSource = "demo"
    data_path: str = ""
    data_hub: str = ""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    dial: Dial = "auto"
    dial_settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    base: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    step: StepName = "start"

    @property
    def method(self) -> str:
        """Return the chosen method."""
        return str(self.settings.get("method.name", self.usual_method))

    @property
    def usual_method(self) -> str:
        """Return the method where none was chosen: adapters for the folder of an image pipeline."""
        return "lora" if self.of_images and self.model_source != "images" else METHODS[0]

    @functools.cached_property
    def of_images(self) -> bool:
        """Return whether the model makes images, and so learns from pairs of them."""
        return bool(self.model_path) and is_pipeline(self.model_path)

    @property
    def run_folder(self) -> str:
        """Return the run's folder; "" for a new folder below the runs."""
        return str(self.settings.get(RUN_FOLDER, "")).strip()

    @property
    def model_path(self) -> str:
        """Return the value of `model.path` in the configuration."""
        if self.model_source in ("demo", "images"):
            return DEMO if self.model_source == "demo" else IMAGE_DEMO
        if self.model_source == "recent":
            return self.model_recent
        hub = self.model_source == "hub"
        return self.model_hub.strip() if hub else expanded(self.model_folder)

    @property
    def data_sources(self) -> str | list[Any]:
        """Return the value of `data.path` in the configuration."""
        return listed_sources(self.data_file) or self.data_file

    @property
    def data_file(self) -> str:
        """Return the data as one text, as the user typed it."""
        if self.data_source == "hub":
            return HUB_DATA + self.data_hub.strip().removeprefix(HUB_DATA)
        if self.data_source == "demo":
            return IMAGE_DEMO if self.of_images else DEMO
        path = self.data_path.strip()
        return path if path.startswith((HUB_SCHEME, "[")) else expanded(path)

    @property
    def is_demo(self) -> bool:
        """Return whether model and data are the demo's, and no file says otherwise."""
        from_file = self.base or self.loaded_from
        made = self.model_source in ("demo", "images") and self.data_source == "demo"
        return made and not from_file


def with_settings(answers: Answers, changes: Mapping[str, Any]) -> Answers:
    """Set settings; None unsets one, and a setting that another one replaces is unset too. A plan
    of the dial was made for one method, and is dropped with it."""
    settings = dict(answers.settings)
    for key, value in changes.items():
        settings.pop(key, None)
        if value is not None:
            settings.pop(BY_KEY[key].replaces, None)
            settings[key] = value
    found = dataclasses.replace(answers, settings=settings)
    return found if found.method == answers.method else dataclasses.replace(found, dial_settings={})


def with_changes(answers: Answers, changes: Mapping[str, Any]) -> Answers:
    """Change fields of the answers, and settings by their dotted keys. Other data drops the chosen
    columns."""
    settings = {key: value for key, value in changes.items() if key in BY_KEY}
    if any(getattr(answers, key) != changes.get(key, getattr(answers, key)) for key in _DATA):
        settings = {**OF_COLUMNS, **settings}
    fields = {key: value for key, value in changes.items() if key not in BY_KEY}
    return with_settings(dataclasses.replace(answers, **fields), settings)


def with_method(answers: Answers, method: str) -> Answers:
    """Replace the method."""
    return with_settings(
        answers, {"method.name": None if method == answers.usual_method else method}
    )


def with_model(answers: Answers, path: str) -> Answers:
    """Replace the model in the answers: `demo`, a folder, or a hub id."""
    return dataclasses.replace(answers, **model_answer(path))


def with_data(answers: Answers, path: str | list[Any]) -> Answers:
    """Replace the data in the answers: `demo`, a file, or one on the hub."""
    return dataclasses.replace(answers, **data_answer(path))


def hub_id_problem(text: str) -> str | None:
    """Say why `text` is not the id of a hub model; None if it can be one."""
    text = text.strip()
    if not text:
        return "type an id such as Qwen/Qwen2.5-0.5B"
    if not _HUB_ID.fullmatch(text):
        return f"'{text}' is not an id: it must be owner/name, such as Qwen/Qwen2.5-0.5B"
    return None


def route(answers: Answers) -> tuple[StepName, ...]:
    """Return the steps for these answers; a run that is resumed has all its answers."""
    return ("start", "launch") if answers.start == "resume" else STEPS


def neighbour(answers: Answers, offset: int) -> StepName | None:
    """Return the step `offset` places on; None beyond either end."""
    steps = route(answers)
    index = (steps.index(answers.step) if answers.step in steps else 0) + offset
    return steps[index] if 0 <= index < len(steps) else None


def listed_sources(text: str) -> list[Any] | None:
    """Read a list of sources, written as in YAML; None for any other text."""
    if not text.startswith("["):
        return None
    import yaml

    from fluxtrain.config.loader import Loader

    try:
        found = yaml.load(text, Loader=Loader)
    except (yaml.YAMLError, RecursionError):
        return None
    return found if isinstance(found, list) else None


def data_answer(path: str | list[Any] | tuple[Any, ...]) -> dict[str, Any]:
    """Return the fields of the answers for a `data.path`: `demo`, files, or data on the hub.

    Raises:
        TypeError: a list holds something else than paths, or paths with their weights.
    """
    if not isinstance(path, str):
        import yaml

        if not all(isinstance(part, str | dict) for part in path):
            raise TypeError(f"data.path is {path!r:.60}")
        text = yaml.safe_dump(list(path), default_flow_style=True, width=1 << 20)
        return {"data_source": "path", "data_path": text.strip()}
    if path in (DEMO, IMAGE_DEMO):
        return {"data_source": "demo"}
    if path.startswith(HUB_DATA):
        return {"data_source": "hub", "data_hub": path.removeprefix(HUB_DATA)}
    return {"data_source": "path", "data_path": path}


def model_answer(path: str) -> dict[str, Any]:
    """Return the fields of the answers for a `model.path`: `demo`, a folder, or a hub id."""
    if path in (DEMO, IMAGE_DEMO):
        return {"model_source": "demo" if path == DEMO else "images"}
    if is_hub_id(path):
        return {"model_source": "hub", "model_hub": path}
    return {"model_source": "folder", "model_folder": path}


def is_hub_id(path: str) -> bool:
    """Tell whether a `model.path` names a hub model and no folder."""
    looks_local = path.startswith((".", "/", "~")) or path.count("/") != 1
    return not looks_local and not os.path.isdir(path)
