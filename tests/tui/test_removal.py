"""Deleting a run takes what it wrote, whatever lies beside it and whoever swaps its folders."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fluxtrain.errors import BadInput
from fluxtrain.events.run_folder import own_files, removal
from fluxtrain.events.run_folder.own_files import model_files, note_model, of_model, others_in
from fluxtrain.events.run_folder.removal import contents, remove_run
from fluxtrain.events.run_folder.run_dir import RunDir

OWN = {
    "checkpoints/step-00000020/manifest.json", "checkpoints/step-00000020/trainer.json",
    "checkpoints/step-00000020/shard-00000.safetensors",
    "checkpoints/.writing-step-00000040/shard-00000.safetensors",
    "checkpoints/.writing-old-step-00000010/trainer.json",
    "model/config.json", "model/LICENSE", "model/model.safetensors", "model/parts/a.json",
    "run.json", "result.json", "engine.log", "events.ndjson", ".run.json.17.tmp",
    "trackers/wandb.json", "tensorboard/events.out.tfevents.17.host",
    ".model-ab_d3f9h/model.safetensors", ".model-old-ab_d3f9h/model/LICENSE",
}  # fmt: skip
OTHERS = {
    "notes.txt", "run.json.bak", ".run.json.tmp", "model-2/config.json", "checkpoints-old/x",
    "checkpoints/best.pt", "checkpoints/step-00000020/notes.txt",
    "checkpoints/step-00000020/shard-00000.safetensors.bak",
    "checkpoints/step-00000020/inner/manifest.json", "checkpoints/step-20/manifest.json",
    "checkpoints/step-00000020-mine/manifest.json", "checkpoints/.writing-mine/trainer.json",
    "model/notes.txt", "model/adapter_config.json", "model/parts/mine.json", "model/config.json.1",
    ".model-mine/config.json", "tensorboard/plots.png", "trackers/mine.json", "ctl.sock",
}  # fmt: skip


def written(folder: Path, names: set[str]) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("content")


def files_in(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir()}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with one run, whose model was listed when it was saved."""
    run = RunDir(tmp_path / "runs" / "one")
    written(run.path, OWN)
    note_model(run)
    return tmp_path / "runs"


def test_all_that_a_run_wrote_goes_with_its_folder(runs: Path) -> None:
    before = sum(path.stat().st_size for path in (runs / "one").rglob("*") if path.is_file())
    assert contents(runs / "one") == removal.Contents(before)
    assert remove_run(runs / "one", runs).own_bytes == before
    assert not (runs / "one").exists()


def test_everything_else_stays_and_is_told_before_and_after(runs: Path) -> None:
    written(runs / "one", OTHERS)
    told = contents(runs / "one").others
    found = remove_run(runs / "one", runs)
    assert files_in(runs / "one") == OTHERS
    assert set(found.others) == set(told)
    for name in OTHERS:
        assert any(name == one or name.startswith(f"{one}/") for one in told), name


def test_a_file_of_the_model_that_was_changed_since_stays(runs: Path) -> None:
    (runs / "one" / "model" / "config.json").write_text("{changed by the user}")
    assert remove_run(runs / "one", runs).kept_text == "model/config.json stays: not of the run"
    assert files_in(runs / "one") == {"model/config.json"}


def test_of_a_model_without_a_list_the_known_names_go(runs: Path) -> None:
    (runs / "one" / "model-files.json").unlink()
    remove_run(runs / "one", runs)
    assert files_in(runs / "one") == {
        "model/LICENSE", "model/parts/a.json", ".model-old-ab_d3f9h/model/LICENSE",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["model", "checkpoints", "run.json", "model/config.json"])
def test_a_link_in_the_place_of_something_stays_and_what_it_leads_to(
    runs: Path, tmp_path: Path, name: str
) -> None:
    place = runs / "one" / name
    precious = tmp_path / "precious"
    place.rename(precious)
    place.symlink_to(precious)
    before = files_in(precious) if precious.is_dir() else precious.read_text()
    assert remove_run(runs / "one", runs).others == (name,)
    assert place.is_symlink()
    assert (files_in(precious) if precious.is_dir() else precious.read_text()) == before


# --- swapped meanwhile ----------------------------------------------------------------------------


