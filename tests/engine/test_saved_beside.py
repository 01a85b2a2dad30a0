"""What a model's folder holds beside weights is saved as it was, and tried before the training."""

from __future__ import annotations

import builtins
import errno
import io
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from fluxtrain.data.rendering.named import use_template
from fluxtrain.errors import BadInput
from fluxtrain.events import events as ev
from fluxtrain.events.journal import read_events
from fluxtrain.methods.method import METHODS
from fluxtrain.models.loading import LoadedModel, ModelSource, load_model
from tests.engine.adapter_folders import exported, make_adapter
from tests.engine.runs import run
from tests.engine.test_lora_run import settings

Folder = Callable[..., Path]
DOUBTFUL = {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [4, 0]}


def changed(path: Path, **values: Any) -> dict[str, Any]:
    """Change a JSON file; None removes a key."""
    made = {**json.loads(path.read_text()), **values}
    made = {key: value for key, value in made.items() if value is not None}
    path.write_text(json.dumps(made))
    return made


def loaded(folder: Path) -> LoadedModel:
    return load_model(ModelSource(path=str(folder)))


def saved(model: LoadedModel, to: Path) -> Path:
    METHODS["full"].try_saving(model, to.parent)
    METHODS["full"].save(model, None, to)  # type: ignore[arg-type]
    return to


def test_files_of_the_source_are_carried_over_as_they_are(
    model_folder: Folder, tmp_path: Path
) -> None:
    folder = model_folder("llama")
    scaling = {"type": "linear", "factor": 2.0}
    config = changed(
        folder / "config.json", rope_parameters=None, dtype=None, torch_dtype="float32",
        rope_theta=500000.0, rope_scaling=scaling, transformers_version="4.43.0", our_own=[1],
    )  # fmt: skip
    words = changed(
        folder / "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast", backend=None, model_max_length=77,
    )  # fmt: skip
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<|endoftext|>"}')
    (folder / "LICENSE").write_text("ours")
    (folder / "README.md").write_text("of the base")
    (folder / "model-of-mine.gguf").write_text("weights")
    model = loaded(folder)
    shutil.rmtree(folder)  # while it trains
    made = saved(model, tmp_path / "made")
    found = json.loads((made / "config.json").read_text())
    assert {key: found[key] for key in config} == config
    assert set(found) - set(config) == {"dtype", "rope_parameters"}
    assert json.loads((made / "tokenizer_config.json").read_text()) == words
    assert (made / "special_tokens_map.json").exists() and (made / "LICENSE").read_text() == "ours"
    assert not (made / "README.md").exists() and not (made / "model-of-mine.gguf").exists()
    again = AutoConfig.from_pretrained(made)
    assert again.rope_parameters == {"rope_type": "linear", "rope_theta": 500000.0, **scaling}


@pytest.mark.parametrize("method", ["full", "lora"])
def test_settings_that_transformers_refuses_to_write_are_saved(
    method: str, run_config: Callable[..., Path], tmp_path: Path
) -> None:
    config = run_config(train__steps=1)
    (tmp_path / "llama-float32" / "generation_config.json").write_text(json.dumps(DOUBTFUL))
    run(config, tmp_path / "run", *settings({"name": method} if method == "lora" else {}))
    found = json.loads((tmp_path / "run" / "model" / "generation_config.json").read_text())
    assert found == DOUBTFUL | ({"pad_token_id": 0} if "pad_token_id" in found else {})


def test_another_chat_template_is_saved_in_every_place_of_it(
    model_folder: Folder, tmp_path: Path
) -> None:
    folder = model_folder("llama")
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    changed(folder / "tokenizer_config.json", chat_template=template)
    model = loaded(folder)
    assert not (saved(model, tmp_path / "same") / "chat_template.jinja").exists()
    other = tmp_path / "other.jinja"
    other.write_text("{{ messages[0]['content'] }}")
    use_template(model.tokenizer, str(other))  # type: ignore[arg-type]
    made = saved(model, tmp_path / "made")
    words = json.loads((made / "tokenizer_config.json").read_text())
    assert words["chat_template"] == (made / "chat_template.jinja").read_text() == other.read_text()
    assert AutoTokenizer.from_pretrained(made).chat_template == other.read_text()


@pytest.mark.parametrize("method", ["full", "lora"])
def test_what_cannot_be_saved_is_refused_before_the_first_step(
    method: str, run_config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(train__steps=1)
    monkeypatch.setattr("fluxtrain.models.export._PROBE", None)  # no tokenizer takes that
    with pytest.raises(BadInput, match=r"could not be saved: .* nothing\s+is trained yet"):
        run(config, tmp_path / "run", *settings({"name": method} if method == "lora" else {}))
    events = list(read_events(tmp_path / "run" / "events.ndjson"))
    assert not [event for event in events if isinstance(event, ev.StepFinished | ev.Planned)]
    assert not (tmp_path / "run" / "model").exists()


@pytest.fixture
def full_temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A temporary folder in which folders can be made, and no file written."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    opening = io.open

    def refused(file: Any, *how: Any, **named: Any) -> Any:
        if isinstance(file, str | Path) and folder in Path(file).parents:
            raise OSError(errno.ENOSPC, "No space left on device", str(file))
        return opening(file, *how, **named)

    for module in (io, builtins):
        monkeypatch.setattr(module, "open", refused)
    return folder


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_run_goes_on_beside_a_full_temporary_folder(
    method: str, run_config: Callable[..., Path], tmp_path: Path, full_temporary: Path
) -> None:
    config = run_config(train__steps=1)
    run(config, tmp_path / "run", *settings({"name": method} if method == "lora" else {}))
    assert (tmp_path / "run" / "model" / "tokenizer.json").is_file()
    log = (tmp_path / "run" / "engine.log").read_text()
    assert f"saved to try it, in {full_temporary} (No space left on device; " in log
    assert f"set TMPDIR to a folder on another disk; it is tried in {tmp_path / 'run'}" in log
    assert not list((tmp_path / "run").glob(".trial-*")) + list(full_temporary.iterdir())


def test_a_tokenizer_that_comes_back_as_another_one_is_refused(
    model_folder: Folder, tmp_path: Path
) -> None:
    model = loaded(model_folder("llama"))
    model.tokenizer.add_tokens(["quick brown"])
    with pytest.raises(BadInput, match="it makes other tokens of the same text"):
        METHODS["full"].try_saving(model, tmp_path)


def test_a_merged_model_is_saved_in_both_spellings(model_folder: Folder, tmp_path: Path) -> None:
    base = model_folder("llama", torch.bfloat16)
    made = Path(exported(make_adapter(base, tmp_path / "adapter"), check=False).folder)
    config = json.loads((made / "config.json").read_text())
    words = json.loads((made / "tokenizer_config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert config["torch_dtype"] == config["dtype"] == "bfloat16"
    assert words["tokenizer_class"] == "PreTrainedTokenizerFast"
