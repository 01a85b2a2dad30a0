"""The settings that the app keeps between two starts, and the user's own keys.

`$XDG_CONFIG_HOME/fluxtrain/app.toml`:

    theme = "flux-light"
    smooth = true
    log_scale = false
    by_tokens = false
    refresh_hz = 4.0
    low_bandwidth = false

    [keys]
    stop = "ctrl+q"
    theme = "T"
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fluxtui.actions.key_map import key_names, overlap
from fluxtui.actions.table import ACTIONS, find
from fluxtui.home import home_folder
from fluxtui.themes import DEFAULT_THEME

_KEY = re.compile(r"((ctrl|shift|alt)\+)*([a-z0-9_]+|\S)")
LEAST_HZ, MOST_HZ = 0.2, 20.0
_TABLE = re.compile(r"^\s*\[")


@dataclass(frozen=True, slots=True)
class Settings:
    """The user's choices."""

    theme: str = DEFAULT_THEME
    smooth: bool = True
    log_scale: bool = False
    by_tokens: bool = False
    refresh_hz: float = 4.0
    low_bandwidth: bool = False
    keys: Mapping[str, str] = field(default_factory=dict)  # action id -> keys, with commas between


@dataclass(frozen=True, slots=True)
class Choices:
    """The values that the app offers for a setting, in order, and the setting's effect."""

    values: tuple[Any, ...]  # () for themes: the installed ones
    about: str

    def turned(self, value: object, by: int, values: Sequence[Any] = ()) -> Any:
        """Return the value `by` places further, wrapping around; the first for an unknown value."""
        every = self.values or tuple(values)
        at = every.index(value) + by if value in every else 0
        return every[at % len(every)]


OFF_ON = (False, True)
CHOICES: dict[str, Choices] = {
    "theme": Choices((), "colours; your own themes go in themes/ next to this file"),
    "refresh_hz": Choices((1.0, 2.0, 4.0, 8.0), "times a second that the screen is drawn"),
    "low_bandwidth": Choices(OFF_ON, "once a second, 16 colours, no animation: for slow lines"),
    "smooth": Choices(OFF_ON, "the loss with its moving average"),
    "log_scale": Choices(OFF_ON, "a logarithmic loss axis"),
    "by_tokens": Choices(OFF_ON, "curves over trained tokens instead of steps"),
}


def settings_path(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the file of the settings: `$XDG_CONFIG_HOME/fluxtrain/app.toml`."""
    folder = environment.get("XDG_CONFIG_HOME") or home_folder(environment) / ".config"
    return Path(folder) / "fluxtrain" / "app.toml"


def load_settings(path: Path) -> tuple[Settings, list[str]]:
    """Load the settings in `path`; also return one line for each entry that was skipped."""
    try:
        if os.path.exists(path) and not os.path.isfile(path):  # reading a pipe would never end
            return Settings(), [f"{path} is no file"]
        table = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return Settings(), []
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        return Settings(), [f"{path} cannot be read: {error}"]
    problems: list[str] = []
    defaults = {name: value for name, value in asdict(Settings()).items() if name != "keys"}
    chosen: dict[str, Any] = {}
    for name, value in table.items():
        if name == "keys":
            continue
        if name not in defaults:
            problems.append(f"{name}: there is no such setting ({', '.join(defaults)})")
        elif not _fits(value, name, defaults[name]):
            problems.append(f"{name} = {value!r}: something like {defaults[name]!r} is needed")
        else:
            chosen[name] = value
    keys = table.get("keys", {})
    if not isinstance(keys, dict):
        problems.append("keys: a table [keys] is needed")
        keys = {}
    return Settings(**chosen, keys=_usable_keys(keys, problems)), problems


def _fits(value: object, name: str, default: object) -> bool:
    """Return whether a value of the file is usable: of the same type, and a rate within bounds."""
    if name == "refresh_hz":
        return isinstance(value, int | float) and LEAST_HZ <= value <= MOST_HZ and value is not True
    return type(value) is type(default)


def _usable_keys(wanted: Mapping[str, object], problems: list[str]) -> dict[str, str]:
    """Return the entries that name an action, with keys that no other action has."""
    taken = {action.id: set(action.keys.split(",")) for action in ACTIONS}
    usable: dict[str, str] = {}
    for name, keys in wanted.items():
        if name not in taken:
            problems.append(f"keys.{name}: there is no such action")
            continue
        parts = [part.strip() for part in keys.split(",")] if isinstance(keys, str) else []
        if not parts or not all(_KEY.fullmatch(part) for part in parts):
            problems.append(f"keys.{name} = {keys!r}: keys look like 'x', 'X', 'f5' or 'ctrl+q'")
            continue
        named = set(key_names(parts))
        mine = find(name)
        holders = (i for i, held in taken.items() if i != name and held & named)
        other = next((i for i in holders if overlap(mine, find(i))), None)
        if other is not None:
            problems.append(f"keys.{name} = {keys!r}: {other} has this key; give it another first")
            continue
        taken[name] = named
        usable[name] = ",".join(key_names(parts))
    return usable


def save_settings(settings: Settings, path: Path) -> bool:
    """Write all settings except the keys in place: comments and `[keys]` stay. False if it fails.

    A file that cannot be parsed, before or after the change, is not written.
    """
    try:
        lines = path.read_text("utf-8").splitlines() if path.exists() else []
        tomllib.loads("\n".join(lines))
        values = {name: value for name, value in asdict(settings).items() if name != "keys"}
        text = "\n".join(_with_values(lines, values)) + "\n"
        tomllib.loads(text)  # a value over several lines cannot be replaced like this
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(text, "utf-8")
        temporary.replace(path)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError):
        return False
    return True


def _with_values(lines: list[str], values: Mapping[str, object]) -> list[str]:
    """Replace top-level values in the lines of a file; new ones go before the first table."""
    end = next((i for i, text in enumerate(lines) if _TABLE.match(text)), len(lines))
    top, rest = lines[:end], lines[end:]
    for name, value in values.items():
        new = f"{name} = {json.dumps(value)}"
        named = re.compile(rf"""\s*(["']?){name}\1\s*=""")
        at = next((i for i, text in enumerate(top) if named.match(text)), None)
        if at is not None:
            top[at] = new
        else:
            top.insert(len(top) - (1 if top and not top[-1].strip() else 0), new)
    if rest and top and top[-1].strip():
        top.append("")
    return [*top, *rest]