class Swapping:
    """The module `os`, which calls `swap` just before its call of number `at`."""

    def __init__(self, at: int, swap: Callable[[], None]) -> None:
        self.calls, self._at, self._swap = 0, at, swap

    def __getattr__(self, name: str) -> Any:
        value = getattr(os, name)
        if name not in ("open", "listdir", "stat", "unlink", "rmdir"):
            return value

        def called(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls == self._at:
                self._swap()
            return value(*arguments, **options)

        return called


def watched(monkeypatch: pytest.MonkeyPatch, at: int, swap: Callable[[], None]) -> Swapping:
    stand_in: Any = Swapping(at, swap)
    monkeypatch.setattr(own_files, "os", stand_in)
    monkeypatch.setattr(removal, "os", stand_in)
    return stand_in


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """Another folder with files of the same names, which must be there afterwards."""
    folder = tmp_path / "outside"
    written(folder, OWN)
    (folder / "run.json").write_text("{}")
    note_model(RunDir(folder))
    before = files_in(folder)
    yield folder
    assert files_in(folder) == before


@pytest.mark.parametrize("name", [".", "checkpoints", "checkpoints/step-00000020", "model"])
def test_a_folder_that_is_swapped_for_a_link_at_any_moment_leads_nowhere_else(
    runs: Path, outside: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    counted = watched(monkeypatch, 0, lambda: None)
    remove_run(runs / "one", runs)
    assert counted.calls > 50
    for at in range(1, counted.calls + 1, 3):
        monkeypatch.setattr(own_files, "os", os)
        run = RunDir(runs / f"run-{at}")
        written(run.path, OWN)
        note_model(run)
        place = run.path if name == "." else run.path / name

        def swap(place: Path = place, at: int = at) -> None:
            if place.exists() and not place.is_symlink():
                place.rename(tmp_path / f"aside-{at}")
                place.symlink_to(outside if name == "." else outside / name)

        watched(monkeypatch, at, swap)
        with suppress(BadInput):
            remove_run(run.path, runs)
        monkeypatch.setattr(removal, "os", os)
        assert (outside / "run.json").read_text() == "{}"
        assert (outside / "model" / "config.json").exists()
        assert (outside / "checkpoints" / "step-00000020" / "trainer.json").exists()


def test_another_folder_in_the_runs_place_is_not_removed(
    runs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    visited = removal.visit

    def swapped(*arguments: Any, **options: Any) -> Any:
        found = visited(*arguments, **options)
        if options.get("remove"):
            (runs / "one").rename(tmp_path / "aside")
            (runs / "one").mkdir()
        return found

    monkeypatch.setattr(removal, "visit", swapped)
    remove_run(runs / "one", runs)
    assert (runs / "one").is_dir(), "it is new, and not the run's"
    assert files_in(tmp_path / "aside") == set()


def test_the_question_says_what_stays(runs: Path) -> None:
    (runs / "one" / "model" / "notes.txt").write_text("mine")
    assert contents(runs / "one").kept_text == "model/notes.txt stays: not of the run"


# --- before a model is saved again ----------------------------------------------------------------


def test_what_is_not_of_the_run_is_known_before_its_model_is_replaced(runs: Path) -> None:
    run = RunDir(runs / "one")
    assert others_in(run.model, of_model(model_files(run))) == []
    written(run.path, {"model/notes.txt", "model/parts/mine.json"})
    assert others_in(run.model, of_model(model_files(run))) == ["notes.txt", "parts"]
    moved = own_files.kept_beside(run.model / "notes.txt", run.path / "kept-from-model")
    assert moved == run.path / "kept-from-model" / "notes.txt"
    written(run.path, {"model/notes.txt"})
    again = own_files.kept_beside(run.model / "notes.txt", run.path / "kept-from-model")
    assert again.name == "notes.txt-1" and moved.read_text() == again.read_text()
    assert others_in(runs / "gone", of_model(None)) == []


@pytest.mark.parametrize("kind", ["link", "file", "pipe"])
def test_what_is_moved_out_of_the_way_stays_in_the_runs_folder(
    runs: Path, tmp_path: Path, kind: str
) -> None:
    run = RunDir(runs / "one")
    written(run.path, {"model/notes.txt"})
    (tmp_path / "elsewhere").mkdir()
    place = run.path / "kept-from-model"
    if kind == "link":
        place.symlink_to(tmp_path / "elsewhere")
    elif kind == "file":
        place.touch()
    else:
        os.mkfifo(place)
    moved = own_files.kept_beside(run.model / "notes.txt", place)
    assert moved == run.path / "kept-from-model-1" / "notes.txt" and moved.exists()
    assert not list((tmp_path / "elsewhere").iterdir())


def test_the_list_is_of_a_record_that_anybody_may_have_written(runs: Path) -> None:
    run = RunDir(runs / "one")
    run.write_json(
        run.model_list, {"model_files": {"../run.json": 3, "config.json": "many", "x": None}}
    )
    assert model_files(run) == {"../run.json": 3}
    run.write_json(run.model_list, {"model_files": ["config.json"]})
    assert model_files(run) is None
