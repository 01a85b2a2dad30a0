"""Screen 2: layers over time against the plan, and one block with its bytes and copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace as changed
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from msgspec.structs import replace

from fluxtrain.units import bytes_text
from fluxtui.panels import PANELS
from fluxtui.panels.residency import pick
from fluxtui.plots.stack import Layer, stacked
from fluxtui.state.run import FoldedRun
from fluxtui.state.view import ChartSettings, View
from fluxtui.widgets.spans import Line, width_of


def text_of(spans: Line) -> str:
    return "".join(text for text, _ in spans)


def whole(lines: Sequence[Line]) -> str:
    return "\n".join(text_of(spans) for spans in lines)


def view_of(made: ModuleType, **chart: Any) -> View:
    state = FoldedRun().after_all(made.training(80))
    last_s = state.last_wall_s or 0.0
    return View(state=state, wall_s=last_s + 0.5, chart=ChartSettings(**chart))


def drawn(view: View, panel: str, width: int = 60, height: int = 12) -> str:
    return whole(PANELS[panel].body(view, width, height))


# --- layers over time -----------------------------------------------------------------------------


def test_a_peak_between_two_columns_is_seen() -> None:
    values = [100.0] * 2000
    values[777] = 900.0
    lines = stacked(
        [float(i) for i in range(2000)], [Layer(values, "cache", "C")], 60, 12, bytes_text
    )
    assert "█" in whole(lines[:1]) or any(role == "on:cache" for _, role in lines[1])


# --- one block ------------------------------------------------------------------------------------


def test_a_block_shows_where_its_parts_are_and_their_bytes(made: ModuleType) -> None:
    text = drawn(view_of(made, block=0), "block")
    weights, gradients, optimizer = text.splitlines()[:3]
    assert "G" in weights and "1.00 MiB" in weights and "device" in weights
    assert "device" in gradients
    assert "5.01 MiB" in optimizer and "host" in optimizer
    assert "1 of 8" in whole([PANELS["block"].heading(view_of(made, block=0), 60)])
    assert "layers.0" in whole([PANELS["block"].heading(view_of(made, block=0), 60)])


def test_a_stale_residency_shows_no_block(made: ModuleType) -> None:
    view = changed(view_of(made, block=2), wall_s=view_of(made).wall_s + 3600)
    assert "MiB" not in drawn(view, "block") and "-" in drawn(view, "block")
    assert "last sample" in whole([PANELS["block"].heading(view, 60)])


@pytest.mark.parametrize("width", [60, 90, 160])
def test_a_click_looks_into_the_block_that_is_drawn_there(made: ModuleType, width: int) -> None:
    for block in range(8):
        row = PANELS["residency"].body(view_of(made, block=block), width, 3)[0]
        column = 0
        for text, role in row:
            if role == "selected":
                break
            column += len(text)
        found = pick(view_of(made), width, 3, column, 0)
        assert found is not None and found.block == block
    assert pick(view_of(made), width, 3, 2, 0) is None
    assert pick(View(), width, 3, 20, 0) is None


async def test_keys_go_from_block_to_block_and_stop_at_the_ends(
    made: ModuleType, tmp_path: Path, app_pilot: Any
) -> None:
    made.write(tmp_path / "runs" / "demo" / "events.ndjson", made.training(80))
    app = app_pilot.app_on(tmp_path / "runs" / "demo", made, start_screen="memory")
    async with app.run_test(size=(120, 40)) as pilot:
        await app_pilot.drawn(pilot)
        await pilot.press("right", "l", "l")
        assert app.view.chart.block == 3
        await app_pilot.until(pilot, lambda: "layers.3" in app_pilot.text_of(app))
        await pilot.press("h", "L")
        assert app.view.chart.block == 7
        await pilot.press("H", "left")
        assert app.view.chart.block == 0


def test_frozen_and_packed_bytes_are_told_apart(made: ModuleType) -> None:
    view = view_of(made)
    kinds = {"frozen_bytes": 1 << 20, "packed_bytes": 4 << 20}
    [run] = made.residency().blocks
    block = replace(run, weights_bytes=600_000, frozen_bytes=100_000, packed_bytes=400_000)
    sample = replace(view.state.residency, weights_bytes=6 << 20, blocks=(block,), **kinds)
    state = view.state.after(sample)
    packed = changed(view, state=state)
    told = whole([PANELS["residency"].heading(packed, 110)])
    assert "trained 1.00 MiB" in told and "frozen 1.00 MiB" in told and "packed 4.00 MiB" in told
    assert "packed 391 KiB" in drawn(packed, "block")
    assert "packed" not in whole([PANELS["residency"].heading(view, 110)])
    for name in ("residency", "block", "memory", "categories"):
        for width in (30, 60, 110):
            assert all(width_of(line) <= width for line in PANELS[name].body(packed, width, 9))


def test_memory_of_frozen_packed_and_unpacked_weights_has_rows_where_there_is_any(
    made: ModuleType,
) -> None:
    view = view_of(made)
    assert "packed" not in drawn(view, "categories")
    sample = view.state.memory
    by = {**sample.device_by, "packed": 3 << 20, "unpacked": 1 << 20}
    used = sample.device_used_bytes + (4 << 20)
    told = replace(sample, device_by=by, device_used_bytes=used)
    state = view.state.after(told)
    text = drawn(changed(view, state=state), "categories")
    assert "packed" in text and "unpacked" in text and "frozen" not in text


@pytest.mark.parametrize("panel", ["memory", "categories"])
def test_frozen_weights_on_disk_have_a_row_where_there_are_some(
    made: ModuleType, panel: str
) -> None:
    view = view_of(made)
    sample = view.state.memory
    assert sample is not None and "on disk" not in drawn(view, panel, width=160, height=30)
    state = view.state.after(replace(sample, disk_bytes=35 << 30))
    assert "35.0 GiB" in drawn(changed(view, state=state), panel, width=160, height=30)
