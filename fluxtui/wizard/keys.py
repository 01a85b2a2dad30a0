"""The key hints of each step."""

from __future__ import annotations

from fluxtui.wizard.answers import StepName

KEYS: dict[StepName, list[tuple[str, str]]] = {
    "start": [("enter", "next"), ("↑↓", "choose"), ("tab", "list"), ("esc", "leave")],
    "model": [("enter", "next"), ("↑↓", "choose"), ("tab", "field"), ("esc", "back")],
    "data": [
        ("enter", "next"),
        ("↑↓", "choose"),
        ("tab", "field"),
        ("pgdn", "more"),
        ("esc", "back"),
    ],
    "method": [("enter", "next"), ("r", "again"), ("esc", "back")],
    "hardware": [("enter", "next"), ("r", "measure again"), ("↑↓", "scroll"), ("esc", "back")],
    "strategy": [
        ("enter", "next"),
        ("← →", "dial"),
        ("b c s o", "change"),
        ("w", "why"),
        ("r", "again"),
        ("esc", "back"),
    ],
    "preview": [
        ("enter", "next"),
        ("t", "dry run"),
        ("y", "YAML"),
        ("m", "command"),
        ("↑↓", "scroll"),
        ("esc", "back"),
    ],
    "launch": [("enter", "start"), ("t", "dry run"), ("↑↓", "scroll"), ("esc", "back")],
}
TRYING = [("esc", "end the dry run"), ("↑↓", "scroll")]
