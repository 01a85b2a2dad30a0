"""Writes docs/configuration.md, and the keys that a shell completes, from the schema.

Run it with `python docs/write_configuration.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fluxtrain.commands.completion import KEYS
from fluxtrain.config.schema import RunConfig, demo_config, json_schema, settings

PAGE = Path(__file__).with_name("configuration.md")
HEAD = """\
# Configuration

<!-- Written by docs/write_configuration.py from the schema; a test checks that it is current. -->

A run is defined by one YAML file. Every key has a default, unknown keys are refused with the
nearest known one, and `auto` means that FluxTrain chooses from what it measures and says why.

```
fluxtrain train run.yaml                        # train
fluxtrain train run.yaml --set train.steps=500  # any key can be set on the command line
fluxtrain train --set model.path=M --set data.path=D    # with these two no file is needed
fluxtrain plan run.yaml --all                   # every setting, every choice and its reason
fluxtrain schema                                # the JSON schema, for editors
```

Only `true` and `false` are truth values: `on`, `off`, `yes`, `no` and dates are text, and a switch
takes the words, too. Numbers that YAML counts in eights (`010`) or sixties (`1:30`) are refused.
"""


def page() -> str:
    """The whole page."""
    every = list(settings(RunConfig()))
    parts = [HEAD]
    for name, field in RunConfig.model_fields.items():
        section: Any = field.annotation
        parts.append(f"## {name}\n\n{section.__doc__.strip()}\n")
        rows = [
            f"| `{setting.key}` | `{_text(setting.default)}` "
            f"| {_values(*setting.key.split('.'))} | {_sentence(setting.description)} |"
            for setting in every
            if setting.key.startswith(f"{name}.")
        ]
        head = ["| key | default | values | meaning |", "|---|---|---|---|"]
        parts.append("\n".join([*head, *rows]) + "\n")
    changed = {s.key: s.value for s in settings(demo_config()) if s.changed}
    demo = "\n".join(f"{key}: {_text(value)}" for key, value in changed.items())
    parts.append(
        f"## The demo\n\n`--demo` is these settings on the defaults:\n\n```\n{demo}\n```\n"
    )
    return "\n".join(parts)


def keys() -> str:
    """Every key, one a line."""
    return "".join(f"{setting.key}\n" for setting in settings(RunConfig()))


def _values(section: str, key: str) -> str:
    """What the schema allows, in words."""
    schema = json_schema()
    reference = schema["properties"][section]["$ref"].rpartition("/")[2]
    found = schema["$defs"][reference]["properties"][key]
    return " or ".join(_kind(one) for one in found.get("anyOf", [found]))


def _kind(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(_kind(one) for one in schema["anyOf"])
    if "$ref" in schema:
        return "mapping"
    if "const" in schema:
        return f"`{schema['const']}`"
    if schema["type"] == "array":
        inner = schema.get("items") or schema["prefixItems"][0]
        return f"list of {_kind(inner)}"
    names = {
        "integer": "whole number",
        "string": "text",
        "boolean": "`true`, `false`",
        "object": "mapping",
    }
    bounds = (("minimum", "from"), ("exclusiveMinimum", "above"), ("exclusiveMaximum", "below"))
    limits = [f"{word} {schema[bound]:g}" for bound, word in bounds if bound in schema]
    return " ".join([names.get(schema["type"], schema["type"]), *limits])


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].replace("|", "\\|") + "."


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    KEYS.write_text(keys(), encoding="utf-8")
