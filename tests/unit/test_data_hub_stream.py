"""Data sets on the hub that are no single file: configurations, splits, and what can go wrong."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import datasets
import pytest

from fluxtrain.data.reading.corpus import Reading
from fluxtrain.errors import BadInput
from fluxtrain.methods.text_task import read_as
from tests.unit.data_files import corpus, lines, rows

TALES = "hf://datasets/owner/tales"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """A hub whose data set has three files of its own, streamed by the library itself."""
    files = {
        split: str(lines(tmp_path, *({"prompt": f"{split} {i}", "completion": "so", "id": i}
                                     for i in range(5)), name=f"{split}.jsonl"))
        for split in ("train", "test")
    }  # fmt: skip
    state: dict[str, Any] = {"asked": [], "error": None}
    genuine = datasets.load_dataset

    def load(name: str, configuration: str | None, **options: Any) -> Any:
        state["asked"].append((name, configuration, options["split"], options["streaming"]))
        if state["error"] is not None:
            raise state["error"]
        return genuine("json", data_files=files, **options)

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr("fluxtrain.data.reading.hub.single_file", lambda repository, file: None)
    return state


def test_a_data_set_is_streamed_by_split(hub: dict[str, Any]) -> None:
    [part] = corpus(TALES).parts
    assert (part.container, part.shape) == ("hub", "completion")
    found = rows(TALES)
    assert [row.messages[0]["content"] for row in found] == [f"train {i}" for i in range(5)]
    assert str(found[4].origin) == f"{TALES}?split=train row 5"
    assert all(asked == ("owner/tales", None, "train", True) for asked in hub["asked"])


@pytest.mark.parametrize(
    "path",
    [
        f"{TALES}?configuration=en&split=test",
        [{"path": TALES, "configuration": "en", "split": "test"}],
    ],
)
def test_configuration_and_split_are_asked_for(hub: dict[str, Any], path: Any) -> None:
    assert rows(path)[0].messages[0]["content"] == "test 0"
    assert hub["asked"][0] == ("owner/tales", "en", "test", True)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("Config name is missing.\nPlease pick one among: ['de', 'en']"),
         "Please pick one among: ['de', 'en']; name one, as in"),
        (ValueError('Unknown split "dev". Should be one of [\'train\'].'), "Unknown split"),
        (ConnectionError("Couldn't reach the hub"), "Couldn't reach the hub"),
    ],
)  # fmt: skip
def test_what_the_library_refuses_is_told_in_one_line(
    hub: dict[str, Any], error: Exception, said: str
) -> None:
    hub["error"] = error
    with pytest.raises(BadInput) as refused:
        rows(TALES)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_a_stream_that_breaks_off_is_told_with_its_row(
    hub: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        info = datasets.DatasetInfo()

        def __iter__(self) -> Any:
            yield {"text": "one"}
            raise ConnectionError("the line is dead")

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: Broken())
    with pytest.raises(BadInput, match="cannot be read behind row 1: the line is dead"):
        rows(TALES)


def test_a_question_that_is_not_known_is_refused(hub: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="asks for 'config', and only configuration and split"):
        rows(f"{TALES}?config=en")


def test_the_missing_library_is_told_with_the_command_that_installs_it(
    hub: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(BadInput, match=r"pip install 'fluxtrain\[data\]'"):
        rows(TALES)


def test_configuration_and_split_of_a_local_file_are_refused(tmp_path: Path) -> None:
    path = lines(tmp_path, {"text": "x"})
    with pytest.raises(BadInput, match="is a local file"):
        rows([{"path": str(path), "split": "train"}])


def test_a_stream_of_unknown_size_says_that_only_its_first_rows_are_counted(
    hub: dict[str, Any],
) -> None:
    found = corpus(TALES)
    assert found.endless.startswith(f"how much {TALES}?split=train holds is not known")
    assert read_as(found).because.endswith(found.endless)


def test_a_stream_whose_rows_are_counted_by_the_hub_tells_its_share(
    hub: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Counted:
        info = datasets.DatasetInfo(
            splits=[{"name": "train", "num_bytes": 4000, "num_examples": 40}]
        )

        def __iter__(self) -> Any:
            return iter([{"text": f"row {number}"} for number in range(40)])

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: Counted())
    found = corpus(TALES)
    assert found.endless == "" and found.size_bytes == 4000
    reading = Reading(found)
    shares = [reading.share for _ in reading]
    assert shares[19] == 0.5
