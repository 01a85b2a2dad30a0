"""Runs on several cards: a row or a column each, the card of each block, lanes by card."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from msgspec.structs import replace as with_fields

from fluxtrain.events.events import Planned, RankStep
from fluxtrain.events.trace.ring import RingReader
from fluxtui.app import FluxApp
from fluxtui.csv_tables import csv_of
from fluxtui.panels import PANELS
from fluxtui.panels.cards import rows_of
from fluxtui.panels.residency import card_tiles, tiles
from fluxtui.screens import arrangement
from fluxtui.screens.panel_screen import framed
from fluxtui.screens.plan import plan_lines
from fluxtui.state.machine_sample import GpuSample, GpuUser, MachineSample
from fluxtui.state.run import FoldedRun
from fluxtui.state.timeline import Timeline
from fluxtui.state.view import View
from fluxtui.widgets.lines import Lines
from fluxtui.widgets.spans import Line, width_of
from tests.tui import made_cards

SIZES = [(80, 24), (120, 40), (200, 60)]
SOME = [2, 4, 8]


def view_of(cards: int, folder: Path | None = None) -> View:
    state = FoldedRun().after_all(made_cards.training(cards))
    timeline = Timeline()
    if folder is not None:
        made_cards.write(folder, cards)
        reader = RingReader(folder / "timeline.ring")
        reader.poll()
        timeline = Timeline(reader.exists, reader.steps)
    return View(state=state, wall_s=(state.last_wall_s or 0) + 0.1, timeline=timeline)


def text_of(lines: list[Line]) -> str:
    return "\n".join("".join(text for text, _ in spans) for spans in lines)


@pytest.mark.parametrize("size", [(width, height - 2) for width, height in SIZES])
def test_one_card_has_the_places_that_it_had_and_several_have_a_panel_of_their_own(
    size: tuple[int, int],
) -> None:
    for places in (arrangement.dashboard, arrangement.memory, arrangement.transfer):
        assert places(*size) == places(*size, cards=1)
        assert not {"cards", "card_memory"} & set(places(*size))
    for cards in SOME:
        found = arrangement.dashboard(*size, cards=cards)
        assert "cards" in found and "memory" not in found
        assert "card_memory" in arrangement.memory(*size, cards=cards)


@pytest.mark.parametrize("cards", SOME)
@pytest.mark.parametrize("size", [(width, height - 2) for width, height in SIZES])
def test_places_cover_the_screen_and_no_two_overlap(cards: int, size: tuple[int, int]) -> None:
    for places in (arrangement.dashboard, arrangement.memory, arrangement.transfer):
        found = places(*size, cards=cards)
        cells = [
            (x, y)
            for place in found.values()
            for x in range(place.rect.x, place.rect.x + place.rect.width)
            for y in range(place.rect.y, place.rect.y + place.rect.height)
        ]
        assert len(cells) == len(set(cells)), places
        assert {y for _, y in cells} == set(range(size[1])), places
        assert max(x for x, _ in cells) == size[0] - 1
        assert all(place.rect.height >= 1 for place in found.values())


@pytest.mark.parametrize("cards", SOME)
@pytest.mark.parametrize("size", SIZES)
def test_every_card_shows_its_memory_at_every_size(cards: int, size: tuple[int, int]) -> None:
    view, (width, height) = view_of(cards), size
    for name, places in (
        ("cards", arrangement.dashboard(width, height - 2, cards=cards)),
        ("card_memory", arrangement.memory(width, height - 2, cards=cards)),
    ):
        place = places[name]
        text = text_of(framed(PANELS[name], view, width, place.rect.height, place.frame))
        for card in view.state.memory.cards if view.state.memory else ():
            assert f"{card.used_bytes / (1 << 30):.1f} GiB" in text, (name, card.number)


@pytest.mark.parametrize("cards", [*SOME, 30])
@pytest.mark.parametrize("name", ["cards", "card_memory", "residency", "lanes", "rates", "bus"])
def test_panels_of_several_cards_keep_their_boxes(cards: int, name: str, tmp_path: Path) -> None:
    view = view_of(cards, tmp_path)
    for width, height in ((1, 1), (9, 3), (38, 7), (76, 10), (116, 5), (196, 30)):
        assert len(PANELS[name].body(view, width, height)) <= height
        if width > 30:
            lines = framed(PANELS[name], view, width, height, "box")
            assert {width_of(spans) for spans in lines} == {width}


def test_a_wide_row_tells_memory_copies_and_blocks_of_its_card() -> None:
    first, second = PANELS["cards"].body(view_of(2), 116, 3)[:2]
    text = text_of([second])
    assert text.startswith("1 ") and "of 23.0 GiB" in text and "16 blocks" in text
    assert "H2D 10.5 GB/s" in text and "from cards 3.20 GB/s" in text
    assert "H2D 21.0 GB/s" in text_of([first])


def view_of_ranks(count: int, cards: int = 1) -> View:
    view = view_of(1)
    assert view.state.step is not None
    ranks = tuple(
        RankStep(
            machine=f"node{rank // 4}", card=rank % 4 * cards, tokens_per_s=5000.0 + rank,
            busy_s=0.5 + 0.01 * rank, waited_s=0.1, used_bytes=(rank + 1) << 30,
            limit_bytes=23 << 30, cards=cards,
        )
        for rank in range(count)
    )  # fmt: skip
    state = with_fields(view.state, step=with_fields(view.state.step, ranks=ranks))
    return replace(view, state=state)


def test_processes_have_a_row_each_with_their_skew() -> None:
    view, panel = view_of_ranks(2), PANELS["cards"]
    assert (view.cards, view.ranks) == (1, 2)
    assert "2 processes  skew 10 ms  slowest rank 1" in text_of([panel.heading(view, 60)])
    first, second = text_of(panel.body(view, 78, 2)).splitlines()
    assert "host" in text_of(panel.body(view, 78, 3)).splitlines()[2].lower()
    assert "1.00 GiB" in first and "waits  100 ms" in first and "card 0 of node0" in first
    assert second.startswith("1 ") and "5.00 k tok/s" in second
    assert "cards 2 to 3 of node0" in text_of([panel.body(view_of_ranks(2, 2), 78, 2)[1]])
    for width, height in ((78, 2), (40, 3), (118, 8)):
        lines = panel.body(view_of_ranks(8), width, height)
        assert len(lines) <= height and all(width_of(line) <= width for line in lines)


def test_tables_have_columns_for_each_card() -> None:
    rows = list(csv.DictReader(csv_of("cards", view_of(2)).splitlines()))
    assert rows and "cards" not in rows[0]
    last = rows[-1]
    assert int(last["card0.used_bytes"]) + int(last["card1.used_bytes"]) == int(
        last["device_used_bytes"]
    )
    assert int(last["card1.by.weights"]) > 0
    blocks = list(csv.DictReader(csv_of("residency", view_of(2)).splitlines()))
    assert [row["card"] for row in blocks] == ["0", "1"] * 16
    rates = list(csv.DictReader(csv_of("rates", view_of(2)).splitlines()))
    assert float(rates[-1]["card1.h2d_bytes_per_s"]) == 1.05e10


def test_samples_that_are_too_old_leave_no_number_of_a_card() -> None:
    view = view_of(2)
    late = replace(view, wall_s=view.wall_s + 1000)
    text = text_of(PANELS["cards"].body(late, 116, 3))
    assert "GiB" not in text and "GB/s" not in text and "16 blocks" in text  # the plan's


def test_use_is_told_only_of_the_gpu_that_the_driver_has_for_a_card() -> None:
    trainer = (GpuUser(pid=4242, is_trainer=True),)
    gpus = (
        GpuSample(name="a", index=0, utilisation=0.1, processes=()),
        GpuSample(name="b", index=1, utilisation=0.91, processes=trainer),
    )
    sample = MachineSample(5.0, 0.1, 2, 1, 2, None, None, gpus)
    view = replace(view_of(2), machine_sample=sample, monotonic_s=5.0)
    assert [row.gpu and row.gpu.index for row in rows_of(view)] == [None, 1]
    assert "91% busy" in text_of(PANELS["cards"].body(view, 116, 3))
    planned = view.state.planned
    assert planned is not None
    swapped = (with_fields(planned.cards[0], gpu=1), with_fields(planned.cards[1], gpu=0))
    other = with_fields(view.state, planned=with_fields(planned, cards=swapped))
    assert [row.gpu and row.gpu.index for row in rows_of(replace(view, state=other))] == [1, None]


@pytest.mark.parametrize(("blocks", "room"), [(6, 60), (32, 36), (80, 36)])
def test_the_card_of_a_block_stands_above_its_tile(blocks: int, room: int) -> None:
    numbers = [at % 3 for at in range(blocks)]
    above, below = card_tiles(numbers, room), tiles("G" * blocks, room)
    shared = "".join(text for text, _ in below).split(" ×")[0]
    assert width_of(above) == len(shared)
    if blocks <= room:
        places = [at for at, cell in enumerate(shared) if cell == "G"]
        row = "".join(text for text, _ in above)
        assert [row[at] for at in places] == [str(one) for one in numbers]


def test_the_cards_are_named_together_where_they_are_alike(made: ModuleType) -> None:
    view = view_of(2)
    assert view.devices == "2 x NVIDIA RTX 4090"
    planned = view.state.planned
    assert planned is not None
    other = (planned.cards[0], with_fields(planned.cards[1], name="NVIDIA L4"))
    state = with_fields(view.state, planned=with_fields(planned, cards=other))
    assert replace(view, state=state).devices == "NVIDIA RTX 4090, NVIDIA L4"
    on_cpu = with_fields(view.state, hello=made.hello())
    assert replace(view, state=on_cpu).devices == "cpu as 2 cards"
    assert View(state=FoldedRun().after_all(made.training(2))).devices == "cpu"
    assert View().devices == ""


def test_a_letter_that_names_no_card_is_drawn_as_unknown() -> None:
    view = view_of(2)
    place = view.state.residency
    assert place is not None
    odd = with_fields(place, cards="0\x1bé" + place.cards[3:])
    view = replace(view, state=with_fields(view.state, residency=odd))
    assert "?:2" in text_of(PANELS["residency"].body(view, 116, 4))
    second = replace(view, chart=replace(view.chart, block=1))
    assert "card ?" in text_of([PANELS["block"].heading(second, 80)])
    assert [row.blocks for row in rows_of(view)] == [15, 15]
    assert csv_of("residency", view).splitlines()[2].endswith(",-1")


def test_the_map_counts_the_blocks_of_each_card() -> None:
    assert "0:16 1:16" in text_of(PANELS["residency"].body(view_of(2), 116, 4))
    assert "card" not in text_of(PANELS["residency"].body(View(), 116, 4))


def test_lanes_are_by_card_and_say_how_long_each_was_idle(tmp_path: Path) -> None:
    view = view_of(2, tmp_path)
    text = text_of(PANELS["lanes"].body(view, 116, 12))
    for label in ("gpu0", "gpu1", "h2d0", "h2d1", "d2h0", "d2h1", "cpu"):
        assert f"{label} " in text
    assert "idle beside others  card 0 " in text and "card 1 " in text
    rows = csv_of("lanes", view).splitlines()
    assert rows[0].endswith("card") and {row.rsplit(",", 1)[1] for row in rows[1:]} == {"0", "1"}


def test_eight_cards_share_lines_where_there_are_few(tmp_path: Path) -> None:
    view = view_of(8, tmp_path)
    low = PANELS["lanes"].body(view, 116, 5)
    text = text_of(low)
    assert all(f"gpu{card}" in text for card in range(8)) and len(low) == 5
    assert "gpu0" in text_of(low[:1]) and "gpu4" in text_of(low[:1])
    narrow = text_of(PANELS["lanes"].body(view, 76, 10))
    assert "7 " in narrow.splitlines()[8] and narrow.splitlines()[8].startswith("idle")


def test_the_plan_tells_each_card_and_who_is_left_out() -> None:
    text = text_of(plan_lines(view_of(2), 100))
    assert "Which card does what" in text and "embedding, head" in text
    assert "0 NVIDIA RTX 4090           16    19.0 GiB    18.0 GiB   23.0 GiB" in text
    joined = " ".join(text.split())
    assert "card 2 (GTX 1060) is left out: 6.20 s a step" in joined


def test_a_plan_for_one_card_has_no_word_of_cards(made: ModuleType) -> None:
    state = FoldedRun().after_all(made.training(5))
    assert "card" not in text_of(plan_lines(View(state=state), 100)).lower()
    assert isinstance(state.planned, Planned) and View(state=state).cards == 1


@pytest.mark.parametrize("size", SIZES[:2])
async def test_a_run_on_two_cards_gets_the_places_for_them_once_it_tells(
    made: ModuleType, app_pilot: ModuleType, tmp_path: Path, size: tuple[int, int]
) -> None:
    run = made_cards.write(tmp_path / "two", 2)
    last_s = made_cards.training(2)[-1].wall_s
    app = FluxApp(made.Alive(run), wall_clock=lambda: last_s + 0.5, sample_machine=False)
    async with app.run_test(size=size) as pilot:
        await app_pilot.drawn(pilot)
        text = app_pilot.text_of(app)
        assert "─ Cards" in text and "0:16 1:16" in text
        assert not app.screen.query_one("#memory").display
        await pilot.press("3")
        await app_pilot.until(pilot, lambda: "gpu1" in app.screen.query_one("#lanes", Lines).text)
        await pilot.press("f")
        await app_pilot.still(pilot)
        assert "d2h1" in app.screen.query_one("#lanes", Lines).text
        await pilot.press("f", "2")
        await app_pilot.until(pilot, lambda: "plan" in app_pilot.text_of(app))
        assert "1 " in app.screen.query_one("#card_memory", Lines).text
