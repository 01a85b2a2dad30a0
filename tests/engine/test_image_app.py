"""Image editing in the app: the wizard up to a run, and the pictures that the run makes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fluxtrain.commands.pairs_inspection import inspect_pairs
from fluxtrain.commands.preview import preview
from fluxtrain.config.schema import load_config
from fluxtrain.errors import BadInput
from fluxtrain.events import events as ev
from fluxtrain.events.answers.answers import Answer
from fluxtrain.files.half_blocks import half_blocks
from fluxtrain.models.model_files import IMAGE_DEMO
from fluxtui.answers.answers import Answers, with_method, with_model
from fluxtui.answers.configuring import answers_from_config, configuration, yaml_text
from fluxtui.answers.launching import command_text
from fluxtui.panels.samples import PANEL
from fluxtui.state.run import FoldedRun
from fluxtui.state.status import Link
from fluxtui.state.view import ChartSettings, View
from fluxtui.wizard.checks.answer_checks import check_data, check_model
from fluxtui.wizard.linear_lines import inspection_lines
from tests.engine.images import PAIRS, Images
from tests.engine.runs import of, run
from tests.engine.test_image_use import machine
from tests.tui.wizard_pilot import furnish, opened

Image = pytest.importorskip("PIL.Image")


def answered(folder: Path, answer: Answer) -> None:
    """Let the stand-in engine give an answer of the real one."""
    told = json.dumps(msgspec.to_builtins(answer))
    (folder / f"{answer.COMMAND}.json").write_text(told)


async def test_the_wizard_leads_from_a_pipeline_and_pairs_to_a_run(
    images: Images, tmp_path: Path
) -> None:
    config = load_config(images.config(tmp_path))
    furnish(tmp_path)
    answered(tmp_path, inspect_pairs(config))
    answered(tmp_path, preview(config, machine(tmp_path, 64)))
    async with opened(tmp_path, Answers(step="model"), size=(80, 60)) as wizard:
        await wizard.press("down", "down")
        await wizard.write(str(images.pipeline))
        await wizard.until(lambda: "learns from pairs of images" in wizard.text())
        await wizard.press("enter")
        await wizard.until(lambda: wizard.step == "data")
        assert "Choose the pairs of images" in wizard.text() and "Hub" not in wizard.text()
        await wizard.press("down")
        await wizard.write(str(images.data / "pairs.jsonl"))
        await wizard.until(lambda: f"{PAIRS - 1} to train on, 1 held out" in wizard.text())
        assert f"{PAIRS} of 64x64" in wizard.text() and "invert the colors" in wizard.text()
        await wizard.go_to("method")
        assert wizard.screen.answers.method == "lora", "full tuning undoes the distillation"
        await wizard.go_to("training")
        assert "sequence length" not in wizard.text()
        while wizard.screen.current.under_cursor.key != "image.size":
            await wizard.press("down")
        await wizard.write("64")
        await wizard.press("enter")
        await wizard.until(lambda: wizard.screen.answers.settings.get("image.size") == 64)
        await wizard.go_to("launch")
        await wizard.press("enter")
        await wizard.until(lambda: wizard.app.ended_with)
    (launch,) = wizard.app.ended_with
    assert launch is not None
    written = Path(launch.arguments[0])
    made = load_config(written)
    assert (made.model.path, made.method.name, made.image.size) == (
        str(images.pipeline), "lora", 64,
    )  # fmt: skip
    events = run(written, tmp_path / "run", "train.steps=1", "image.sample_steps=1")
    assert len(of(ev.StepFinished, events)) == 1
    look_at_samples(events, tmp_path / "run")


def look_at_samples(events: list[Any], run_dir: Path) -> None:
    state = FoldedRun().after_all(events)
    view = View(state=state, link=Link(run_dir=run_dir))
    drawn = PANEL.body(view, 100, 14)
    assert drawn[0][0][0] == "› " and drawn[1][1][1].startswith("#"), "reference, made, target"
    assert sum(len(text) for text, _ in drawn[1]) <= 100
    assert len(PANEL.body(view, 40, 4)) == 4
    colourless = PANEL.body(View(state=state, link=view.link, pictures=False), 100, 14)
    assert "samples/step-" in colourless[1][1][0]
    (run_dir / "samples" / "step-00000001-1.png").write_bytes(b"no picture")
    assert "cannot be read" in "".join(text for text, _ in PANEL.body(view, 100, 14)[1])
    assert [view.sample_moved(by) for by in (-1, 1, -5)] == [0, 1, 0]
    earlier = replace(view, chart=ChartSettings(crosshair=view.sample_moved(-1)))
    assert earlier.sample_moved(1) == 1 and View().sample_moved(1) is None


def test_answers_about_images_are_read_back_from_their_configuration(images: Images) -> None:
    pipeline = with_model(Answers(), str(images.pipeline))
    assert configuration(pipeline)["method"] == {"name": "lora"}
    for answers in (pipeline, with_method(pipeline, "full"), with_model(Answers(), IMAGE_DEMO)):
        again = answers_from_config(configuration(answers))
        assert (again.method, again.of_images) == (answers.method, True)
    demo = with_model(Answers(), IMAGE_DEMO)
    assert command_text(demo).endswith("fluxtrain train --demo image-edit")
    assert check_model(demo).error is None and check_data(demo).error is None


def test_pairs_that_cannot_be_are_refused_by_the_wizard(images: Images, tmp_path: Path) -> None:
    def told(**changes: str) -> str:
        answers = Answers(model_source="folder", model_folder=str(images.pipeline), **changes)  # type: ignore[arg-type]
        return check_data(answers).error or ""

    assert "does not exist" in told(data_source="path", data_path=str(tmp_path / "gone.jsonl"))
    assert "pairs.jsonl" in told(data_source="hub", data_hub="owner/name")
    (tmp_path / "model_index.json").write_text("{}")
    part = Answers(model_source="folder", model_folder=str(tmp_path))
    assert "lacks transformer, vae" in (check_model(part).error or "")
    found = inspect_pairs(load_config(images.config(tmp_path)))
    lines = inspection_lines(found)
    assert f"pairs: {PAIRS - 1} to train on, 1 held out: {PAIRS} of 64x64" in lines
    assert lines[-1].startswith("pair 8: ") and yaml_text(part)


def test_a_picture_becomes_half_blocks_of_its_colours(tmp_path: Path) -> None:
    path = tmp_path / "flag.png"
    flag = Image.new("RGB", (8, 4), "#ff0000")
    flag.paste("#0000ff", (0, 2, 8, 4))
    flag.save(path)
    assert half_blocks(path, 80, 40) == (
        (("#ff0000", "#ff0000"),) * 8,
        (("#0000ff", "#0000ff"),) * 8,
    )
    assert half_blocks(path, 4, 40) == ((("#ff0000", "#0000ff"),) * 4,)
    assert half_blocks(path, 80, 1) == ((("#ff0000", "#0000ff"),) * 4,)
    Image.new("1", (9000, 9000)).save(path)
    for bad in (path, tmp_path, tmp_path / "gone.png"):
        with pytest.raises(BadInput, match="cannot be read"):
            half_blocks(bad, 80, 40)
    Image.new("RGB", (1, 3), "#010203").save(path)
    assert half_blocks(path, 80, 40)[0] == (("#010203", "#010203"),)
