"""Evaluates the model of a finished run, and shows its loss and perplexity."""

from __future__ import annotations

import time
from contextlib import suppress

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.css.query import NoMatches
from textual.screen import ModalScreen
from textual.widgets import Static

from fluxtrain.events.answers.answers import EvaluationAnswer
from fluxtrain.events.answers.asking import EngineRefused, ask_engine
from fluxtrain.events.printable import printable
from fluxtrain.units import UNKNOWN, duration_text, loss_text, number_text
from fluxtui.screens.dialogs import DIALOG_CSS


class EvaluationDialog(ModalScreen[None]):
    """Runs `fluxtrain evaluate` in a process of its own; leaving ends it."""

    DEFAULT_CSS = DIALOG_CSS.format(name="EvaluationDialog", width=76)
    BINDINGS = [Binding("escape,q,enter,V", "leave", "Leave", show=False)]

    def __init__(self, model: str, title: str, program: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._model, self._named, self._program = model, title, program
        self._began_s = time.monotonic()
        self._told: str | None = None  # the result, or why there is none

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(f"Evaluate {printable(self._named)}\n", markup=False)
            yield Static("", id="result", markup=False)
            yield Static("\n[b]esc[/b] leave")

    def on_mount(self) -> None:
        self.run_worker(self._ask(), group="evaluate", exclusive=True)
        self.set_interval(1.0, self._show)
        self._show()

    async def _ask(self) -> None:
        try:
            found = await ask_engine(EvaluationAnswer, self._model, program=self._program)
            rows = evaluation_rows(found)
            wide = max(len(name) for name, _ in rows)
            self._told = "\n".join(f"{name:<{wide}}  {value}" for name, value in rows)
        except EngineRefused as error:
            self._told = f"✗ {error}"
        self._show()

    def _show(self) -> None:
        waited = f"the engine reads the model and its held-out data  {self._waited_s:.0f} s"
        told = waited if self._told is None else self._told
        with suppress(NoMatches):  # left meanwhile
            self.query_one("#result", Static).update("\n".join(map(printable, told.split("\n"))))

    @property
    def _waited_s(self) -> float:
        return time.monotonic() - self._began_s

    def action_leave(self) -> None:
        """Close; an evaluation under way is ended."""
        self.dismiss(None)


def evaluation_rows(found: EvaluationAnswer) -> list[tuple[str, str]]:
    """Name and value of what was found."""
    perplexity = UNKNOWN if found.perplexity is None else number_text(found.perplexity)
    return [
        ("loss", f"{loss_text(found.loss)} nats a token"),
        ("perplexity", perplexity),
        ("data", found.data),
        ("tokens", f"{found.tokens:,} in {found.rows:,} rows of {found.sequence_length:,}"),
        ("model", f"{found.model} in {found.dtype}, {found.placed}"),
        ("took", duration_text(found.seconds)),
        *(("note", note) for note in found.notes),
    ]
