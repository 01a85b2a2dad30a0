"""The wizard's answers as values: what configuration, command and draft they become."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxtrain.config.schema import demo_config, load_config, validate
from fluxtrain.config.schema import settings as all_settings
from fluxtui.answers.answers import (
    STEPS,
    Answers,
    hub_id_problem,
    neighbour,
    with_data,
    with_model,
    with_settings,
)
from fluxtui.answers.configuring import (
    answers_from_config,
    chosen_settings,
    configuration,
    set_arguments,
    yaml_text,
)
from fluxtui.answers.draft import draft_path, forget_draft, load_draft, save_draft
from fluxtui.answers.launching import (
    command_text,
    engine_arguments,
    prepare,
    run_name,
)
from fluxtui.wizard.checks.answer_checks import check_data

NAMES = st.text("abcXYZ0189._- '\"#:{}&*äß", min_size=1, max_size=30)
ANSWERS = st.builds(
    Answers,
    model_source=st.sampled_from(("demo", "folder", "hub")),
    model_folder=NAMES.map("/models/{}".format),
    model_hub=st.just("owner/name"),
    data_source=st.sampled_from(("demo", "path", "hub")),
    data_hub=st.sampled_from(("owner/name", "owner/name/data/train.jsonl")),
    data_path=NAMES.map("/data/{}".format),
    settings=st.fixed_dictionaries(
        {},
        optional={
            "placement.offload": st.sampled_from(("none", "optimizer", "weights", "max")),
            "data.sequence_length": st.integers(2, 10**6),
            "train.batch_rows": st.integers(1, 10**6),
            "placement.chunk_rows": st.integers(1, 10**6),
            "train.steps": st.integers(1, 10**9),
        },
    ),
    step=st.sampled_from(STEPS),
)


def test_the_default_answers_are_the_demo() -> None:
    assert Answers().is_demo
    assert engine_arguments(Answers(), Path("unused.yaml")) == ["--demo"]
    assert command_text(Answers()) == "fluxtrain train --demo"


@given(answers=ANSWERS)
def test_every_answer_is_a_configuration_that_the_trainer_accepts(answers: Answers) -> None:
    config = validate(yaml.safe_load(yaml_text(answers)))
    assert config.model.path == answers.model_path
    assert config.data.path == answers.data_file
    found = {setting.key: setting.value for setting in all_settings(config)}
    assert chosen_settings(answers).items() <= found.items()


@given(answers=ANSWERS)
def test_answers_read_back_from_their_own_configuration_are_the_same_run(answers: Answers) -> None:
    again = answers_from_config(yaml.safe_load(yaml_text(answers)))
    assert configuration(again) == configuration(answers)


@given(answers=ANSWERS)
@settings(max_examples=30)
def test_a_draft_brings_back_every_answer(
    answers: Answers, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("state") / "deep" / "draft.json"
    assert save_draft(answers, path)
    untouched = dataclasses.replace(answers, step="start") == Answers()
    assert load_draft(path) == (None if untouched else answers)


def test_settings_of_a_demo_become_overrides_that_the_trainer_accepts() -> None:
    answers = Answers(
        settings={"train.steps": 7, "placement.offload": "max"}, overrides=("train.seed=3",)
    )
    arguments = engine_arguments(answers, Path("unused.yaml"))
    assert arguments[0] == "--demo"
    config = demo_config([value for value in arguments if "=" in value])
    assert (config.train.steps, config.placement.offload, config.train.seed) == (7, "max", 3)


def test_settings_of_other_runs_are_in_the_file_and_not_given_twice() -> None:
    answers = Answers(
        settings={"train.steps": 7},
        data_source="path",
        data_path="/d.txt",
        overrides=("train.seed=3",),
    )
    assert set_arguments(answers) == ["--set", "train.seed=3"]
    assert engine_arguments(answers, Path("c.yaml"))[0] == "c.yaml"


def test_keys_that_the_wizard_does_not_ask_for_are_carried_through() -> None:
    base: dict[str, dict[str, Any]] = {
        "model": {"path": "owner/name", "revision": "main"},
        "data": {"path": "/d.txt", "sequence_length": 64},
        "train": {"learning_rate": 1e-4},
    }
    answers = answers_from_config(base)
    changed = configuration(with_settings(answers, {"train.steps": 5}))
    assert changed["model"] == {"path": "owner/name", "revision": "main"}
    assert changed["data"]["sequence_length"] == 64
    assert changed["train"] == {"learning_rate": 1e-4, "steps": 5}
    assert "steps" not in base["train"], "the answers must not change the file's own values"


def test_an_offload_setting_of_a_file_can_be_turned_back_to_auto() -> None:
    answers = answers_from_config({"placement": {"offload": "max"}})
    assert answers.settings.get("placement.offload") == "max"
    back = configuration(with_settings(answers, {"placement.offload": None}))
    assert validate(back).placement.offload == "auto"


@given(answers=ANSWERS)
def test_the_whole_configuration_that_a_run_keeps_comes_back_as_the_same_run(
    answers: Answers,
) -> None:
    kept = validate(configuration(answers)).model_dump(mode="json")  # as in run.json
    again = answers_from_config(kept)
    assert validate(configuration(again)) == validate(kept)
    assert again.settings == answers.settings


@pytest.mark.parametrize("stop", ["fast", "balanced", "fit"])
def test_the_dial_of_a_configuration_stands_where_it_was_and_can_be_turned_back(stop: str) -> None:
    answers = answers_from_config({"placement": {"aggressiveness": stop, "device": "cpu"}})
    assert answers.dial == stop
    assert validate(configuration(answers)).placement.aggressiveness == stop
    back = dataclasses.replace(answers, dial="auto", dial_settings={})
    assert validate(configuration(back)).placement.aggressiveness == "auto"
    assert validate(configuration(back)).placement.device == "cpu"


def test_a_share_between_two_stops_of_the_dial_is_carried_through() -> None:
    answers = answers_from_config({"placement": {"aggressiveness": 0.3}})
    assert answers.dial == "auto"
    assert validate(configuration(answers)).placement.aggressiveness == 0.3


def test_numbers_of_a_run_can_be_given_back_to_the_trainer() -> None:
    answers = answers_from_config({"train": {"steps": 9, "batch_rows": 2, "seed": 1}})
    config = validate(
        configuration(with_settings(answers, {"train.steps": None, "train.batch_rows": None}))
    )
    assert (config.train.steps, config.train.batch_rows, config.train.seed) == (None, "auto", 1)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("demo", "demo"),
        ("owner/name", "hub"),
        ("./x", "folder"),
        ("/x/y", "folder"),
        ("x", "folder"),
    ],
)
def test_a_model_is_told_from_its_spelling(path: str, source: str) -> None:
    answers = with_model(Answers(), path)
    assert answers.model_source == source
    assert answers.model_path == str(Path(path)) if source == "folder" else path


def test_data_on_the_hub_is_told_from_its_prefix() -> None:
    answers = with_data(Answers(), "hf://datasets/owner/tales/a.jsonl")
    assert (answers.data_source, answers.data_hub) == ("hub", "owner/tales/a.jsonl")
    assert answers.data_file == "hf://datasets/owner/tales/a.jsonl"
    assert check_data(answers).error is None
    for wrong in ("tales", "a b/c", "-x/y"):
        assert check_data(Answers(data_source="hub", data_hub=wrong)).error
    assert check_data(Answers(data_source="hub")).open


@pytest.mark.parametrize("typed", ["hf://", "hf:", " hf://owner/tales "])
def test_an_address_of_the_hub_that_is_none_is_told_as_it_was_typed(typed: str) -> None:
    answers = with_data(Answers(), typed)
    assert answers.data_file == typed.strip()
    said = f"{typed.strip()} is not hf://datasets/owner/name or hf://datasets/owner/name/file.jsonl"
    assert check_data(answers).error == said


def test_an_address_of_the_hub_is_taken_for_a_file_too() -> None:
    answers = Answers(data_source="path", data_path="hf://datasets/owner/tales")
    assert answers.data_file == answers.data_path
    assert check_data(answers).error is None


def test_a_folder_that_looks_like_an_id_is_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert with_model(Answers(), "owner/name").model_source == "folder"


def test_choosing_another_source_keeps_what_was_typed() -> None:
    answers = with_data(with_model(Answers(), "/models/a"), "/data/b.txt")
    back = with_data(with_model(answers, "demo"), "demo")
    assert back.is_demo
    assert (back.model_folder, back.data_path) == ("/models/a", "/data/b.txt")


@pytest.mark.parametrize("text", ["", "name", "a/b/c", "-a/b", "a b/c", "a/", "/b"])
def test_what_is_not_a_hub_id_is_refused_with_an_example(text: str) -> None:
    assert "Qwen/" in (hub_id_problem(text) or "")


def test_hub_ids_are_accepted() -> None:
    assert hub_id_problem("Qwen/Qwen2.5-0.5B") is None


def test_steps_have_neighbours_inside_the_wizard_only() -> None:
    assert neighbour(Answers(), -1) is None
    assert neighbour(Answers(step="launch"), 1) is None
    walked = [Answers()]
    while (step := neighbour(walked[-1], 1)) is not None:
        walked.append(Answers(step=step))
    assert tuple(answers.step for answers in walked) == STEPS


def test_a_run_that_goes_on_has_no_more_questions() -> None:
    assert neighbour(Answers(start="resume"), 1) == "launch"
    assert neighbour(Answers(start="resume", step="launch"), -1) == "start"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not json",
        "[]",
        '{"model_source": "pickle"}',
        '{"steps": -1, "offload": "max"}',
        '{"overrides": "train.seed=1"}',
        '{"model_folder": 3, "offload": "max"}',
    ],
)
def test_a_broken_draft_is_no_draft(text: str, tmp_path: Path) -> None:
    path = tmp_path / "draft.json"
    path.write_text(text)
    assert load_draft(path) is None


def test_a_draft_of_a_later_version_with_more_answers_is_read(tmp_path: Path) -> None:
    path = tmp_path / "draft.json"
    path.write_text(json.dumps({"settings": {"placement.offload": "max"}, "colour": "blue"}))
    assert load_draft(path) == Answers(settings={"placement.offload": "max"})


def test_a_draft_that_cannot_be_written_does_not_stop_the_wizard(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert not save_draft(
        Answers(settings={"placement.offload": "max"}), tmp_path / "file" / "draft.json"
    )


def test_the_draft_lies_in_the_state_folder_of_the_user() -> None:
    assert draft_path({"XDG_STATE_HOME": "/s"}) == Path("/s/fluxtrain/draft.json")
    assert draft_path({"HOME": "/h"}) == Path("/h/.local/state/fluxtrain/draft.json")


def test_forgetting_a_draft_twice_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "draft.json"
    save_draft(Answers(settings={"placement.offload": "max"}), path)
    forget_draft(path)
    forget_draft(path)
    assert load_draft(path) is None


def test_a_prepared_launch_has_its_directory_and_a_configuration_the_trainer_loads(
    tmp_path: Path,
) -> None:
    data = tmp_path / "some data.txt"
    data.write_text("hello")
    answers = Answers(data_source="path", data_path=str(data), settings={"train.steps": 3})
    launch = prepare(answers, tmp_path / "runs")
    assert launch.run_dir.is_dir() and launch.run_dir.parent == tmp_path / "runs"
    config = load_config(launch.arguments[0])
    assert (config.data.path, config.train.steps) == (str(data), 3)
    assert str(launch.run_dir) in launch.command
    assert (launch.run_dir / "config.yaml").read_text().endswith(launch.config_text)


def test_two_launches_in_the_same_second_have_two_directories(tmp_path: Path) -> None:
    first, second = prepare(Answers(), tmp_path), prepare(Answers(), tmp_path)
    assert first.run_dir != second.run_dir


@pytest.mark.parametrize(
    ("answers", "name"),
    [
        (Answers(), "demo"),
        (Answers(data_source="path", data_path="/x/tales.txt"), "demo-tales"),
        (Answers(model_source="hub", model_hub="Qwen/Qwen2.5-0.5B"), "Qwen2.5-0.5B"),
    ],
)
def test_a_run_is_named_after_what_it_trains(answers: Answers, name: str) -> None:
    assert run_name(answers) == name
