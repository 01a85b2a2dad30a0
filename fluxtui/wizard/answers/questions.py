"""The questions of the wizard in words: the same on the screen and line by line."""

from __future__ import annotations

from fluxtui.wizard.answers.question import Field, Option, SourceQuestion

START = SourceQuestion(
    step="start",
    text="What would you like to do?",
    source="start",
    options=(
        Option("new", "New", "set up a new run"),
        Option("resume", "Resume", "go on with a run from its last checkpoint"),
        Option("attach", "Attach", "watch a run"),
        Option("file", "File", "open a configuration"),
    ),
    fields={
        "resume": Field("resume_run", "run", "no run here ended early", "list"),
        "attach": Field("attach_run", "run", "there are no runs here", "list"),
        "file": Field("config_path", "configuration", "run.yaml", "file"),
    },
)
MODEL = SourceQuestion(
    step="model",
    text="Which model shall learn?",
    source="model_source",
    options=(
        Option("demo", "Demo", "a small Llama, made here; trains on two cores"),
        Option("recent", "Recent", "a model that was trained here before"),
        Option("folder", "Folder", "a Hugging Face model on this machine"),
        Option("hub", "Hub", "an id on the Hugging Face hub"),
    ),
    fields={
        "recent": Field("model_recent", "model", "no model was trained here yet", "list"),
        "folder": Field("model_folder", "folder", "~/models/Qwen2.5-0.5B", "folder"),
        "hub": Field("model_hub", "hub id", "Qwen/Qwen2.5-0.5B"),
    },
)
DATA = SourceQuestion(
    step="data",
    text="What shall it learn from?",
    source="data_source",
    options=(
        Option("demo", "Demo", "the docstrings of Python's standard library"),
        Option(
            "path",
            "File",
            "a file, a folder, or a pattern such as data/*.json",
        ),
        Option("hub", "Hub", "a data set on the Hugging Face hub, or a file of it"),
    ),
    fields={
        "path": Field("data_path", "file", "~/data/conversations.jsonl", "file"),
        "hub": Field(
            "data_hub", "data set, or a file of it", "owner/name or owner/name?split=train"
        ),
    },
    number=Field("sequence_length", "tokens in a row", "tokens in a row, as the trainer has it"),
)
METHODS = (Option("full", "Full", "every weight is trained, in the model's own dtype"),)
