"""Characters that take two cells or none: nothing is lost at an edge, and columns stay columns."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.cells import cell_len

from fluxtrain.events.run_folder.run_dir import RunSummary
from fluxtui.panels.log import rows
from fluxtui.screens.run_rows import run_row
from fluxtui.state.run import LogLine
from fluxtui.widgets.spans import cut, cut_in_front, width_of, wrapped
from fluxtui.wizard.pages import drawing

CHINESE = "模型训练正在进行中这是一个很长的句子没有空格"
TEXTS = (
    CHINESE,
    f"loss {CHINESE} is 2.5",
    "한국어 문장 " * 6,
    "e\u0301" * 40,
    "🙂" * 30,
    "plain words",
)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("width", [2, 3, 7, 20, 51])
def test_wrapped_text_fits_its_cells_and_is_whole(text: str, width: int) -> None:
    for lines in (wrapped(text, width), drawing.in_lines(text, width)):
        assert all(cell_len(line) <= width for line in lines)
        assert "".join(lines).replace(" ", "") == text.replace(" ", "")


def test_a_long_line_of_the_log_without_a_blank_is_whole() -> None:
    lines = rows(LogLine(0.0, "info", "sample", CHINESE * 3), 40)
    assert all(width_of(line) <= 40 for line in lines)
    assert "".join(line[-1][0] for line in lines) == CHINESE * 3


@pytest.mark.parametrize("text", [CHINESE, "layers.11.mlp", "e\u0301" * 20])
@pytest.mark.parametrize("cells", [0, 1, 2, 5, 9, 60])
def test_what_is_cut_keeps_one_end_and_fits(text: str, cells: int) -> None:
    front, end = cut(text, cells), cut_in_front(text, max(1, cells))
    assert cell_len(front) <= cells and cell_len(end) <= max(1, cells)
    assert text.startswith(front.rstrip("… ")) and text.endswith(end.removeprefix("…"))
    assert (front == text) == (cell_len(text) <= cells)
    assert cell_len(drawing.shortened(text, max(2, cells))) <= max(2, cells)


def test_the_columns_of_a_list_of_runs_stand_below_each_other() -> None:
    def row(name: str) -> str:
        run = RunSummary(
            run_id=name, path=f"/runs/{name}", state="running", started_s=0.0, updated_s=0.0,
            step=3, total_steps=200, loss=2.5,
        )  # fmt: skip
        line = run_row(run, Path("/elsewhere"), 100.0, 120)
        assert width_of(line) == 120
        return "".join(text for text, _ in line)

    plain = row("20261121-031500-demo")
    for name in (CHINESE, "模型", "🙂" * 40):
        shown = row(name)
        assert cell_len(shown[: shown.index("3/200")]) == plain.index("3/200")
