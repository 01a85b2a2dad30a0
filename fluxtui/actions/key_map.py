"""The key map: bindings for the app, for a screen and for a widget, made from the table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from textual.binding import Binding, BindingType

from fluxtui.actions.table import (
    ACTIONS,
    EVERYWHERE,
    IN_WIZARD_TOO,
    KEY_TEXTS,
    Action,
    find,
)

LIST_KEYS = tuple(action.id for action in ACTIONS if action.id.startswith("list_"))


def app_bindings() -> list[BindingType]:
    """Return the keys that work on run screens and in the wizard; the app runs their actions."""
    return [_binding(action) for action in ACTIONS if action.id in IN_WIZARD_TOO]


def screen_bindings(screen: str = "") -> list[BindingType]:
    """Return the keys that this screen adds to the keys of all run screens; without a name, the
    keys of all run screens."""
    return [
        _binding(action)
        for action in ACTIONS
        if not (action.in_lists or action.in_wizard or action.id in IN_WIZARD_TOO)
        and (screen in action.screens if screen else not action.screens)
    ]


def own_bindings(ids: Sequence[str] = LIST_KEYS, **does: str) -> list[BindingType]:
    """Return keys for a widget, a list's by default; `does` replaces an action's string by id."""
    return [_binding(action, does.get(action.id, "")) for action in map(find, ids)]


def _binding(action: Action, do: str = "") -> Binding:
    """Make one binding; its id lets the user's own key map replace the keys."""
    return Binding(
        action.keys, do or action.do, action.about, id=action.id, show=False,
        priority=action.id in EVERYWHERE,
    )  # fmt: skip


def rebound(keys: Mapping[str, str]) -> tuple[Action, ...]:
    """Return the table with the user's own keys."""
    return tuple(replace(action, keys=keys.get(action.id, action.keys)) for action in ACTIONS)


def joined(keys: Sequence[str]) -> str:
    """Join key names: `↑↓` for two arrows, a space between others."""
    return "".join(keys) if list(keys) == ["↑", "↓"] else " ".join(keys)


def overlap(one: Action, other: Action) -> bool:
    """Return whether both work on one screen, so that they cannot share a key."""
    return not one.where.isdisjoint(other.where)


def key_names(keys: Iterable[str]) -> list[str]:
    """Return keys by Textual's names: `?` is `question_mark`."""
    names = {text: name for name, text in KEY_TEXTS.items() if len(text) == 1}
    return [names.get(key, key) for key in keys]
