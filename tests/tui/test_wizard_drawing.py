"""The wizard's lines: within their width, and true to what they are given."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxtui.wizard.answers.answers import STEPS, StepName
from fluxtui.wizard.checks.data_facts import Piece
from fluxtui.wizard.engine.ask_engine import EngineRefused, ask_engine, last_words
from fluxtui.wizard.engine.machine import machine_lines
from fluxtui.wizard.engine.plan_preview import PlanPreview, read_plan
from fluxtui.wizard.pages import drawing

WIDTHS = st.integers(48, 200)
TEXTS = st.text(st.characters(codec="ascii", categories=("L", "N", "P")), max_size=200)
BYTES = st.none() | st.integers(0, 1 << 44)


def widest(text: str) -> int:
    return max(len(line) for line in text.split("\n"))


def plan(**changes: object) -> PlanPreview:
    answer = {
        "offload": "weights", "steps": 10, "device": "cpu", "device_bytes": 10,
        "device_budget_bytes": 100, "host_bytes": 20, "host_limit_bytes": 100,
    }  # fmt: skip
    return read_plan({**answer, **changes})


@pytest.mark.parametrize("step", STEPS)
@given(width=WIDTHS)
def test_the_stepper_names_the_step_and_keeps_its_width(step: StepName, width: int) -> None:
    text = drawing.stepper(step, width).plain
    assert f"step {STEPS.index(step) + 1} of 8" in text
    titles = (drawing.TITLES[step], drawing.SHORT_TITLES[step])
    assert any(title in text.split() for title in titles), "in whole"
    rail = text.splitlines()[2].split()
    whole = {*drawing.TITLES.values(), *drawing.SHORT_TITLES.values(), "✓", "●", "○"}
    assert set(rail) <= whole
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
    sample = (Piece("Why?", trained=False, role="user"), Piece("So.", role="assistant"))
    asked, answered = drawing.samples([sample], 60, 4).plain.split("\n")
    assert asked == "  user: Why?"
    assert answered == "▌ assistant: So."


@given(text=TEXTS, lines=st.integers(1, 6))
def test_a_sample_keeps_to_its_lines(text: str, lines: int) -> None:
    drawn = drawing.samples([(Piece(text),)], 40, lines).plain
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


def test_a_choice_without_a_reason_is_the_default() -> None:
    made = plan(choices=[{"name": "train.batch_rows", "value": 8}])
    assert [(c.name, c.value, c.because) for c in made.choices] == [
        ("train.batch_rows", "8", "the default")
    ]


@pytest.mark.parametrize("key", ["device_bytes", "host_bytes"])
def test_a_plan_over_a_limit_does_not_fit(key: str) -> None:
    assert plan().fits
    assert not plan(**{key: 101}).fits
    assert plan(**{key: None}).fits, "what is not known is not held against it"


def test_a_machine_that_said_nothing_has_no_lines_made_up() -> None:
    assert machine_lines({}) == []


def test_a_machine_is_told_by_what_decides_about_streaming() -> None:
    probe = {
        "machine": {
            "cores": 16,
            "instruction_set": "avx512",
            "memory_total_bytes": 128 << 30,
            "memory_available_bytes": 120 << 30,
            "gpus": [{"name": "NVIDIA GeForce RTX 4090", "memory_total_bytes": 24 << 30}],
        },
        "disk": {"free_bytes": 900 << 30},
        "rates": {
            "h2d_pinned": {"per_s": 24.9e9, "how": "256 MiB"},
            "d2h_pinned": {"per_s": 24.6e9, "how": "256 MiB"},
            "host_copy": {"per_s": 40e9, "how": "256 MiB"},
            "disk_write": {"per_s": None, "how": "not measured: no space"},
            "disk_read": {"per_s": 3e9, "how": "256 MiB"},
        },
    }
    assert machine_lines(probe) == [
        "16 cores (avx512)",
        "128 GiB memory, 120 GiB free",
        "NVIDIA GeForce RTX 4090 24.0 GiB",
        "host copy 40.0 GB/s",
        "bus 24.9 GB/s to the GPU, 24.6 GB/s back",
        "900 GiB free disk",
    ]


def test_a_machine_without_a_gpu_says_so() -> None:
    assert "no GPU" in machine_lines({"machine": {"cores": 2, "gpus": []}})


def test_an_answer_of_another_shape_is_no_crash() -> None:
    assert machine_lines({"machine": None, "rates": [], "disk": "none"}) == []


@pytest.mark.parametrize(
    ("errors", "said"),
    [
        (b"", "exit code 3"),
        (b"warning: x\nerror: too big\n", "too big"),
        (b"this is a bug of FluxTrain: X\nrun it again with --debug\n", "a bug of FluxTrain: X"),
        (b"\xff last words \n\n", "last words"),
    ],
)
def test_the_last_words_of_the_engine_are_its_reason(errors: bytes, said: str) -> None:
    assert said in last_words(errors, 3)


async def test_the_engine_answers_with_an_object_or_is_refused() -> None:
    assert await ask_engine('{"a": 1}', program=("echo",)) == {"a": 1}
    for output in ("no json", "[1]"):
        with pytest.raises(EngineRefused):
            await ask_engine(output, program=("echo",))
    with pytest.raises(EngineRefused) as refused:
        await ask_engine("-c", "echo 'error: full' >&2; exit 5", program=("sh",))
    assert (str(refused.value), refused.value.exit_code) == ("full", 5)
