"""Asks and tells line by line, for a terminal that cannot draw."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from fluxtrain.events.printable import printable_lines
from fluxtui.answers.questions import ListOption
from fluxtui.wizard.steps.paths import completions

Ask = Callable[[str], str]
Say = Callable[[str], None]


class GoBack(Exception):
    """The user wants the step before."""


class Leave(Exception):
    """The user wants no run."""


@contextmanager
def completing(kind: str) -> Iterator[None]:
    """Let Tab complete the path of a folder or a file, where this Python can; other answers are
    typed as they are."""
    try:
        import readline
    except ImportError:
        kind = "text"
    if kind not in ("folder", "file"):
        yield
        return

    def offer(text: str, state: int) -> str | None:
        found = completions(text, kind == "folder") if text.strip() else ()
        return found[state] if state < len(found) else None

    before, ends = readline.get_completer(), readline.get_completer_delims()
    readline.set_completer(offer)
    readline.set_completer_delims("")
    readline.parse_and_bind("set enable-bracketed-paste off")  # it would write codes
    readline.parse_and_bind("tab: complete")
    try:
        yield
    finally:
        readline.set_completer(before)
        readline.set_completer_delims(ends)


class Dialogue:
    """Asks on `ask` (as `input`), tells on `say` (as `print`)."""

    def __init__(self, ask: Ask, say: Say) -> None:
        self._ask: Ask = lambda prompt: ask(printable_lines(prompt))
        self._say: Say = lambda text: say(printable_lines(text))

    def _read(self, prompt: str) -> str:
        """Read one answer; `b` goes back and `q` leaves."""
        text = self._ask(prompt).strip()
        if text == "b":
            raise GoBack
        if text == "q":
            raise Leave
        return text

    def _choose(self, options: Sequence[ListOption], present: str) -> str:
        """Let the user choose one of a numbered list."""
        ids = [option.id for option in options]
        default = ids.index(present) + 1 if present in ids else 1
        for number, option in enumerate(options, start=1):
            self._say(f"{number} {option.title}{f': {option.text}' if option.text else ''}")
        while True:
            text = self._read(f"1 to {len(ids)} [{default}]: ") or str(default)
            if text.isdecimal() and 1 <= int(text) <= len(ids):
                return ids[int(text) - 1]
            self._say(f"error: {text!r} is no number from 1 to {len(ids)}")

    def _tell(self, told: Sequence[str]) -> None:
        for line in told:
            self._say(line)
