"""The settings of the data: where it is, how it is read, and how it becomes rows of tokens."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from fluxtrain.config.section import Section, Several
from fluxtrain.errors import brief
from fluxtrain.plan.request import Auto

DataFormat = Literal["auto", "text", "messages", "sharegpt", "alpaca", "completion", "plain"]
Address = Annotated[str, Field(min_length=1)]


class DataEntry(Section):
    """One of several sources of data."""

    path: Address
    weight: float = Field(default=1.0, gt=0, le=1000, allow_inf_nan=False)
    configuration: str | None = None
    split: str | None = None
    format: DataFormat | None = None
    columns: dict[str, str] | None = None


DEMO = "demo"  # the text that every Python has
DataPath = Address | Annotated[tuple[Address | DataEntry, ...], Field(min_length=1)]


class DataSettings(Section):
    """What the model learns from."""

    path: DataPath = Field(
        default="demo",
        description="a file (.jsonl, .ndjson, .json, .csv, .tsv, .parquet, .arrow, .txt, .md, "
        ".rst; each also .gz, .zst), a folder, a pattern such as `data/*.jsonl`, "
        "hf://datasets/owner/name (a file in it, or ?configuration=en&split=train), or `demo`: the "
        "docstrings of Python's own library. Or a list of these; an entry may be a mapping of "
        "path, weight (how often an epoch draws each row: 2 is twice, 0.5 every second one), "
        "configuration, split, format and columns",
    )
    format: DataFormat = Field(
        default="auto",
        description="the shape of the rows; auto recognises it by the keys of the first row, "
        "plain reads any file as text",
    )
    columns: dict[str, str] = Field(
        default={},
        description="which column of the file is which key, where the names differ, as in "
        "`{prompt: question, completion: answer}`; the keys are text, title, messages, tools, "
        "system, prompt, completion, instruction, input, output, history, and within messages role "
        "and content",
    )
    roles: dict[str, Literal["system", "developer", "user", "assistant", "tool"]] = Field(
        default={},
        description="which role of the file is which of system, developer, user, assistant, tool, "
        "where the names differ, as in `{doctor: assistant}`",
    )
    ignore: Annotated[tuple[str, ...], Several] = Field(
        default=(),
        description="keys of rows that are left out although they look as if they said something; "
        "keys such as id or source are left out and counted without being named here",
    )
    max_bad_rows: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="rows that cannot be used may be this many: they are listed and left out; one "
        "more, and the run ends before it trains",
    )
    chat_template: Address = Field(
        default="auto",
        description="how conversations are written: auto is the tokenizer's own template; or one "
        "of chatml, qwen-2.5, llama-2, llama-3, mistral, gemma, phi-3, phi-4, zephyr, which is "
        "saved with the model, or the path of a .jinja file",
    )
    sequence_length: Annotated[int, Field(ge=2)] | Auto = Field(
        default="auto",
        description="tokens in one packed row; documents in a row do not see each other; auto "
        "is the shortest power of two that 99 % of the samples looked at (512 rows, of long .jsonl "
        "files from everywhere, else the first ones) fit into, within the model's "
        "positions, and at most 4096 for conversations and 2048 for texts",
    )
    held_out: float = Field(
        default=0.02,
        ge=0,
        lt=1,
        description="share of the tokens kept for evaluation, whole documents that are never "
        "trained on; without effect where held_out_path is given",
    )
    held_out_path: DataPath | None = Field(
        default=None,
        description="data of its own for evaluation, given as data.path is; then all of data.path "
        "is trained on",
    )
    token_cache: Address = Field(
        default="auto",
        description="where tokens are kept for further runs: auto is the user's cache, from 8 MiB "
        "of data on; or a folder, for 2 to 5 bytes a token; off keeps them in memory alone",
    )
    seed: int = Field(default=0, ge=0, description="decides the order of rows and what is held out")

    @field_validator("path", "held_out_path")
    @classmethod
    def _each_source_once(cls, path: Any, info: ValidationInfo) -> Any:
        """Refuse a source that is named twice, and the demo's text as one of several."""
        entries = [
            one if isinstance(one, DataEntry) else DataEntry(path=one)
            for one in (path if isinstance(path, tuple) else ())
        ]
        alone = len(entries) == 1 and entries[0] == DataEntry(path=DEMO)
        demo = info.field_name == "path" and any(one.path == DEMO for one in entries)
        if demo and not alone:
            raise ValueError(
                "demo is the text of Python's own library, which is trained on alone and without "
                "a weight: write `path: demo`, or ./demo for a file of this name"
            )
        for number, one in enumerate(entries):
            if any(_same_source(one, other) for other in entries[:number]):
                raise ValueError(
                    f"{brief(one.path)} is named twice: name it once, with `weight: 2` where an "
                    "epoch should draw its rows twice"
                )
        return path

    @field_validator("token_cache", mode="before")
    @classmethod
    def _off_of_yaml(cls, value: Any) -> Any:
        """Read false and no as `off`; refuse yes, which would name a folder."""
        word = str(value).lower() if isinstance(value, bool | str) else ""
        if word in ("on", "yes", "true", "y"):
            raise ValueError("must be auto, off, or a folder such as ./tokens")
        return "off" if word in ("off", "no", "false", "n") else value

    @property
    def row_tokens(self) -> int:
        """Return the tokens of a row, once they are chosen."""
        if self.sequence_length == "auto":
            raise RuntimeError("the length of rows is asked for before it was chosen")
        return self.sequence_length


def _same_source(one: DataEntry, other: DataEntry) -> bool:
    return one.model_copy(update={"weight": other.weight}) == other
