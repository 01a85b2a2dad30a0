"""The wizard with real files, in the real app, and where things go wrong around it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fluxtrain.config.schema import load_config
from fluxtrain.errors import BadInput
from fluxtrain.events.run_folder.launch import start_trainer
from fluxtui.answers import launching
from fluxtui.answers.answers import Answers
from fluxtui.answers.draft import save_draft
from fluxtui.app import FluxApp
from fluxtui.screens.panel_screen import PanelScreen
from fluxtui.themes import load_themes
from fluxtui.wizard.screen import WizardScreen

Opened = Callable[..., AbstractAsyncContextManager[Any]]
BAD_DATA = {
    "empty.txt": (b"", "is empty"),
    "binary.txt": (b"words\0and zeros", "NUL byte"),
    "latin.txt": ("Füße".encode("latin-1"), "not UTF-8"),
    "roles.jsonl": (b'{"messages": [{"text": "hello"}]}', "no `role`"),
    "silent.jsonl": (
        b'{"messages": [{"role": "user", "content": "?"}]}',
        "no message has the role assistant",
    ),
    "torn.jsonl": (b'{"text": "whole"}\n{"text": "to', "line 2 is not JSON"),
}


EXPORTED = {
    "kind": "merged", "folder": "/merged", "bytes": 2048, "files": 6, "base": "little",
    "dtype": "bfloat16", "onto": "original", "changed": 4, "layers": None, "logits": None,
    "quantisation": None, "seconds": 1.0, "notes": [],
}  # fmt: skip


@pytest.fixture
def model(folder: Path) -> Path:
    """A real model folder with random weights, made by the library that will read it."""
    import torch
    from safetensors.torch import save_file

    path = folder / "little"
    path.mkdir()
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8}
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text("{}")
    weights = {"embed": torch.zeros(16, 8, dtype=torch.bfloat16), "head": torch.zeros(8, 16)}
    save_file(weights, path / "model.safetensors")
    return path


async def test_a_folder_and_a_file_lead_to_a_configuration_the_trainer_loads(
    folder: Path, opened: Opened, model: Path
) -> None:
    data = folder / "chat.jsonl"
    turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    data.write_text(json.dumps({"messages": turns}) + "\n")
    async with opened(folder, Answers(step="model"), size=(80, 50)) as wizard:
        await wizard.press("down", "down")
        await wizard.write(str(model))
        await wizard.until(lambda: "LlamaForCausalLM" in wizard.text())
        assert "256" in wizard.text(), "both tensors are counted"
        await wizard.press("enter")
        await wizard.until(lambda: wizard.step == "data")
        await wizard.press("down")
        await wizard.write(str(data))
        await wizard.until(lambda: "▌ So it is.<|end|>" in wizard.text())
        assert "<|user|>Why?" in wizard.text(), "as the engine says that the model sees it"
        await wizard.go_to("launch")
        await wizard.press("enter")
        await wizard.until(lambda: wizard.app.ended_with)
        [launch] = wizard.app.ended_with
        config = load_config(launch.arguments[0])
        assert (config.model.path, config.data.path) == (str(model), str(data))
        assert launch.run_dir.name.endswith("-little")


async def test_a_truncated_shard_is_told_while_the_folder_is_typed(
    folder: Path, opened: Opened, model: Path
) -> None:
    shard = model / "model.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)
    async with opened(folder, Answers(step="model")) as wizard:
        await wizard.press("down", "down")
        await wizard.write(str(model))
        await wizard.until(lambda: "cut off" in wizard.text())
        await wizard.press("enter")
        await wizard.pilot.pause()
        assert wizard.step == "model"


@pytest.mark.parametrize("name", BAD_DATA)
@pytest.mark.thinned(3)
async def test_bad_data_is_told_in_place(folder: Path, opened: Opened, name: str) -> None:
    content, said = BAD_DATA[name]
    (folder / name).write_bytes(content)
    answers = Answers(data_source="path", data_path=str(folder / name), step="data")
    async with opened(folder, answers) as wizard:
        await wizard.until(lambda: "✗" in wizard.text())
        shown = " ".join(wizard.text().split())
        assert said in shown
        await wizard.press("enter")
        await wizard.pilot.pause()
        assert wizard.step == "data"


@pytest.mark.parametrize("chosen", [0, 1])
@pytest.mark.thinned(1)
async def test_of_two_readings_of_the_columns_enter_takes_the_marked_one(
    folder: Path, opened: Opened, chosen: int
) -> None:
    data = folder / "qa.csv"
    data.write_text("question,answer,response\nWhy?,So.,Not so.\n")
    answers = Answers(step="data", data_source="path", data_path=str(data))
    async with opened(folder, answers) as wizard:
        await wizard.until(lambda: "`answer`: answer to `question`" in wizard.text())
        await wizard.press("tab", *["down"] * chosen, "enter")
        await wizard.until(lambda: wizard.screen.answers.settings)
        columns, ignored = [("answer", "response"), ("response", "answer")][chosen]
        assert wizard.screen.answers.settings == {
            "data.columns": {"prompt": "question", "completion": columns},
            "data.ignore": [ignored],
        }
        await wizard.until(lambda: "As the model sees it" in wizard.text())
        await wizard.press("enter")
        await wizard.until(lambda: wizard.step == "method")
        await wizard.press("escape")
        await wizard.press("tab", "x")
        await wizard.until(lambda: not wizard.screen.answers.settings)


async def test_of_columns_with_unknown_names_the_user_says_which_is_which(
    folder: Path, opened: Opened
) -> None:
    data = folder / "fragen.csv"
    data.write_text("frage,antwort\nWo?,Da.\n")
    answers = Answers(step="data", data_source="path", data_path=str(data))
    async with opened(folder, answers) as wizard:
        await wizard.until(lambda: "`antwort`: answer to `frage`" in wizard.text())
        await wizard.press("tab", "down", "enter")
        await wizard.until(lambda: wizard.screen.answers.settings)
        columns = {"prompt": "antwort", "completion": "frage"}
        assert wizard.screen.answers.settings == {"data.columns": columns}
        await wizard.until(lambda: "As the model sees it" in wizard.text())


async def test_data_that_went_bad_since_it_was_looked_at_stops_the_next_look(
    folder: Path, opened: Opened
) -> None:
    data = folder / "tales.txt"
    data.write_text("Once.\n")
    answers = Answers(data_source="path", data_path=str(data), step="data")
    async with opened(folder, answers) as wizard:
        await wizard.until(lambda: "✓ format" in wizard.text())
        await wizard.press("escape")
        data.unlink()
        await wizard.go_to("data")
        await wizard.until(lambda: "does not exist" in wizard.text())


async def test_a_machine_that_cannot_be_measured_does_not_stop_the_wizard(
    folder: Path, opened: Opened
) -> None:
    (folder / "probe.json").unlink()
    async with opened(folder, size=(120, 40)) as wizard:
        await wizard.until(lambda: "not measured" in wizard.text())
        await wizard.go_to("launch")


async def test_the_column_beside_comes_and_goes_with_the_width(
    folder: Path, opened: Opened
) -> None:
    async with opened(folder, size=(120, 40)) as wizard:
        assert "Your run" in wizard.text()
        await wizard.pilot.resize_terminal(80, 24)
        await wizard.until(lambda: "Your run" not in wizard.text())
        await wizard.pilot.resize_terminal(160, 50)
        await wizard.until(lambda: "Your run" in wizard.text())


async def test_a_draft_that_had_reached_the_launch_is_planned_again_first(
    folder: Path, opened: Opened
) -> None:
    save_draft(Answers(settings={"placement.offload": "max"}, step="launch"), folder / "draft.json")
    async with opened(folder) as wizard:
        await wizard.press("enter")
        await wizard.until(lambda: wizard.step == "strategy" and wizard.plan)
        asked = [line for line in wizard.asked() if line[0] == "plan"]
        assert "placement.offload=max" in asked[-1]


async def test_a_changed_answer_ends_the_plan_that_was_being_made(
    folder: Path, opened: Opened
) -> None:
    (folder / "hold").touch()
    async with opened(folder, Answers(step="strategy")) as wizard:
        await wizard.until(lambda: wizard.screen.background.plan.state.pending)
        await wizard.press("o", "o", "o")
        (folder / "hold").unlink()
        await wizard.until(lambda: wizard.plan)
        plans = [asked for asked in wizard.asked() if asked[0] == "plan"]
        assert "placement.offload=weights" in plans[-1], "the last answers are planned"


async def test_enter_twice_at_the_launch_starts_one_run(folder: Path, opened: Opened) -> None:
    async with opened(folder) as wizard:
        await wizard.go_to("launch")
        await wizard.press("enter", "enter", "enter")
        await wizard.until(lambda: wizard.app.ended_with)
        assert len(list((folder / "runs").iterdir())) == 1


# --- in the app -----------------------------------------------------------------------------------


@pytest.fixture
def app(folder: Path) -> FluxApp:
    """The real app on the wizard, with the stand-in engine."""
    wizard = WizardScreen(
        Answers(settings={"train.steps": 3}),
        folder / "runs",
        draft=folder / "draft.json",
        engine=(sys.executable, str(folder / "engine.py")),
    )
    return FluxApp(start_screen="wizard", sample_machine=False, make_wizard=lambda: wizard)


def driven(app: FluxApp, pilot: Any, folder: Path, wizard_pilot: ModuleType) -> Any:
    wizard = wizard_pilot.Wizard(app, pilot, folder)
    wizard.app.wizard = app.screen
    return wizard


async def test_leaving_the_wizard_without_a_run_leaves_the_app(
    app: FluxApp, folder: Path, wizard_pilot: ModuleType
) -> None:
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        wizard = driven(app, pilot, folder, wizard_pilot)
        await wizard.press("escape")
        await wizard.until(lambda: not app.is_running or app._exit)
    assert app.return_code == 0
    assert app.run_dir is None


async def test_a_launch_starts_the_trainer_and_shows_its_run(
    app: FluxApp, folder: Path, wizard_pilot: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(launch: launching.Launch) -> Any:
        saying = "import sys; print(*sys.argv[1:])"
        return start_trainer(launch.arguments, launch.run_dir, [sys.executable, "-c", saying])

    monkeypatch.setattr(launching, "begin", begin)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        wizard = driven(app, pilot, folder, wizard_pilot)
        await wizard.go_to("launch")
        await wizard.press("enter")
        await wizard.until(lambda: app.trainer is not None)
        assert app.trainer is not None
        assert app.trainer.wait(20) == 0
        assert app.run_dir == app.trainer.run_dir.path
    said = app.trainer.run_dir.log.read_text()
    assert said.startswith("--demo --set train.steps=3 ") and " --run-dir " in said


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
@pytest.mark.thinned(1)
async def test_a_walk_from_a_table_to_a_merged_model_without_leaving_the_app(
    folder: Path,
    model: Path,
    wizard_pilot: ModuleType,
    made: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    size: tuple[int, int],
) -> None:
    """With a stand-in for engine and trainer; the real ones are in test_end_to_end.py."""
    program = (sys.executable, str(folder / "engine.py"))
    wizard_screen = WizardScreen(None, folder / "runs", draft=folder / "draft", engine=program)
    app = FluxApp(start_screen="wizard", sample_machine=False, make_wizard=lambda: wizard_screen)
    app.engine = program
    (folder / "qa.csv").write_text("Question,Answer,response\nWhy?,So.,No.\nHow?,Thus.,No.\n")
    (folder / "export.json").write_text(json.dumps(EXPORTED))

    def begin(launch: launching.Launch) -> Any:
        assert "lora" in launch.config_text and "completion: Answer" in launch.config_text
        run = launch.run_dir
        journal = made.write(run / "events.ndjson", made.finished())
        text = journal.read_bytes().replace(b'"method":"full"', b'"method":"lora"')
        journal.write_bytes(text.replace(b'"rank":null', b'"rank":16'))
        (run / "model").mkdir()
        (run / "result.json").write_text(json.dumps({"exit_code": 0}))
        return start_trainer(launch.arguments, run, [sys.executable, "-c", "pass"])

    monkeypatch.setattr(launching, "begin", begin)
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        wizard = driven(app, pilot, folder, wizard_pilot)
        await wizard.go_to("model")
        await wizard.press("down", "down")
        await wizard.write(str(model))
        await wizard.go_to("data")
        await wizard.press("down")
        await wizard.write(str(folder / "qa.csv"))
        await wizard.until(lambda: "`Answer`: answer to `Question`" in wizard.text())
        await wizard.press("enter")
        await wizard.until(lambda: "As the model sees it" in wizard.text())
        await wizard.go_to("method")
        await wizard.press("right")
        await wizard.until(lambda: wizard.screen.answers.method == "lora")
        await wizard.go_to("launch")
        await wizard.press("enter")
        await wizard.until(lambda: "FINISHED" in wizard.text())
        await wizard.until(lambda: "the adapter is in" in wizard.text())
        await wizard.press("m")
        await wizard.until(lambda: "Export" in wizard.text() and "Merge" in wizard.text())
        await wizard.press("enter")
        await wizard.until(lambda: "/merged" in wizard.text() and "2.00 KiB in 6" in wizard.text())
        assert "--merge" in wizard.asked()[-1]


async def test_a_trainer_that_cannot_be_started_is_told_and_the_app_lives(
    app: FluxApp, folder: Path, wizard_pilot: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(launch: launching.Launch) -> Any:
        raise BadInput("engine.log cannot be written")

    monkeypatch.setattr(launching, "begin", refuse)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        wizard = driven(app, pilot, folder, wizard_pilot)
        await wizard.go_to("launch")
        await wizard.press("enter")
        await wizard.until(lambda: list(app._notifications))
        [told] = app._notifications
        assert told.message == "engine.log cannot be written"
        await wizard.until(lambda: isinstance(app.screen, PanelScreen))  # where keys work
        await wizard.press("q")
        await wizard.until(lambda: app._exit)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("theme", sorted(load_themes()[0]))
async def test_the_wizard_draws_in_every_theme(
    app: FluxApp, folder: Path, wizard_pilot: ModuleType, theme: str
) -> None:
    app.choose_theme(theme)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        wizard = driven(app, pilot, folder, wizard_pilot)
        await wizard.go_to("model")
        await wizard.press("down", "down")
        await wizard.until(lambda: "▸ Folder" in wizard.text())
        await wizard.press(*"/no", "enter")
        await wizard.until(lambda: "✗ /no does not exist" in wizard.text())
        assert app.theme == theme
