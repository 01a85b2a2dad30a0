"""Uses the model of a run: evaluates it, exports its adapter or merges it into its base."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.css.query import NoMatches
from textual.screen import ModalScreen
from textual.widgets import Static

from fluxtrain.events.answers.answers import Answer, EvaluationAnswer, ExportAnswer
from fluxtrain.events.answers.asking import EngineRefused, ask_engine
from fluxtrain.events.printable import printable
from fluxtrain.units import UNKNOWN, bytes_text, duration_text, loss_text, number_text
from fluxtui.answers.questions import ListOption
from fluxtui.screens.dialogs import DIALOG_CSS
from fluxtui.wizard.steps.path_entry import PathEntry
from fluxtui.wizard.steps.widgets import ChoiceList

Row = tuple[str, str]
WHOLE = (
    ListOption("model", "Model", "the weights of its newest checkpoint, in Hugging Face format"),
)
ADAPTERS = (
    ListOption("merged", "Merge", "the base with the adapter in its weights: a complete model"),
    ListOption("adapter", "Adapter", "the adapter alone, in peft's format"),
)


class ResultDialog(ModalScreen[None]):
    """Runs a command of the engine in its own process and shows its answer; leaving ends it.

    `told` is the answer, or why there is none; None before.
    """

    TITLE_WORD: ClassVar[str] = ""
    WAITS: ClassVar[str] = ""

    def __init__(self, model: str, title: str, program: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.model, self._named, self._program = model, title, program
        self._began_s: float | None = None
        self._said = ""
        self.told: str | None = None

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(f"{self.TITLE_WORD} {printable(self._named)}\n", markup=False)
            yield from self.compose_question()
            yield Static("", id="result", markup=False)
            yield Static("", id="keys")

    def compose_question(self) -> ComposeResult:
        """Yield the widgets of the question that comes before the command."""
        yield from ()

    def on_mount(self) -> None:
        self.set_interval(1.0, self.show)
        self.show()

    @property
    def waits(self) -> bool:
        """Return whether the command is running."""
        return self._began_s is not None and self.told is None

    def ask(self, answer: type[Answer], *arguments: str) -> None:
        """Run the command of `answer`; after a refusal the user may ask again."""
        self._began_s, self.told, self._said = time.monotonic(), None, ""
        self.run_worker(self._ask(answer, arguments), group="result", exclusive=True)
        self.show()

    async def _ask(self, answer: type[Answer], arguments: Sequence[str]) -> None:
        try:
            found = await ask_engine(answer, *arguments, program=self._program, said=self._hear)
            rows = self.rows_of(found)
            wide = max(len(name) for name, _ in rows)
            self.told = "\n".join(f"{name:<{wide}}  {value}" for name, value in rows)
        except EngineRefused as error:
            self.told = f"✗ {error}"
        self.show()

    def rows_of(self, found: Answer) -> list[Row]:
        """Return name and value of each result."""
        raise NotImplementedError

    def _hear(self, line: str) -> None:
        self._said = line

    def show(self) -> None:
        """Draw the answer, or the state of the command."""
        told = self.told or ""
        if self.waits:
            waited_s = time.monotonic() - (self._began_s or 0.0)
            told = f"{self.WAITS}  {waited_s:.0f} s\n{self._said}"
        with suppress(NoMatches):  # left meanwhile
            text = "\n".join(map(printable, told.split("\n")))
            self.query_one("#result", Static).update(text)
            self.query_one("#keys", Static).update(f"\n{self.keys_text}")

    @property
    def keys_text(self) -> str:
        """Return the keys that work now."""
        return "[b]esc[/b] leave"

    def action_leave(self) -> None:
        """Close, and end a running command."""
        self.dismiss(None)


class EvaluationDialog(ResultDialog):
    """Computes the loss of a run's model on the held-out rows."""

    DEFAULT_CSS = DIALOG_CSS.format(name="EvaluationDialog", width=76)
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,enter,V", "leave", "Leave", show=False)
    ]
    TITLE_WORD = "Evaluate"
    WAITS = "the engine reads the model and its held-out data"

    def on_mount(self) -> None:
        super().on_mount()
        self.ask(EvaluationAnswer, self.model)

    def rows_of(self, found: Answer) -> list[Row]:
        """Return name and value of each result."""
        assert isinstance(found, EvaluationAnswer)
        perplexity = UNKNOWN if found.perplexity is None else number_text(found.perplexity)
        rows = f"{found.rows:,} sequences of {found.sequence_length:,}"
        return [
            ("loss", f"{loss_text(found.loss)} nats a token"),
            ("perplexity", perplexity),
            ("data", found.data),
            ("tokens", f"{found.tokens:,} in {rows}"),
            ("model", f"{found.model} in {found.dtype}, {found.placed}"),
            ("took", duration_text(found.seconds)),
            *(("note", note) for note in found.notes),
        ]


