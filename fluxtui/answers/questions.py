"""The questions that choose between sources, and the words of the methods: the same on the screen
and line by line."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from fluxtui.answers.rows import METHODS, StepName


@dataclasses.dataclass(frozen=True)
class ListOption:
    """One line of a list: the value, its name, and what it means."""

    id: str
    title: str
    text: str


@dataclasses.dataclass(frozen=True)
class SourceField:
    """The further input of a choice: a field of the answers, typed or chosen from a list."""

    name: str
    title: str
    hint: str  # an example, or what an empty list says
    kind: Literal["text", "folder", "file", "list"] = "text"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceQuestion:
    """A question about the source of the model, the data or the run.

    Attributes:
        source: the field of the answers that the list sets.
        fields: by the id of the option that they belong to.
    """

    step: StepName
    text: str
    source: str
    options: Sequence[ListOption]
    fields: Mapping[str, SourceField]


START = SourceQuestion(
    step="start",
    text="What would you like to do?",
    source="start",
    options=(
        ListOption("new", "New", "set up a new run"),
        ListOption("resume", "Resume", "go on with a run from its last checkpoint"),
        ListOption("attach", "Attach", "watch a run"),
        ListOption("file", "File", "open a configuration"),
    ),
    fields={
        "resume": SourceField("resume_run", "run", "no unfinished run here", "list"),
        "attach": SourceField("attach_run", "run", "there are no runs here", "list"),
        "file": SourceField("config_path", "configuration", "run.yaml", "file"),
    },
)
MODEL = SourceQuestion(
    step="model",
    text="Choose a model",
    source="model_source",
    options=(
        ListOption("demo", "Demo", "a small Llama with random weights; trains on two cores"),
        ListOption("recent", "Recent", "a model trained on this machine before"),
        ListOption("folder", "Folder", "a model or an image pipeline on this machine"),
        ListOption("hub", "Hub", "an id on the Hugging Face hub"),
        ListOption("images", "Images", "demo: a small FLUX.1 Kontext; learns to edit drawn images"),
    ),
    fields={
        "recent": SourceField("model_recent", "model", "no model was trained here yet", "list"),
        "folder": SourceField("model_folder", "folder", "~/models/Qwen2.5-0.5B", "folder"),
        "hub": SourceField("model_hub", "hub id", "Qwen/Qwen2.5-0.5B"),
    },
)
DATA = SourceQuestion(
    step="data",
    text="Choose the data",
    source="data_source",
    options=(
        ListOption("demo", "Demo", "the docstrings of Python's standard library"),
        ListOption(
            "path",
            "File",
            "a file, a folder, or a pattern such as data/*.json",
        ),
        ListOption("hub", "Hub", "a data set on the Hugging Face hub, or a file of it"),
    ),
    fields={
        "path": SourceField("data_path", "file", "~/data/conversations.jsonl", "file"),
        "hub": SourceField(
            "data_hub", "data set, or a file of it", "owner/name or owner/name?split=train"
        ),
    },
)
PAIRS = dataclasses.replace(
    DATA,
    text="Choose the pairs of images: before, after, and the words between",
    options=(
        ListOption("demo", "Demo", "120 drawn pairs with four changes"),
        ListOption("path", "File", "pairs.jsonl, a CSV, or a folder with training_images"),
    ),
    fields={**DATA.fields, "path": SourceField("data_path", "pairs", "~/data/pairs.jsonl", "file")},
)


def data_question(of_images: bool) -> SourceQuestion:
    """Return the question about the data: text, or pairs of images for a model that makes them."""
    return PAIRS if of_images else DATA


METHOD_TITLES = {"full": "Full", "lora": "LoRA", "qlora": "QLoRA"}
METHOD_TEXTS = {
    "full": "every weight is trained, in the model's own dtype",
    "lora": "small adapters are trained; the weights are frozen",
    "qlora": "like LoRA, with frozen weights packed in 4 or 8 bits",
}
GIVES_UP = {
    "full": "best quality; needs the most memory and disk",
    "lora": "learns tasks and style; weaker at new knowledge",
    "qlora": "like LoRA, slightly less accurate: frozen weights are quantized",
}


def method_options() -> tuple[ListOption, ...]:
    """Return the methods as options of a list."""
    return tuple(ListOption(name, METHOD_TITLES[name], METHOD_TEXTS[name]) for name in METHODS)
