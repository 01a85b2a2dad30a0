"""The settings that the wizard asks: one row each, with its key and its page.

Default, help, choices and what can be typed are the configuration's. Its schema is loaded when the
first of them is needed, which the first pages do without.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from fluxtrain.errors import BadInput

StepName = Literal["start", "model", "data", "method", "training", "strategy", "launch"]
METHODS = ("full", "lora", "qlora")  # the first one is the default
ADAPTERS = METHODS[1:]
AUTO = "auto"
RUN_FOLDER = "run_folder"  # the one answer among the settings that no configuration has


@dataclasses.dataclass(frozen=True, kw_only=True)
class SettingRow:
    """A setting: its key of the configuration, and the page that asks it.

    Attributes:
        group: the heading under which it stands.
        label: its name, where the key's last word does not tell it apart.
        usual: what people use, in the order in which keys walk through it; its choices if it has
            some.
        replaces: the key that is unset when this one is set.
        methods: the methods that have it.
        of: what the data must be for it; "" for either.
        action: of the registry, whose key asks it.
    """

    key: str
    page: StepName
    group: str = ""
    label: str = ""
    usual: tuple[Any, ...] = ()
    replaces: str = ""
    methods: tuple[str, ...] = METHODS
    of: Literal["", "text", "images"] = ""
    action: str = ""

    @property
    def name(self) -> str:
        """Return the setting's name in words."""
        return self.label or self.key.rpartition(".")[2].replace("_", " ")

    @property
    def flag(self) -> str:
        """Return the option of the command line that sets it."""
        return "--" + self.name.replace(" ", "-")

    def is_for(self, method: str, of_images: bool) -> bool:
        """Return whether a run with this method, on text or on images, has the setting."""
        return method in self.methods and self.of in ("", "images" if of_images else "text")

    @property
    def is_folder(self) -> bool:
        """Return whether the value is a path."""
        return self.key == RUN_FOLDER


ROWS = (
    SettingRow(key="data.format", page="data", of="text", label="data format"),
    SettingRow(key="data.columns", page="data", of="text", label="data columns"),
    SettingRow(key="data.ignore", page="data", of="text", label="data ignore"),
    SettingRow(key="method.name", page="method", label="method"),
    SettingRow(key="method.rank", page="method", methods=ADAPTERS, action="wizard_rank"),
    SettingRow(key="method.alpha", page="method", methods=ADAPTERS, action="wizard_alpha"),
    SettingRow(key="method.targets", page="method", methods=ADAPTERS, action="wizard_targets"),
    SettingRow(key="method.variant", page="method", methods=ADAPTERS, action="wizard_variant"),
    SettingRow(key="method.base", page="method", methods=("qlora",), action="wizard_base"),
    SettingRow(key="train.learning_rate", page="training", group="Learning",
        usual=(1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 3e-3)),
    SettingRow(key="train.schedule", page="training", group="Learning"),
    SettingRow(key="train.warmup_steps", page="training", group="Learning",
        usual=(0, 10, 50, 100, 500)),
    SettingRow(key="train.epochs", page="training", group="Length", replaces="train.steps",
        usual=(1, 2, 3, 5, 10)),
    SettingRow(key="train.steps", page="training", group="Length", replaces="train.epochs",
        usual=(100, 200, 500, 1000, 5000), action="wizard_steps"),
    SettingRow(key="train.batch_rows", page="training", group="Batch", usual=(1, 2, 4, 8, 16, 32),
        action="wizard_batch"),
    SettingRow(key="train.accumulation", page="training", group="Batch",
        usual=(1, 2, 4, 8, 16, 32)),
    SettingRow(key="data.sequence_length", page="training", group="Batch", of="text",
        usual=(512, 1024, 2048, 4096, 8192)),
    SettingRow(key="image.size", page="training", group="Batch", of="images", label="image size",
        usual=(256, 512, 768, 1024)),
    SettingRow(key="train.evaluate_every", page="training", group="Evaluation",
        usual=(10, 50, 100, 500, 1000, "end")),
    SettingRow(key="data.held_out", page="training", group="Evaluation",
        usual=(0, 0.01, 0.02, 0.05, 0.1)),
    SettingRow(key="image.samples", page="training", group="Evaluation", of="images",
        label="image samples", usual=(0, 1, 2, 4)),
    SettingRow(key="train.checkpoint_every", page="training", group="Run",
        usual=(50, 100, 500, 1000, "end")),
    SettingRow(key="train.seed", page="training", group="Run", usual=(0, 1, 2, 3)),
    SettingRow(key="data.seed", page="training", group="Run",
        label="data seed", usual=(0, 1, 2, 3)),
    SettingRow(key=RUN_FOLDER, page="training", group="Run"),
    SettingRow(key="placement.chunk_rows", page="strategy",
        usual=(1, 2, 4, 8), action="wizard_chunk"),
    SettingRow(key="placement.offload", page="strategy", action="wizard_offload"),
)  # fmt: skip
BY_KEY = {row.key: row for row in ROWS}


