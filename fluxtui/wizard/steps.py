"""The five steps of the wizard. Each draws the answers it is shown and posts what changes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.suggester import Suggester
from textual.widgets import Input

from fluxtui.wizard import drawing
from fluxtui.wizard.answers import OFFLOADS, Answers, StepName
from fluxtui.wizard.checks import Check
from fluxtui.wizard.widgets import ChoiceList, Drawn, Option

_SAMPLE_LINES = 4


class Answered(Message):
    """The user changed these fields of the answers."""

    def __init__(self, changes: Mapping[str, Any]) -> None:
        super().__init__()
        self.changes = changes


class PathSuggester(Suggester):
    """Completes a path with the first name in its folder that begins like it."""

    def __init__(self, folders_only: bool) -> None:
        super().__init__(use_cache=False, case_sensitive=True)
        self._folders_only = folders_only

    async def get_suggestion(self, value: str) -> str | None:
        """The completed path; listing a folder may be slow, so it happens in a thread."""
        return await asyncio.to_thread(complete_path, value, self._folders_only)


def complete_path(value: str, folders_only: bool) -> str | None:
    """`value` completed to an existing path, or None; hidden names only when asked for."""
    if not value.strip():
        return None
    head, begun = os.path.split(value)
    try:
        with os.scandir(Path(head or ".").expanduser()) as entries:
            names = sorted(
                entry.name + ("/" if entry.is_dir() else "")
                for entry in entries
                if entry.name.startswith(begun) and (entry.is_dir() or not folders_only)
            )
    except OSError:
        return None
    shown = [name for name in names if begun or not name.startswith(".")]
    return os.path.join(head, shown[0]) if shown else None


class Step(VerticalScroll, can_focus=False):
    """One page of the wizard."""

    DEFAULT_CSS = """
    Step { height: 1fr; scrollbar-size-vertical: 1; scrollbar-background: $background; }
    Step > Drawn, Step > ChoiceList { margin-bottom: 1; }
    """
    name_of_step: StepName
    question = ""

    def take_focus(self) -> None:
        """Put the focus where the first key press is wanted."""


class SourceStep(Step):
    """A choice of where something comes from, with a text field for some of the choices."""

    DEFAULT_CSS = """
    SourceStep Input {
        height: 3; border: round $secondary; background: transparent; padding: 0 1;
        margin-bottom: 1;
    }
    SourceStep Input:focus { border: round $accent; }
    SourceStep Input.-refused { border: round $error; }
    """
    source_field = ""
    options: Sequence[Option] = ()
    fields: Mapping[str, tuple[str, str, str]] = {}  # option: field of the answers, title, hint
    _typed_at = 0  # where in the field the next key that was typed on the list belongs

    def compose(self) -> ComposeResult:
        yield Drawn(lambda width: Content.styled(self.question, "bold"))
        yield ChoiceList(self.options)
        for option, (field, title, hint) in self.fields.items():
            suggester = None if option == "hub" else PathSuggester(option == "folder")
            box = Input(placeholder=hint, suggester=suggester, id=f"{field}-input")
            box.select_on_focus = False  # what is typed on the list goes on in the field
            box.border_title = title
            box.display = False
            yield box
        yield Drawn(id="found")
        yield Drawn(id="samples")

    def show(self, answers: Answers) -> None:
        """Draw these answers; the text fields keep what is in them (see `fill`)."""
        source = getattr(answers, self.source_field)
        self.query_one(ChoiceList).show(source)
        for option, (field, _, _) in self.fields.items():
            self.query_one(f"#{field}-input", Input).display = option == source

    def fill(self, answers: Answers) -> None:
        """Put these answers into the text fields.

        Only when the step comes on screen: while somebody types, the fields are ahead of the
        answers that are made from them.
        """
        for field, _, _ in self.fields.values():
            box = self.query_one(f"#{field}-input", Input)
            if box.value != getattr(answers, field):
                with box.prevent(Input.Changed):
                    box.value = getattr(answers, field)

    def show_check(self, check: Check | None) -> None:
        """Draw what is known about the answer; None while it is being looked at."""

        def found(width: int) -> Content:
            if check is None:
                return Content.styled("looking ...", drawing.MUTED)
            if check.error and check.open:
                return drawing.paragraph(check.error, width, drawing.MUTED)
            if check.error:
                return drawing.problem(check.error, width)
            lines = [drawing.facts(check.facts, width)]
            lines += [drawing.caution(warning, width) for warning in check.warnings]
            return Content("\n").join(lines)

        def shown_samples(width: int) -> Content:
            if check is None or not check.samples:
                return Content("")
            title = Content.assemble(
                ("First documents", "bold"),
                ("   ▌ is learnt", drawing.MUTED),
            )
            body = drawing.samples(check.samples, width, _SAMPLE_LINES)
            return Content("\n").join([title, body])

        self.query_one("#found", Drawn).show(found)
        below = self.query_one("#samples", Drawn)
        below.show(shown_samples)
        below.display = bool(check and check.samples)
        for box in self.query(Input):
            refused = check is not None and check.error is not None and not check.open
            box.set_class(refused and box.display, "-refused")

    @property
    def open_input(self) -> Input | None:
        """The text field of the present choice, if it has one."""
        return next((box for box in self.query(Input) if box.display), None)

    def take_focus(self) -> None:
        """The list has the focus first."""
        self.query_one(ChoiceList).focus()

    def on_key(self, event: events.Key) -> None:
        """What is typed on the list belongs into the text field below it.

        Keys that were on their way to the list when the field got the focus come here after keys
        that went to the field at once: they are put before those, where they were typed.
        """
        box = self.open_input
        if box is None or not event.is_printable or not event.character:
            return
        event.stop()
        event.prevent_default()
        if self.screen.focused is not box:
            self._typed_at = box.cursor_position
            self.screen.set_focus(box)
        cursor = box.cursor_position
        box.insert(event.character, self._typed_at)
        if cursor > self._typed_at:
            box.cursor_position = cursor + 1
        self._typed_at += 1

    @on(ChoiceList.Chosen)
    def _chosen(self, event: ChoiceList.Chosen) -> None:
        event.stop()
        self.post_message(Answered({self.source_field: event.option.id}))

    @on(Input.Changed)
    def _typed(self, event: Input.Changed) -> None:
        event.stop()
        field = (event.input.id or "").removesuffix("-input")
        self.post_message(Answered({field: event.value}))


class ModelStep(SourceStep):
    """Which model learns."""

    name_of_step = "model"
    question = "Which model shall learn?"
    source_field = "model_source"
    options = (
        Option("demo", "Demo", "a small Llama, made here; trains on two cores"),
        Option("folder", "Folder", "a Hugging Face model on this machine"),
        Option("hub", "Hub", "an id on the Hugging Face hub"),
    )
    fields = {
        "folder": ("model_folder", "folder", "~/models/Qwen2.5-0.5B"),
        "hub": ("model_hub", "hub id", "Qwen/Qwen2.5-0.5B"),
    }


class DataStep(SourceStep):
    """What it learns from."""

    name_of_step = "data"
    question = "What shall it learn from?"
    source_field = "data_source"
    options = (
        Option("demo", "Demo", "the docstrings of Python's standard library"),
        Option("path", "File", ".txt, .jsonl with `text`, or .jsonl with `messages`"),
    )
    fields = {"path": ("data_path", "file", "~/data/conversations.jsonl")}


class MethodStep(Step):
    """How it learns: one way so far."""

    name_of_step = "method"
    question = "How shall it learn?"

    def compose(self) -> ComposeResult:
        yield Drawn(lambda width: Content.styled(self.question, "bold"))
        yield ChoiceList(
            (Option("full", "Full", "every weight is trained, in the model's own dtype"),)
        )
        yield Drawn(self._explain)

    def take_focus(self) -> None:
        """The list has the focus."""
        self.query_one(ChoiceList).focus()

    def _explain(self, width: int) -> Content:
        text = (
            "Weights, gradients and AdamW's state need about 14 bytes for each parameter. What "
            "the GPU has no room for lives in host memory and is streamed block by block; the "
            "next step shows where everything goes and why."
        )
        return drawing.paragraph(text, width, drawing.MUTED)


class PlanStep(Step, can_focus=True):
    """What the engine would do, before it does it."""

    name_of_step = "plan"
    DEFAULT_CSS = """
    PlanStep > Vertical { height: auto; }
    PlanStep #steps-input {
        display: none; height: 3; width: 34; border: round $accent; background: transparent;
        margin-bottom: 1;
    }
    """
    BINDINGS = [
        Binding("left", "offload(-1)", "offload", show=False),
        Binding("right", "offload(1)", "offload", show=False),
        Binding("s", "steps", "steps", show=False),
        Binding("r", "again", "plan again", show=False),
        Binding("up,k", "scroll_up", "scroll", show=False),
        Binding("down,j", "scroll_down", "scroll", show=False),
    ]

    class AskedAgain(Message):
        """The user wants the same answers planned once more: the machine may have changed."""

    def __init__(self) -> None:
        super().__init__()
        self._answers = Answers()

    def compose(self) -> ComposeResult:
        yield Drawn(id="dials")
        box = Input(type="integer", placeholder="as the plan says", id="steps-input")
        box.border_title = "optimizer steps"
        yield Vertical(box)
        yield Drawn(id="plan")

    def show(self, answers: Answers) -> None:
        """Draw the two settings that can be changed here."""
        self._answers = answers

        def dials(width: int) -> Content:
            steps = "auto" if answers.steps is None else str(answers.steps)
            return Content.assemble(
                ("The plan", "bold"),
                ("      offload ", drawing.MUTED),
                (f"‹ {answers.offload} ›", "bold $accent"),
                ("      steps ", drawing.MUTED),
                (steps, "bold $accent"),
            )

        self.query_one("#dials", Drawn).show(dials)

    def show_plan(self, draw: Any) -> None:
        """Draw the plan, why there is none, or that it is being made."""
        self.query_one("#plan", Drawn).show(draw)

    def take_focus(self) -> None:
        """The page itself, so that its keys work."""
        self.focus()

    def action_offload(self, offset: int) -> None:
        """Turn the offload dial."""
        index = OFFLOADS.index(self._answers.offload) + offset
        if 0 <= index < len(OFFLOADS):
            self.post_message(Answered({"offload": OFFLOADS[index]}))

    def action_steps(self) -> None:
        """Ask for another number of steps."""
        box = self.query_one("#steps-input", Input)
        box.value = "" if self._answers.steps is None else str(self._answers.steps)
        box.display = True
        box.focus()

    def action_again(self) -> None:
        """Plan the same answers once more."""
        self.post_message(self.AskedAgain())

    @property
    def asks_for_steps(self) -> bool:
        """The field for the number of steps is open."""
        return bool(self.query_one("#steps-input", Input).display)

    def close_field(self) -> None:
        """Close the field for the number of steps and keep what was set before."""
        self.query_one("#steps-input", Input).display = False
        self.focus()

    @on(Input.Submitted, "#steps-input")
    def _steps_given(self, event: Input.Submitted) -> None:
        event.stop()
        text = event.value.strip()
        if text and not (text.isdecimal() and int(text) > 0):
            self.notify("a whole number from 1 up, or nothing for auto", severity="error")
            return
        self.close_field()
        self.post_message(Answered({"steps": int(text) if text else None}))


class LaunchStep(Step, can_focus=True):
    """Everything once more, and Enter starts it."""

    name_of_step = "launch"
    BINDINGS = [
        Binding("up,k", "scroll_up", "scroll", show=False),
        Binding("down,j", "scroll_down", "scroll", show=False),
    ]

    def compose(self) -> ComposeResult:
        yield Drawn(id="launch")

    def show_launch(self, draw: Any) -> None:
        """Draw the launch, or why it failed."""
        self.query_one("#launch", Drawn).show(draw)

    def take_focus(self) -> None:
        """The page itself, so that it can be scrolled."""
        self.focus()
