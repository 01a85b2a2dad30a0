"""The questions of the wizard in words: the same on the screen and line by line."""

from __future__ import annotations

from collections.abc import Sequence

from fluxtui.answers.answers import BASES, METHODS, VARIANTS, Answers, Method
from fluxtui.answers.question import AdapterQuestion, Field, Option, SourceQuestion

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
        "resume": Field("resume_run", "run", "no unfinished run here", "list"),
        "attach": Field("attach_run", "run", "there are no runs here", "list"),
        "file": Field("config_path", "configuration", "run.yaml", "file"),
    },
)
MODEL = SourceQuestion(
    step="model",
    text="Choose a model",
    source="model_source",
    options=(
        Option("demo", "Demo", "a small Llama with random weights; trains on two cores"),
        Option("recent", "Recent", "a model trained on this machine before"),
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
    text="Choose the data",
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
    number=Field("sequence_length", "sequence length", "sequence length in tokens (auto)"),
)
METHOD_TITLES: dict[Method, str] = {"full": "Full", "lora": "LoRA", "qlora": "QLoRA"}
METHOD_TEXTS: dict[Method, str] = {
    "full": "every weight is trained, in the model's own dtype",
    "lora": "small adapters are trained beside the frozen weights",
    "qlora": "the same beside weights that are packed in 4 or 8 bits",
}
GIVES_UP: dict[Method, str] = {
    "full": "best quality; needs the most memory and disk",
    "lora": "learns tasks and style; weaker at new knowledge",
    "qlora": "like LoRA, slightly less accurate: frozen weights are quantized",
}
ADAPTER_QUESTIONS = (
    AdapterQuestion(
        "rank", "wizard_rank", "rank", "rank of the adapters", "16",
        "enough for most tasks; more takes more memory",
    ),
    AdapterQuestion(
        "alpha", "wizard_alpha", "alpha", "alpha of the adapters", "2 x rank",
        "adapters are scaled by alpha / rank: by 2",
    ),
    AdapterQuestion(
        "targets", "wizard_targets", "targets", "layers that get adapters, with commas",
        "all linear", "learns more than attention layers alone",
    ),
    AdapterQuestion(
        "variant", "wizard_variant", "variant", "kind of the adapters", "lora",
        "rslora: for high ranks; dora: finer, slower", VARIANTS,
    ),
    AdapterQuestion(
        "base_format", "wizard_base", "base", "how the frozen weights are packed", "nf4-double",
        "0.52 bytes a weight; nf4 0.56; int8 1, finer", BASES,
        packed_alone=True,
    ),
)  # fmt: skip


def method_options() -> tuple[Option, ...]:
    """Return the methods as options of a list."""
    return tuple(Option(name, METHOD_TITLES[name], METHOD_TEXTS[name]) for name in METHODS)


def adapter_questions(method: Method) -> Sequence[AdapterQuestion]:
    """Return the adapter questions of a method; none for full training."""
    if method == "full":
        return ()
    return tuple(one for one in ADAPTER_QUESTIONS if method == "qlora" or not one.packed_alone)


def adapter_answer(answers: Answers, question: AdapterQuestion) -> str:
    """Return the answer as shown, or the default."""
    value = getattr(answers, question.field)
    return question.default if value in (None, "") else str(value)