def rows_of(
    page: StepName, method: str = METHODS[0], of_images: bool = False
) -> tuple[SettingRow, ...]:
    """Return the rows of a page with this method and these data, without the method's own."""
    return tuple(
        row
        for row in ROWS
        if row.page == page and row.is_for(method, of_images) and row.key != "method.name"
    )


@dataclasses.dataclass(frozen=True)
class Declared:
    """A setting as the configuration declares it; `choices` of one that takes only these words."""

    default: Any
    help: str
    choices: tuple[str, ...] = ()


def declared(row: SettingRow) -> Declared:
    """Return the default, the help and the choices of a setting."""
    return _all_declared()[row.key]


@functools.cache
def _all_declared() -> Mapping[str, Declared]:
    from fluxtrain.config.schema import RunConfig, json_schema, settings

    schema = json_schema()
    found = {
        RUN_FOLDER: Declared("", "a new folder in the runs folder, named by time and model"),
    }
    for one in settings(RunConfig()):
        section, _, name = one.key.partition(".")
        reference = schema["properties"][section]["$ref"].rpartition("/")[2]
        typed = schema["$defs"][reference]["properties"][name]
        found[one.key] = Declared(one.default, one.description, tuple(_words(typed)))
    return found


def _words(typed: Mapping[str, Any]) -> Iterator[str]:
    if typed.get("type") == "string":
        yield from typed.get("enum", ())


def default_text(row: SettingRow) -> str:
    """Write the default; auto where nothing is set by default."""
    return value_text(declared(row).default) or AUTO


def value_text(value: Any) -> str:
    """Write a value as it is shown and typed; "" for none."""
    if value is None:
        return ""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {one}' for key, one in value.items())}}}" if value else ""
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return f"{value:g}".replace("e-0", "e-") if isinstance(value, float) else str(value)


def read(row: SettingRow, text: str) -> Any:
    """Read what was typed; None, the default, for nothing and for the word auto.

    Raises:
        BadInput: it cannot be used; the message says what can.
    """
    from fluxtrain.config.text import apply_overrides

    text = text.strip()
    if text in ("", AUTO):
        return None
    if row.is_folder:
        return text
    if row.key in ("method.targets", "data.ignore"):
        text = text.replace(",", " ").strip(" []")
        text = ",".join(text.split())
    plain = re.sub(r"(?<=\d)[,_](?=\d{3}\b)", "", text)  # thousands
    given = apply_overrides({}, [f"{row.key}={plain}"])
    section, _, name = row.key.partition(".")
    return settled(row, given[section][name])


def settled(row: SettingRow, value: Any) -> Any:
    """Check a configuration's value as the trainer does; None for the default.

    Raises:
        BadInput: the trainer would refuse it.
    """
    from fluxtrain.config.schema import validate

    if row.is_folder:
        if not isinstance(value, str):
            raise BadInput(f"{row.name} is {value!r:.60}: it is a path")
        return value or None
    section, _, name = row.key.partition(".")
    try:
        config = validate({section: {name: value}}, row.name)
    except BadInput as error:
        raise BadInput(str(error).removeprefix(f"{row.name}: ")) from None
    found = getattr(getattr(config, section), name)
    if isinstance(found, float) and found.is_integer():
        found = int(found)
    if found == declared(row).default:
        return None
    return list(found) if isinstance(found, tuple) else found


def turned(row: SettingRow, value: Any, offset: int) -> Any:
    """Return the usual value `offset` places on, the default among them; the ends meet."""
    default = declared(row).default
    usual = declared(row).choices or row.usual
    stops = (None, *(one for one in usual if one != default))
    if value in stops:
        return stops[(stops.index(value) + offset) % len(stops)]
    numbers = [stop for stop in stops if isinstance(stop, int | float)]
    if not isinstance(value, int | float):
        return None
    further = [n for n in numbers if (n > value if offset > 0 else n < value)]
    return (min(further) if offset > 0 else max(further)) if further else None
