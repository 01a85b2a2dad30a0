"""The page of the training: every setting, its default with the reason, and how it is changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxtrain.config.schema import RunConfig, demo_config, load_config, settings
from fluxtrain.errors import BadInput
from fluxtui.answers.answers import Answers
from fluxtui.answers.configuring import answers_from_config, yaml_text
from fluxtui.answers.draft import load_draft, save_draft
from fluxtui.answers.launching import prepare
from fluxtui.answers.training import (
    TRAINING_QUESTIONS,
    acceptable_training,
    answer_text,
    question_of,
    read_answer,
    turned,
)
from fluxtui.command_line import answers_of, make_parser
from fluxtui.wizard.pages.training import training_page, value_and_reason
from fluxtui.wizard.pages.wizard_view import WizardView

Opened = Callable[..., AbstractAsyncContextManager[Any]]
IN_FILE = Answers(data_source="path", data_path="/d.txt", step="training")
TYPED = {
    "learning_rate": ("3e-4", 3e-4), "schedule": ("linear", "linear"),
    "warmup_steps": ("0", 0), "epochs": ("1.5", 1.5), "steps": ("7", 7),
    "sequence_length": ("64", 64), "accumulation": ("2", 2), "evaluate_every": ("end", "end"),
    "held_out": ("0.1", 0.1), "checkpoint_every": ("3", 3), "seed": ("11", 11),
    "data_seed": ("12", 12),
}  # fmt: skip


def with_choices(folder: Path, *choices: tuple[str, str, str]) -> None:
    """Let the stand-in engine make these choices."""
    plan = json.loads((folder / "plan.json").read_text())
    plan["choices"] += [dict(zip(("name", "value", "because"), c, strict=True)) for c in choices]
    (folder / "plan.json").write_text(json.dumps(plan))


def test_each_setting_is_one_of_the_trainers_with_its_default() -> None:
    known = {one.key: one.default for one in settings(RunConfig())}
    for question in TRAINING_QUESTIONS:
        if question.key:
            default = known[question.key]
            assert question.default in ("auto", "by epochs") or (
                read_answer(question, question.default) == default
            ), question.key
            assert default not in ("auto", None) or question.default in ("auto", "by epochs")


@pytest.mark.parametrize("field", TYPED)
def test_what_is_typed_reaches_the_trainer_by_page_flag_and_draft(
    field: str, tmp_path: Path
) -> None:
    text, value = TYPED[field]
    question = question_of(field)
    assert read_answer(question, text) == value
    answers = Answers(data_source="path", data_path="/d.txt", **{field: value})
    config = tmp_path / "c.yaml"
    config.write_text(yaml_text(answers))
    section, _, name = question.key.partition(".")
    assert getattr(getattr(load_config(config), section), name) == value
    flagged = answers_of(make_parser().parse_args(["--data", "/d.txt", question.flag, text]))
    assert flagged is not None and getattr(flagged, field) == value
    save_draft(answers, tmp_path / "draft.json")
    kept = load_draft(tmp_path / "draft.json")
    assert kept is not None and getattr(kept, field) == value
    demo = prepare(Answers(**{field: value}), tmp_path / "runs")
    assert getattr(getattr(demo_config([a for a in demo.arguments if "=" in a]), section), name) \
        == value  # fmt: skip


def test_epochs_of_the_demo_take_the_place_of_its_steps(tmp_path: Path) -> None:
    launch = prepare(Answers(epochs=2.0), tmp_path)
    config = demo_config([argument for argument in launch.arguments if "=" in argument])
    assert config.train.steps is None and config.train.epochs == 2


@pytest.mark.parametrize(
    ("field", "text"),
    [("learning_rate", "fast"), ("learning_rate", "-1"), ("learning_rate", "nan"),
     ("held_out", "1"), ("epochs", "0"), ("steps", "0"), ("steps", "1.5"), ("seed", "-1"),
     ("sequence_length", "1"), ("evaluate_every", "never"), ("schedule", "square"),
     ("steps", "9" * 12)],
)  # fmt: skip
def test_what_the_trainer_would_refuse_is_refused_when_it_is_typed(field: str, text: str) -> None:
    with pytest.raises(ValueError, match="is not"):
        read_answer(question_of(field), text)
    with pytest.raises(SystemExit):
        make_parser().parse_args([question_of(field).flag, text])


@given(value=st.floats(0, 10) | st.integers(0, 10**6) | st.none(), offset=st.sampled_from([-1, 1]))
def test_turning_a_value_reaches_every_usual_one_and_the_default(value: Any, offset: int) -> None:
    question = question_of("learning_rate")
    seen = set()
    for _ in range(len(question.turns) + 2):
        value = turned(question, value, offset)
        assert acceptable_training(question, value)
        seen.add(value)
    assert seen >= {None, *question.turns}


def test_a_file_says_a_rate_as_people_write_it_and_defaults_are_no_answers() -> None:
    answers = answers_from_config(
        {"train": {"learning_rate": "2e-4", "schedule": "cosine", "epochs": 3, "seed": 0}}
    )
    assert (answers.learning_rate, answers.schedule, answers.seed) == (2e-4, None, None)
    assert answers.epochs == 3
    both = answers_from_config({"train": {"steps": 9, "epochs": 3}})
    assert (both.steps, both.epochs) == (9, None), "steps decide"


def test_the_page_tells_every_setting_in_its_width_with_the_reason_of_the_chosen_one() -> None:
    for width in (56, 76, 92):
        for cursor, question in enumerate(TRAINING_QUESTIONS):
            text = training_page(WizardView(answers=IN_FILE), width, cursor).plain
            assert all(len(line) <= width for line in text.splitlines())
            assert all(one.name in text for one in TRAINING_QUESTIONS)
            told = " ".join(text.split())
            assert " ".join(f"{question.name}: {question.reason}".split())[:100] in told


async def test_the_engines_own_choice_stands_there_with_its_reason(
    folder: Path, opened: Opened
) -> None:
    with_choices(folder, ("train.learning_rate", "0.0002", "adapters start from nothing"))
    async with opened(folder, IN_FILE) as wizard:
        await wizard.until(lambda: wizard.plan)
        view = wizard.screen.view
        question = question_of("learning_rate")
        assert value_and_reason(view, question) == ("0.0002", "adapters start from nothing")
        await wizard.until(lambda: "adapters start from nothing" in wizard.text())


async def test_arrows_turn_a_setting_digits_type_one_and_backspace_gives_it_back(
    folder: Path, opened: Opened
) -> None:
    async with opened(folder, IN_FILE) as wizard:
        await wizard.press("right")
        await wizard.until(lambda: wizard.screen.answers.learning_rate == 1e-5)
        await wizard.press(*"3e-4")
        await wizard.press("enter")
        await wizard.until(lambda: wizard.screen.answers.learning_rate == 3e-4)
        assert wizard.step == "training", "Enter ends the typing, not the page"
        await wizard.press("right")
        await wizard.until(lambda: wizard.screen.answers.learning_rate == 5e-4)
        await wizard.press("down", "left")
        await wizard.until(lambda: wizard.screen.answers.schedule == "constant")
        await wizard.press("up", "backspace")
        await wizard.until(lambda: wizard.screen.answers.learning_rate is None)
        await wizard.press("9", "escape")
        await wizard.until(lambda: wizard.step == "training")
        assert wizard.screen.answers.learning_rate is None, "Escape keeps what was set before"
        await wizard.press(*"fast", "enter")
        await wizard.until(lambda: wizard.step == "hardware")
        assert wizard.screen.answers.schedule == "constant"


async def test_a_value_that_cannot_be_is_told_and_the_field_stays(
    folder: Path, opened: Opened
) -> None:
    async with opened(folder, IN_FILE) as wizard:
        await wizard.press(*"3x", "enter")
        await wizard.until(lambda: "✗ '3x' is not a number from 0 up" in wizard.text())
        assert wizard.step == "training" and wizard.screen.answers.learning_rate is None


async def test_steps_and_epochs_replace_each_other(folder: Path, opened: Opened) -> None:
    async with opened(folder, IN_FILE) as wizard:
        await wizard.press("down", "down", "down", "2", "enter")
        await wizard.until(lambda: wizard.screen.answers.epochs == 2)
        await wizard.press("down", "9", "enter")
        await wizard.until(lambda: wizard.screen.answers.steps == 9)
        assert wizard.screen.answers.epochs is None
        await wizard.until(lambda: wizard.plan)
        assert value_and_reason(wizard.screen.view, question_of("epochs"))[0] == "-"


async def test_the_output_folder_is_completed_checked_and_used(
    folder: Path, opened: Opened
) -> None:
    (folder / "results").mkdir()
    (folder / "full").mkdir()
    (folder / "full" / "a.txt").write_text("")
    async with opened(folder, Answers(step="training"), size=(100, 40)) as wizard:
        await wizard.press(*["down"] * 12)
        await wizard.write(f"{folder}/fu")
        await wizard.press("tab", "enter")
        await wizard.until(lambda: "is not empty" in " ".join(wizard.text().split()))
        await wizard.press("ctrl+u")
        await wizard.write(f"{folder}/res")
        await wizard.press("tab", *"mine", "enter")
        await wizard.until(lambda: wizard.screen.answers.run_folder == f"{folder}/results/mine")
        await wizard.go_to("launch")
        assert "runs as" in wizard.text()
        await wizard.press("enter")
        await wizard.until(lambda: wizard.app.ended_with)
        [launch] = wizard.app.ended_with
        assert launch.run_dir == folder / "results" / "mine" and launch.run_dir.is_dir()


def test_a_folder_that_holds_something_is_refused_at_the_launch_too(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").touch()
    for name in ("full", "full/a"):
        with pytest.raises(BadInput, match="new or empty"):
            prepare(Answers(run_folder=str(tmp_path / name)), tmp_path)


async def test_a_click_chooses_a_setting_and_a_second_one_types(
    folder: Path, opened: Opened
) -> None:
    async with opened(folder, IN_FILE, size=(100, 40)) as wizard:
        page = wizard.screen.query_one("#training Drawn")
        await wizard.pilot.click(page, offset=(20, 3))
        await wizard.until(lambda: wizard.screen.current.question.field == "schedule")
        await wizard.pilot.click(page, offset=(20, 3))
        await wizard.until(lambda: wizard.screen.query_one("#training-input").display)


def test_answers_are_shown_as_they_can_be_typed() -> None:
    for question in TRAINING_QUESTIONS:
        for value in question.turns:
            assert read_answer(question, answer_text(question, value)) == value


async def test_keys_typed_faster_than_the_field_opens_arrive_in_their_order(
    folder: Path, opened: Opened
) -> None:
    from textual.events import Key

    async with opened(folder, IN_FILE) as wizard:
        for character in "3e-4":
            wizard.app.post_message(Key(character, character))
        wizard.app.post_message(Key("enter", "\r"))
        await wizard.until(lambda: wizard.screen.answers.learning_rate == 3e-4)
        assert wizard.step == "training", "Enter was for the field"
