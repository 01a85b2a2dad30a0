"""The header of a run, where adapters are trained."""

from __future__ import annotations

from types import ModuleType

from fluxtui.screens.chrome import header_line, method_text
from fluxtui.state.run import FoldedRun
from fluxtui.state.view import View
from fluxtui.widgets.spans import Line, width_of


def text_of(spans: Line) -> str:
    return "".join(text for text, _ in spans)


def test_the_header_says_what_of_the_model_is_trained(made: ModuleType) -> None:
    hello = made.hello(
        method="qlora", storage="nf4-double", rank=16, parameters=70_800_000_000,
        trained_parameters=207_000_000,
    )  # fmt: skip
    assert method_text(hello, whole=True) == ("qlora nf4-double, rank 16, 207 M of 70.8 B trained")
    assert method_text(hello, whole=False) == "qlora nf4-double"
    assert method_text(made.hello(), whole=True) == f"full {made.hello().dtype}"
    view = View(state=FoldedRun().after(hello))
    assert "rank 16, 207 M of 70.8 B trained" in text_of(header_line(view, 160))
    for width in (40, 80, 120):
        assert width_of(header_line(view, width)) <= width
