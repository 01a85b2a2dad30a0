"""Screen 2: layers over time against the plan, and one block with its bytes and copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace as changed
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from msgspec.structs import replace

from fluxtrain.events import events as ev
from fluxtrain.units import bytes_text
from fluxtui.panels import PANELS
from fluxtui.panels.block import bytes_of, name_of
from fluxtui.panels.residency import pick, tiles
from fluxtui.plots.stack import Layer, stacked
from fluxtui.state.run import FoldedRun
from fluxtui.state.view import ChartSettings, View
from fluxtui.widgets.spans import Line, width_of

MIB = 1 << 20


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


def rows_of(layers: Sequence[Layer], role: str, count: int, mark: float | None = None) -> int:
    """How many rows of the chart's last column are of a role."""
    lines = stacked([float(i) for i in range(count)], layers, 80, 21, bytes_text, mark)
    assert {width_of(spans) for spans in lines} == {80} and len(lines) == 21
    return sum(role in spans[-1][1] for spans in lines[:-1])


def test_layers_are_as_high_as_their_share() -> None:
    layers = [Layer([300.0] * 9, "weights", "W"), Layer([100.0] * 9, "cache", "C")]
    weights, cache = rows_of(layers, "weights", 9), rows_of(layers, "cache", 9)
    assert weights + cache in (19, 20) and weights / (weights + cache) == pytest.approx(0.75, 0.08)


def test_a_layer_that_goes_away_leaves_its_place_to_the_ground() -> None:
    layers = [Layer([400.0] * 8 + [100.0], "weights", "W")]
    lines = stacked([float(i) for i in range(9)], layers, 80, 21, bytes_text)
    filled = [sum(role == "on:weights" for _, role in spans) for spans in lines]
    last = sum(spans[-1][1] == "on:weights" for spans in lines[:-1])
    assert max(filled) >= 1 and 4 <= last <= 5


def test_a_peak_between_two_columns_is_seen() -> None:
    values = [100.0] * 2000
    values[777] = 900.0
    lines = stacked(
        [float(i) for i in range(2000)], [Layer(values, "cache", "C")], 60, 12, bytes_text
    )
    assert "█" in whole(lines[:1]) or any(role == "on:cache" for _, role in lines[1])


def test_the_plan_is_drawn_across_what_is_empty_and_over_what_is_not() -> None:
    low = stacked([0.0, 1.0], [Layer([100.0, 100.0], "cache", "C")], 60, 12, bytes_text, 300.0)
    assert whole(low).count("╌") == 60 - 11
    high = stacked([0.0, 1.0], [Layer([500.0, 500.0], "cache", "C")], 60, 12, bytes_text, 300.0)
    assert whole(high).count("╌") > 30


def test_each_layer_is_lettered_for_those_who_see_no_colours(made: ModuleType) -> None:
    text = drawn(view_of(made), "memory_history", 70, 60)
    for letter in "WGACP":
        assert letter in text.replace("GiB", "").replace("MiB", ""), letter


def test_a_chart_needs_two_samples_and_some_room() -> None:
    layer = [Layer([1.0], "cache", "C")]
    assert stacked([0.0], layer, 60, 12, bytes_text) == []
    assert stacked([0.0, 1.0], [Layer([1.0, 1.0], "cache", "C")], 14, 12, bytes_text) == []
    assert "no sample" in whole(PANELS["memory_history"].body(View(), 60, 12))


# --- one block ------------------------------------------------------------------------------------


def test_a_block_shows_where_its_parts_are_and_their_bytes(made: ModuleType) -> None:
    text = drawn(view_of(made, block=0), "block")
    weights, gradients, optimizer = text.splitlines()[:3]
    assert "G" in weights and "1.00 MiB" in weights and "device" in weights
    assert "device" in gradients
    assert "5.01 MiB" in optimizer and "host" in optimizer
    assert "1 of 8" in whole([PANELS["block"].heading(view_of(made, block=0), 60)])
    assert "layers.0" in whole([PANELS["block"].heading(view_of(made, block=0), 60)])


def test_its_latest_copies_are_told_with_their_cause_newest_first(made: ModuleType) -> None:
    text = drawn(view_of(made, block=3), "block", 60, 8)
    rows = text.splitlines()
    assert "in" in rows[3] and "out" in rows[3] and "steps" in rows[3]
    assert [row.split()[0] for row in rows[4:]] == ["80", "79", "78", "77"]
    assert "C→G" in rows[4] and "400 us" in rows[4] and "prefetch" in rows[4]
    other = drawn(view_of(made, block=2), "block", 60, 8)
    assert "G→C" in other and "gradient" in other and "prefetch" not in other


def test_copies_are_called_a_sample_where_more_were_made_than_told(made: ModuleType) -> None:
    event = made.moves(1)
    for total, sampled in ((len(event.moves), False), (len(event.moves) + 1, True)):
        events = [*made.training(1)[:1], made.residency(1), replace(event, total=total)]
        state = FoldedRun().after_all(made.stamped(events))
        view = View(state=state, wall_s=made.START_S + 1.0, chart=ChartSettings(block=3))
        assert ("sampled copies" in drawn(view, "block")) == sampled
        assert ("a sample of them" in whole([PANELS["moves"].heading(view, 60)])) == sampled


def test_a_trainer_that_did_not_tell_sizes_leaves_dashes(made: ModuleType) -> None:
    view = view_of(made, block=2)
    bare = replace(view.state.residency, blocks=())
    view = changed(view, state=replace(view.state, residency=bare))
    assert drawn(view, "block").splitlines()[0].split()[2] == "-"
    assert "none in the sample of copies" in drawn(view, "block")


def test_a_stale_residency_shows_no_block(made: ModuleType) -> None:
    view = changed(view_of(made, block=2), wall_s=view_of(made).wall_s + 3600)
    assert "MiB" not in drawn(view, "block") and "-" in drawn(view, "block")
    assert "last sample" in whole([PANELS["block"].heading(view, 60)])


def test_names_and_sizes_come_from_the_run_that_a_block_is_in() -> None:
    runs = (
        ev.BlockRun(name="a.{}", first=0, count=2, weights_bytes=1, gradients_bytes=2,
                    optimizer_bytes=3),
        ev.BlockRun(name="b.{}.x", first=5, count=2, weights_bytes=4, gradients_bytes=5,
                    optimizer_bytes=6),
    )  # fmt: skip
    sample = ev.ResidencySampled(
        weights="GGCCC", gradients=".....", optimizer="CCCCC", weights_bytes=0,
        gradients_bytes=0, optimizer_bytes=0, blocks=runs,
    )  # fmt: skip
    assert [name_of(sample, i) for i in range(5)] == ["a.0", "a.1", "b.5.x", "b.6.x", ""]
    assert [bytes_of(sample, i)[0] for i in range(5)] == [1, 1, 4, 4, None]


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


def test_the_chosen_block_is_marked_also_without_tiles() -> None:
    for room in (40, 9):
        marked = [text for text, role in tiles("GGCCGGCC", room, 3) if role == "selected"]
        assert "".join(marked).strip() == "C"


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
