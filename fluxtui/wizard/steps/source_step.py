"""A step that asks where something comes from: a list, and below it a field for some choices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.content import Content
from textual.widgets import Input

from fluxtui.actions.key_map import own_bindings
from fluxtui.answers.answers import OF_COLUMNS, Answers
from fluxtui.answers.questions import ListOption, SourceField, SourceQuestion, data_question
from fluxtui.answers.rows import BY_KEY, turned
from fluxtui.widgets.entry import PrintableInput
from fluxtui.wizard.checks.answer_checks import reading_options
from fluxtui.wizard.pages.wizard_view import WizardView
from fluxtui.wizard.steps.path_entry import PathEntry
from fluxtui.wizard.steps.step import DrawPage, WizardStep
from fluxtui.wizard.steps.widgets import ChoiceList, Drawn


class SourceStep(WizardStep):
    """Asks a `SourceQuestion`, and shows the facts about the answer."""

    DEFAULT_CSS = """
    SourceStep Input {
        height: 3; border: round $secondary; background: transparent; padding: 0 1;
        margin-bottom: 1;
    }
    SourceStep Input:focus { border: round $accent; }
    SourceStep Input.-refused { border: round $error; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        *own_bindings(("wizard_read_as", "wizard_read_before")),
        *own_bindings(("list_up", "list_down"), list_up="pick(-1)", list_down="pick(1)"),
    ]

    def __init__(self, question: SourceQuestion, below: DrawPage) -> None:
        """Draw the facts about the answer with `below`."""
        super().__init__(question.step)
        self._question = question
        self._below = below

    def compose(self) -> ComposeResult:
        question = self._question
        yield Drawn(lambda width: Content.styled(self._question.text, "bold"))
        yield ChoiceList(question.options, id=f"{question.step}-choices")
        for field in question.fields.values():
            yield self._list(field) if field.kind == "list" else self._box(field)
        yield ChoiceList((), id=f"{question.step}-readings")
        yield Drawn(lambda width: self._below(self.view, width), id=f"{question.step}-found")

    def on_mount(self) -> None:
        """Open nothing before the first answers are shown."""
        for field in self._question.fields.values():
            self._widget(field).display = False
        self.readings.display = False

    def show(self, view: WizardView) -> None:
        """Draw this view; the text fields keep their text (see `fill`)."""
        if self.name_of_step == "data":
            self._ask(data_question(view.answers.of_images))
        source = getattr(view.answers, self._question.source)
        self.query_one(f"#{self._question.step}-choices", ChoiceList).show(source)
        for option, field in self._question.fields.items():
            widget = self._widget(field)
            widget.display = option == source
            if isinstance(widget, ChoiceList):
                widget.show(getattr(view.answers, field.name))
        check = view.checks.get(self.name_of_step)
        offered = reading_options(check)
        if offered != self.readings.options:
            self.readings.offer(offered)
        self.readings.display = bool(offered)
        for box in self.query(Input):
            refused = check is not None and check.error is not None and not check.open
            refused = refused and not offered
            box.set_class(refused and box.display, "-refused")
        super().show(view)

    def _ask(self, question: SourceQuestion) -> None:
        """Ask another question with the same fields."""
        if question is not self._question:
            self._question = question
            self.query_one(f"#{question.step}-choices", ChoiceList).offer(question.options)
            for field in question.fields.values():
                box = self._widget(field)
                if isinstance(box, Input):
                    box.placeholder, box.border_title = field.hint, field.title

    def fill(self, answers: Answers) -> None:
        """Put these answers into the text fields.

        Only when the step comes on screen: while somebody types, the fields are ahead of the
        answers that are made from them.
        """
        for box in self.query(Input):
            text = str(getattr(answers, _field_of(box)))
            if box.value != text:
                with box.prevent(Input.Changed):
                    box.value = text

    def offer(self, option: str, options: Sequence[ListOption]) -> None:
        """Fill the list that belongs to a choice."""
        widget = self._widget(self._question.fields[option])
        assert isinstance(widget, ChoiceList)
        widget.offer(options)

    @property
    def open_input(self) -> Input | None:
        """Return the text field of the present choice, if it has one."""
        typed = (field for field in self._question.fields.values() if field.kind != "list")
        boxes = (self.query_one(f"#{field.name}-input", Input) for field in typed)
        return next((box for box in boxes if box.display), None)

    def take_focus(self) -> None:
        """Focus the list first."""
        self.query_one(f"#{self._question.step}-choices", ChoiceList).focus()

    @property
    def readings(self) -> ChoiceList:
        """Return the ways to read the data's columns, where several are possible."""
        return self.query_one(f"#{self._question.step}-readings", ChoiceList)

    def action_pick(self, offset: int) -> None:
        """Mark another way to read the columns; without one scroll."""
        if self.readings.display:
            self.readings.action_move(offset)
        else:
            self.scroll_relative(y=offset, animate=False)

    def action_read_as(self, offset: int) -> None:
        """Read the data in the next shape; after the last one, as its keys say."""
        if self.name_of_step == "data":
            row = BY_KEY["data.format"]
            now = self.view.answers.settings.get(row.key)
            self.answer({row.key: turned(row, now, offset), **OF_COLUMNS})

    def on_key(self, event: events.Key) -> None:
        """Send keys typed on the list to the text field below it.

        Keys that were queued for the list when the field got the focus arrive after keys that went
        to the field directly; they are inserted before these, in the order of typing.
        """
        box = self.open_input
        if box is None or not event.is_printable or not event.character:
            return
        event.stop()
        event.prevent_default()
        if self.screen.focused is not box:
            self.typed_at = box.cursor_position
            self.screen.set_focus(box)
        self.insert_late(box, event.character)

    def _box(self, field: SourceField) -> Input:
        name = f"{field.name}-input"
        box: Input = (
            PrintableInput(placeholder=field.hint, id=name)
            if field.kind == "text"
            else PathEntry(folders_only=field.kind == "folder", placeholder=field.hint, id=name)
        )
        box.select_on_focus = False  # what is typed on the list goes on in the field
        box.border_title = field.title
        return box

    def _list(self, field: SourceField) -> ChoiceList:
        return ChoiceList((), empty=field.hint, id=f"{field.name}-list")

    def _widget(self, field: SourceField) -> ChoiceList | Input:
        if field.kind == "list":
            return self.query_one(f"#{field.name}-list", ChoiceList)
        return self.query_one(f"#{field.name}-input", Input)

    @on(ChoiceList.Chosen)
    def _chosen(self, event: ChoiceList.Chosen) -> None:
        event.stop()
        if event.choices is self.readings:
            return  # Enter takes the marked one
        if event.choices.id != f"{self._question.step}-choices":
            field_name = (event.choices.id or "").removesuffix("-list")
            self.answer({field_name: event.option.id})
            return
        changes: dict[str, Any] = {self._question.source: event.option.id}
        field = self._question.fields.get(event.option.id)
        if field is not None and field.kind == "list":
            changes |= self._first_of(field)
        self.answer(changes)

    def _first_of(self, field: SourceField) -> dict[str, Any]:
        """Choose the first line of a list that opens, unless another one was chosen before."""
        widget = self._widget(field)
        assert isinstance(widget, ChoiceList)
        ids = [option.id for option in widget.options]
        before = getattr(self.view.answers, field.name)
        return {} if before in ids or not ids else {field.name: ids[0]}

    @on(Input.Changed)
    def _typed(self, event: Input.Changed) -> None:
        event.stop()
        self.answer({_field_of(event.input): event.value})


def _field_of(box: Input) -> str:
    return (box.id or "").removesuffix("-input")
