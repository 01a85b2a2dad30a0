"""The question asked first when an earlier wizard did not come to its end."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen

from fluxtui.answers.answers import Answers
from fluxtui.wizard.pages import drawing
from fluxtui.wizard.steps.widgets import Drawn


class DraftOffer(ModalScreen[bool]):
    """Offers kept answers: True to go on with them, False to start afresh."""

    DEFAULT_CSS = """
    DraftOffer { align: center middle; }
    DraftOffer > Vertical {
        width: 64; max-width: 90%; height: auto; border: round $accent; padding: 1 2;
        background: $surface;
    }
    """
    BINDINGS = [
        Binding("enter", "answer(True)", "go on"),
        Binding("n,escape", "answer(False)", "start afresh"),
    ]

    def __init__(self, draft: Answers) -> None:
        super().__init__()
        self._draft = draft

    def compose(self) -> ComposeResult:
        box = Vertical(Drawn(self._draw))
        box.border_title = "Unfinished answers"
        yield box

    def action_answer(self, go_on: bool) -> None:
        """Close with the answer."""
        self.dismiss(go_on)

    def _draw(self, width: int) -> Content:
        rows = [
            ("model", self._draft.model_path or "-"),
            ("data", self._draft.data_file or "-"),
            ("stopped at", drawing.TITLES[self._draft.step]),
        ]
        lines = [
            Content.assemble(
                (name.ljust(12), drawing.MUTED), (drawing.shortened(value, width - 12), "bold")
            )
            for name, value in rows
        ]
        keys = drawing.keys_line([("enter", "go on with them"), ("n", "start afresh")])
        return Content("\n").join([*lines, Content(""), keys])
