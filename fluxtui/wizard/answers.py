"""What the user has answered so far, as one value.

Pure values and functions: no Textual, no torch, and no file is read here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

ModelSource = Literal["demo", "folder", "hub"]
DataSource = Literal["demo", "path"]
Method = Literal["full"]
Offload = Literal["auto", "none", "optimizer", "weights", "max"]
StepName = Literal["model", "data", "method", "plan", "launch"]

STEPS: tuple[StepName, ...] = get_args(StepName)
OFFLOADS: tuple[Offload, ...] = get_args(Offload)
DEMO = "demo"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answers:
    """Every answer of the wizard. The defaults are the demo, so accepting them all starts it.

    Attributes:
        model_folder, model_hub, data_path: kept when another source is chosen, so that nothing
            typed is lost.
        sequence_length, batch_rows, chunk_rows, steps: None leaves them to the trainer.
        base: a configuration file the answers were read from; keys that the wizard does not ask
            for are carried through unchanged.
        overrides: `key=value` settings from the command line, handed to the trainer as they are.
        step: where the user is.
    """

    model_source: ModelSource = "demo"
    model_folder: str = ""
    model_hub: str = ""
    data_source: DataSource = "demo"
    data_path: str = ""
    method: Method = "full"
    offload: Offload = "auto"
    sequence_length: int | None = None
    batch_rows: int | None = None
    chunk_rows: int | None = None
    steps: int | None = None
    overrides: tuple[str, ...] = ()
    base: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    step: StepName = "model"

    @property
    def model_path(self) -> str:
        """What the configuration calls `model.path`."""
        if self.model_source == "demo":
            return DEMO
        hub = self.model_source == "hub"
        return self.model_hub.strip() if hub else _expanded(self.model_folder)

    @property
    def data_file(self) -> str:
        """What the configuration calls `data.path`."""
        return DEMO if self.data_source == "demo" else _expanded(self.data_path)

    @property
    def is_demo(self) -> bool:
        """Both the model and the data are the demo's, and no file says otherwise."""
        return self.model_source == "demo" and self.data_source == "demo" and not self.base


def with_model(answers: Answers, path: str) -> Answers:
    """The same answers with another model: `demo`, a folder, or a hub id."""
    return dataclasses.replace(answers, **model_answer(path))


def with_data(answers: Answers, path: str) -> Answers:
    """The same answers with other data: `demo` or a file."""
    if path == DEMO:
        return dataclasses.replace(answers, data_source="demo")
    return dataclasses.replace(answers, data_source="path", data_path=path)


def hub_id_problem(text: str) -> str | None:
    """Why `text` is not the id of a hub model; None when it can be one."""
    text = text.strip()
    if not text:
        return "type an id such as Qwen/Qwen2.5-0.5B"
    if not _HUB_ID.fullmatch(text):
        return f"'{text}' is not an id: it must be owner/name, such as Qwen/Qwen2.5-0.5B"
    return None


def neighbour(step: StepName, offset: int) -> StepName | None:
    """The step `offset` places on; None beyond either end."""
    index = STEPS.index(step) + offset
    return STEPS[index] if 0 <= index < len(STEPS) else None


def model_answer(path: str) -> dict[str, Any]:
    """The fields of the answers that a `model.path` means: `demo`, a folder, or a hub id."""
    if path == DEMO:
        return {"model_source": "demo"}
    is_folder = path.startswith((".", "/", "~")) or Path(path).is_dir() or path.count("/") != 1
    if is_folder:
        return {"model_source": "folder", "model_folder": path}
    return {"model_source": "hub", "model_hub": path}


def _expanded(path: str) -> str:
    return str(Path(path.strip()).expanduser()) if path.strip() else ""
