"""Settings of the wizard: rows over the configuration's schema, on pages and as flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fluxtrain.config.schema import RunConfig, demo_config, load_config, validate
from fluxtrain.config.schema import settings as all_settings
from fluxtrain.errors import BadInput
from fluxtrain.models.model_files import IMAGE_DEMO
from fluxtui.answers.answers import Answers, with_method, with_model, with_settings
from fluxtui.answers.configuring import answers_from_config, answers_from_file, configuration
from fluxtui.answers.draft import load_draft, save_draft
from fluxtui.answers.launching import engine_arguments, prepare
from fluxtui.answers.rows import (
    BY_KEY,
    METHODS,
    ROWS,
    RUN_FOLDER,
    SettingRow,
    declared,
    default_text,
    read,
    rows_of,
    turned,
    value_text,
)
from fluxtui.command_line import answers_of, make_parser
from fluxtui.wizard.pages.method import method_page
from fluxtui.wizard.pages.training import training_page
from fluxtui.wizard.pages.wizard_view import WizardView

TYPED = {
    "method.name": ("lora", "lora"), "method.rank": ("8", 8), "method.alpha": ("32", 32),
    "method.targets": ("q_proj v_proj", ["q_proj", "v_proj"]), "method.variant": ("dora", "dora"),
    "method.base": ("int8", "int8"), "data.format": ("text", "text"),
    "data.columns": ("{text: body}", {"text": "body"}), "data.ignore": ("a, b", ["a", "b"]),
    "train.learning_rate": ("2e-4", 2e-4), "train.schedule": ("linear", "linear"),
    "train.warmup_steps": ("7", 7), "train.epochs": ("1.5", 1.5), "train.steps": ("1,000", 1000),
    "train.batch_rows": ("16", 16), "train.accumulation": ("4", 4),
    "data.sequence_length": ("2048", 2048), "train.evaluate_every": ("end", "end"),
    "data.held_out": ("0", 0), "train.checkpoint_every": ("50", 50), "train.seed": ("3", 3),
    "data.seed": ("4", 4), RUN_FOLDER: ("/out/run", "/out/run"),
    "placement.chunk_rows": ("2", 2), "placement.offload": ("max", "max"),
    "image.size": ("512", 512), "image.samples": ("4", 4),
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.key)
def test_each_setting_is_the_trainers_and_reaches_it_by_field_flag_draft_and_file(
    row: SettingRow, tmp_path: Path
) -> None:
    text, value = TYPED[row.key]
    assert read(row, text) == value and read(row, "") is None and read(row, "auto") is None
    answers = answers_of(make_parser().parse_args([row.flag, text]))
    assert answers is not None and answers.settings == {row.key: value}
    assert save_draft(answers, tmp_path / "draft.json")
    assert load_draft(tmp_path / "draft.json") == answers
    if row.is_folder:
        return
    assert row.key in {one.key for one in all_settings(RunConfig())}
    assert read(row, default_text(row)) is None, "the default is no answer"
    answers = with_method(answers, row.methods[-1])
    if row.of == "images":
        assert "image" not in configuration(answers), "a text model has none"
        answers = with_model(answers, IMAGE_DEMO)
    config = validate(configuration(answers))
    found = {one.key: one.value for one in all_settings(config)}
    carried = list(there) if isinstance(there := found[row.key], tuple) else there
    assert carried == (row.methods[-1] if row.key == "method.name" else value)
    assert answers_from_config(configuration(answers)).settings == answers.settings


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("method.rank", "0"), ("method.name", "loro"), ("train.learning_rate", "-1"),
        ("train.learning_rate", "fast"), ("train.warmup_steps", "2.5"), ("train.epochs", "0"),
        ("train.steps", "0"), ("data.held_out", "1"), ("data.sequence_length", "1"),
        ("train.evaluate_every", "never"), ("train.seed", "[1]"), ("placement.chunk_rows", "x"),
    ],
)  # fmt: skip
def test_what_the_trainer_would_refuse_is_refused_when_it_is_typed(key: str, text: str) -> None:
    with pytest.raises(BadInput, match=key):
        read(BY_KEY[key], text)
    with pytest.raises(SystemExit) as ended:
        make_parser().parse_args([BY_KEY[key].flag, text])
    assert ended.value.code == 2


@pytest.mark.parametrize("key", ["train.learning_rate", "train.schedule", "data.held_out"])
def test_turning_a_value_reaches_every_usual_one_and_the_default(key: str) -> None:
    row, value, seen = BY_KEY[key], None, []
    usual = [one for one in declared(row).choices or row.usual if one != declared(row).default]
    for _ in range(len(usual) + 1):
        value = turned(row, value, 1)
        seen.append(value)
    assert seen == [*usual, None] and turned(row, turned(row, None, -1), 1) is None
    assert turned(BY_KEY["train.learning_rate"], 3e-5, 1) == 5e-5, "a typed value turns on from it"


def test_epochs_and_steps_replace_each_other_in_the_demo_too() -> None:
    answers = with_settings(Answers(), {"train.steps": 9})
    answers = with_settings(answers, {"train.epochs": 2})
    assert dict(answers.settings) == {"train.epochs": 2}
    given = [one for one in engine_arguments(answers, Path("unused")) if "=" in one]
    assert (demo_config(given).train.steps, demo_config(given).train.epochs) == (None, 2)


def test_a_method_has_only_its_own_settings_and_keeps_the_others_for_later() -> None:
    for method, names in (("full", 0), ("lora", 4), ("qlora", 5)):
        assert len(rows_of("method", method)) == names
    answers = with_settings(Answers(), {"method.name": "qlora", "method.base": "int8"})
    assert configuration(answers)["method"] == {"name": "qlora", "base": "int8"}
    assert configuration(with_method(answers, "full"))["method"] == {"name": "full"}
    assert configuration(with_method(with_method(answers, "full"), "qlora")) == configuration(
        answers
    )
    assert METHODS[0] == declared(BY_KEY["method.name"]).default


@pytest.mark.parametrize("size", [(36, True, False), (76, True, False), (66, False, True)])
def test_the_pages_tell_every_setting_in_their_width(
    size: tuple[int, bool, bool], wizard_pilot: Any
) -> None:
    from fluxtui.wizard.engine.asked import Asked

    width, short, tall = size
    answers = with_settings(Answers(), {"method.name": "qlora", "train.learning_rate": 1e-4})
    plan = Asked(value=wizard_pilot.planned())
    view = WizardView(answers=answers, plan=plan, short=short, tall=tall)
    told = training_page(view, width, 6).plain
    assert all(row.name in told for row in rows_of("training")) and "0.0001" in told
    methods = method_page(view, max(width, 66)).plain
    assert all(row.name in methods for row in rows_of("method", "qlora"))
    assert max(map(len, (told).splitlines())) <= width
    assert width < 60 or "1,024 tokens" in told, "the engine's reason"


async def test_arrows_turn_a_setting_digits_type_one_and_backspace_gives_it_back(
    folder: Path, opened: Any
) -> None:
    async with opened(folder, Answers(step="training")) as wizard:
        await wizard.press("right")
        await wizard.until(lambda: wizard.screen.answers.settings == {"train.learning_rate": 1e-5})
        await wizard.press("backspace", "down", "down", "x", "1", "2", "0", "enter")
        await wizard.until(lambda: wizard.screen.answers.settings == {"train.warmup_steps": 120})
        await wizard.press("down", "down", "s", "0", "enter")
        await wizard.until(lambda: "train.steps = 0" in wizard.text())
        assert wizard.step == "training", "what cannot be is told, and the field stays"
        await wizard.press("escape")
        assert wizard.step == "training" and len(wizard.screen.answers.settings) == 1


async def test_letters_set_what_belongs_to_adapters(folder: Path, opened: Any) -> None:
    async with opened(folder, Answers(step="method")) as wizard:
        await wizard.press("n", "right", "n", "8", "enter", "v")
        await wizard.until(lambda: len(wizard.screen.answers.settings) == 3)
        assert wizard.screen.answers.settings == {
            "method.name": "lora", "method.rank": 8, "method.variant": "rslora",
        }  # fmt: skip


async def test_the_output_folder_is_checked_and_used(folder: Path, opened: Any) -> None:
    full = folder / "full"
    full.mkdir()
    (full / "file").write_text("x")
    async with opened(folder, Answers(step="training")) as wizard:
        await wizard.press(*["down"] * 20)
        await wizard.write(str(full))
        await wizard.press("enter")
        await wizard.until(lambda: "not empty: name a folder" in wizard.text())
        await wizard.write("-new")
        await wizard.press("enter")
        await wizard.until(lambda: wizard.screen.answers.run_folder == f"{full}-new")
    assert prepare(wizard.screen.answers, folder / "runs").run_dir == Path(f"{full}-new")
    with pytest.raises(BadInput, match="is not empty"):
        prepare(Answers(settings={RUN_FOLDER: str(full)}), folder / "runs")


def test_a_file_says_a_rate_as_people_write_it(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "train: {learning_rate: 2e-4, schedule: cosine, epochs: 3.0}\n"
    )
    answers = answers_from_file(str(tmp_path / "c.yaml"))
    assert dict(answers.settings) == {"train.learning_rate": 2e-4, "train.epochs": 3}
    assert [value_text(value) for value in answers.settings.values()] == ["0.0002", "3"]
    launch = prepare(answers, tmp_path / "runs")
    assert load_config(launch.arguments[0]).train.learning_rate == 2e-4
