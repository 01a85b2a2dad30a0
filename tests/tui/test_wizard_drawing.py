"""The wizard's lines: within their width, and true to what they are given."""

from __future__ import annotations

import re
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxtrain.events.answers.answers import TextPiece
from fluxtui.answers.answers import STEPS, StepName
from fluxtui.wizard.engine.machine import machine_lines
from fluxtui.wizard.pages import drawing

WIDTHS = st.integers(48, 200)
TEXTS = st.text(st.characters(codec="ascii", categories=("L", "N", "P")), max_size=200)
BYTES = st.none() | st.integers(0, 1 << 44)


def widest(text: str) -> int:
    return max(len(line) for line in text.split("\n"))


@pytest.mark.parametrize("step", STEPS)
@given(width=WIDTHS)
def test_the_stepper_names_the_step_and_keeps_its_width(step: StepName, width: int) -> None:
    text = drawing.stepper(step, width).plain
    assert f"step {STEPS.index(step) + 1} of 9" in text
    assert drawing.TITLES[step] in re.sub("[✓●○]", " ", text).split(), "in whole"
    rail = set(re.sub("([✓●○])", r"\1 ", text.splitlines()[2]).split())
    assert rail <= {*drawing.TITLES.values(), "✓", "●", "○"}, "the same names at every width"
    assert text.count("✓") == STEPS.index(step)
    assert widest(text) <= width


@given(text=TEXTS, width=WIDTHS)
def test_messages_keep_their_width_whatever_they_say(text: str, width: int) -> None:
    for drawn in (drawing.problem(text, width), drawing.caution(text, width)):
        assert widest(drawn.plain) <= width
        assert "".join(drawn.plain[2:].split()) == "".join(text.split())


@given(rows=st.lists(st.tuples(st.just("name"), TEXTS, TEXTS), max_size=5), width=WIDTHS)
def test_a_table_keeps_its_width_and_every_reason(
    rows: list[tuple[str, str, str]], width: int
) -> None:
    drawn = drawing.table(rows, max(width, 60)).plain
    assert widest(drawn) <= max(width, 60)
    for _, _, reason in rows:
        assert "".join(reason.split()) in "".join(drawn.split())


@given(used=BYTES, limit=BYTES, width=WIDTHS)
def test_a_bar_is_filled_in_proportion_and_red_only_over_the_limit(
    used: int | None, limit: int | None, width: int
) -> None:
    drawn = drawing.memory_bar("host", used, limit, width)
    filled, rest = drawn.plain.count("━"), drawn.plain.count("─")
    if used is None or not limit:
        assert filled == rest == 0
        return
    assert filled + rest > 0
    assert abs(filled - (filled + rest) * min(1.0, used / limit)) <= 1
    assert ("too much" in drawn.plain) == (used > limit)


def test_an_unknown_number_is_a_dash_and_no_bar() -> None:
    assert drawing.memory_bar("device", None, None, 60).plain.split() == ["device", "-"]


@given(text=TEXTS, width=st.integers(2, 60))
def test_a_shortened_text_fits_and_keeps_its_ends(text: str, width: int) -> None:
    short = drawing.shortened(text, width)
    assert len(short) <= width
    assert short == text or (short[-1] == text[-1] and "…" in short)


def test_samples_mark_what_is_learnt_and_only_that() -> None:
    sample = (TextPiece("user: Why?", False), TextPiece("assistant: So.", True))
    asked, answered = drawing.samples([sample], 60, 4).plain.split("\n")
    assert asked == "  user: Why?"
    assert answered == "▌ assistant: So."


@given(text=TEXTS, lines=st.integers(1, 6))
def test_a_sample_keeps_to_its_lines(text: str, lines: int) -> None:
    drawn = drawing.samples([(TextPiece(text, True),)], 40, lines).plain
    assert drawn.count("\n") < lines
    assert widest(drawn) <= 40


def test_a_footer_gives_up_the_machine_before_the_keys() -> None:
    keys = [("enter", "next"), ("esc", "back")]
    facts = ["2 cores", "8 GiB memory"]
    wide, middle, narrow = (drawing.footer(keys, facts, width).plain for width in (80, 40, 24))
    assert wide.endswith("2 cores · 8 GiB memory")
    assert middle.endswith("2 cores")
    assert "esc back" in narrow
    assert "cores" not in narrow


def test_a_machine_is_told_by_what_decides_about_streaming(wizard_pilot: ModuleType) -> None:
    machine = {
        **wizard_pilot.MACHINE, "cores": 16, "instruction_set": "avx512", "gpus": [wizard_pilot.GPU]
    }  # fmt: skip
    rates = {
        name: {"per_s": per_s, "how": "256 MiB"}
        for name, per_s in (("h2d_pinned", 24.9e9), ("d2h_pinned", 24.6e9), ("host_copy", 40e9),
                            ("disk_write", None), ("disk_read", 3e9))
    }  # fmt: skip
    assert machine_lines(wizard_pilot.probed(machine=machine, rates=rates)) == [
        "16 cores (avx512)",
        "8.00 GiB memory, 4.00 GiB free",
        "NVIDIA GeForce RTX 4090 24.0 GiB",
        "host copy 40.0 GB/s",
        "bus 24.9 GB/s to the GPU, 24.6 GB/s back",
        "1.00 TiB free disk",
    ]


def test_a_machine_without_a_gpu_says_so(wizard_pilot: ModuleType) -> None:
    assert "no GPU" in machine_lines(wizard_pilot.probed())