class ExportDialog(ResultDialog):
    """Asks what to write and where, and lets the engine write and check it."""

    DEFAULT_CSS = (
        DIALOG_CSS.format(name="ExportDialog", width=84)
        + """
    ExportDialog Input, ExportDialog Input:focus {
        height: 1; border: none; border-left: tall $accent; margin: 1 0; background: $panel;
    }
    """
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", "Leave", show=False),
        Binding("enter", "write", "Write", show=False),
        Binding("up", "pick(-1)", "Before", show=False),
        Binding("down", "pick(1)", "Next", show=False),
    ]
    AUTO_FOCUS = "ChoiceList"
    TITLE_WORD = "Export"
    WAITS = "the engine writes it and compares it with base and adapter"

    def __init__(
        self, model: str, title: str, program: tuple[str, ...] = (), *, whole: bool = False
    ) -> None:
        """Offer a `whole` model, or the forms of an adapter."""
        super().__init__(model, title, program)
        self._kinds = WHOLE if whole else ADAPTERS

    def compose_question(self) -> ComposeResult:
        yield ChoiceList(self._kinds, id="kinds")
        yield PathEntry(folders_only=True, id="folder")

    def on_mount(self) -> None:
        super().on_mount()
        self._propose()

    @property
    def kind(self) -> str:
        """Return what to write: model, merged or adapter."""
        return self._kinds[self.query_one(ChoiceList).chosen].id

    def on_choice_list_chosen(self) -> None:
        self._propose()

    def action_pick(self, offset: int) -> None:
        """Choose the other kind, also from the folder's field."""
        self.query_one(ChoiceList).action_move(offset)

    def _propose(self) -> None:
        """Write into the field a folder of the run that does not exist yet."""
        names = (self.kind, *(f"{self.kind}-{number}" for number in range(2, 1000)))
        free = (Path(self.model) / name for name in names)
        place = next(one for one in free if not one.exists())
        with suppress(ValueError):
            place = place.relative_to(Path.cwd())  # short enough to be seen whole
        box = self.query_one(PathEntry)
        box.value = str(place)
        box.cursor_position = len(box.value)

    def on_input_submitted(self) -> None:
        self.action_write()

    def action_write(self) -> None:
        """Start writing; once written, leave."""
        if self.waits:
            self.app.bell()
        elif self._is_written:
            self.action_leave()
        else:
            to = self.query_one(PathEntry).value.strip()
            merge = ("--merge",) if self.kind == "merged" else ()
            self.ask(ExportAnswer, self.model, "--progress", *merge, *(("--to", to) if to else ()))

    @property
    def _is_written(self) -> bool:
        return self.told is not None and not self.told.startswith("✗")

    @property
    def keys_text(self) -> str:
        """Return the keys that work now."""
        if self.waits:
            return "[b]esc[/b] end it: nothing is written then"
        if self._is_written:
            return "[b]enter[/b] [b]esc[/b] leave"
        return "[b]enter[/b] write   [b]↑↓[/b] choose   [b]tab[/b] folder   [b]esc[/b] leave"

    def rows_of(self, found: Answer) -> list[Row]:
        """Return name and value of what was written."""
        assert isinstance(found, ExportAnswer)
        checks = [part.line for part in (found.layers, found.logits) if part is not None]
        loads = "peft" if found.kind == "adapter" else "transformers"
        return [
            ("written", found.folder),
            ("size", f"{bytes_text(found.bytes)} in {found.files} files, {found.dtype}"),
            ("base", found.base),
            *(("checked", line) for line in checks),
            ("took", duration_text(found.seconds)),
            ("load it", f"as any folder of {loads}"),
            *(("note", note) for note in found.notes),
        ]
