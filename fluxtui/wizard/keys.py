"""The key hints of each step: which of the registry's actions are shown, and in what words."""

from __future__ import annotations

from collections.abc import Sequence

from fluxtui.actions.key_map import joined
from fluxtui.actions.table import KEY_TEXTS, Action
from fluxtui.answers.rows import StepName

Hint = tuple[tuple[str, ...], str]  # ids of actions, or keys that are Textual's own; and words
NEXT: Hint = (("wizard_next",), "next")
BACK: Hint = (("wizard_back",), "back")
CHOOSE: Hint = (("list_up", "list_down"), "choose")
SCROLL: Hint = (("list_up", "list_down"), "scroll")
COMPLETE: Hint = (("wizard_complete",), "field, path")
HELP: Hint = (("help",), "help")
TRY: Hint = (("wizard_try",), "dry run")
WITH_FIELDS: tuple[StepName, ...] = ("start", "model", "data")  # a letter there is an answer
HINTS: dict[StepName, tuple[Hint, ...]] = {
    "start": (NEXT, CHOOSE, COMPLETE, (("wizard_back",), "leave"), HELP),
    "model": (NEXT, CHOOSE, COMPLETE, BACK, HELP),
    "data": (
        NEXT, (("list_up", "list_down"), "pick"), COMPLETE,
        (("wizard_read_as", "wizard_read_before"), "format"), (("pgdn",), "more"),
        BACK, HELP,
    ),
    "method": (
        NEXT, (("wizard_method_before", "wizard_method_after"), "method"),
        (("wizard_again",), "again"), SCROLL, BACK, HELP,
    ),
    "training": (
        NEXT, CHOOSE, (("wizard_value_before", "wizard_value_after"), "change"),
        (("wizard_edit",), "type"), (("wizard_default",), "auto"), BACK, HELP,
    ),
    "strategy": (
        NEXT,
        (("wizard_faster", "wizard_smaller"), "dial"),
        (("wizard_batch", "wizard_chunk", "wizard_steps", "wizard_offload"), "change"),
        (("wizard_why",), "why"), (("wizard_again",), "again"), BACK, HELP,
    ),
    "launch": (
        (("wizard_next",), "start"), TRY, (("wizard_yaml",), "YAML"),
        (("wizard_command",), "command"), SCROLL, BACK, HELP,
    ),
}  # fmt: skip
TRYING: tuple[Hint, ...] = ((("wizard_back",), "end the dry run"), SCROLL)


def key_hints(
    step: StepName, registry: Sequence[Action], trying: bool = False
) -> list[tuple[str, str]]:
    """Keys and what they do, in the order of the footer."""
    by_id = {action.id: action for action in registry}
    hints = TRYING if trying else HINTS[step]
    return [(joined([_key(by_id, name, step) for name in names]), words) for names, words in hints]


def _key(by_id: dict[str, Action], name: str, step: StepName) -> str:
    """Return the key of an action as a person reads it; no letters where letters are typed."""
    action = by_id.get(name)
    if action is None:
        return name
    keys = action.keys.split(",")
    named = [key for key in keys if len(key) > 1 and len(KEY_TEXTS.get(key, key)) > 1]
    key = named[0] if step in WITH_FIELDS and action.id in ("help",) and named else keys[0]
    return KEY_TEXTS.get(key, key.replace("ctrl+", "^"))
