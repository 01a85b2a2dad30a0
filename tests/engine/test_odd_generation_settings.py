"""No generation settings of a model keep a run from its end: it is trained, saved and said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fluxtrain.errors import BadInput
from fluxtrain.events import events as ev
from fluxtrain.events.journal import read_events
from fluxtrain.events.run_folder.run_dir import RunDir
from fluxtrain.models.generate.batch import write
from fluxtrain.models.generate.sampling import Sampling, _mend
from fluxtrain.models.generate.writing import text_of
from fluxtrain.models.loading import ModelSource, load_model
from fluxtrain.train import run as run_module
from fluxtrain.train.samples import TrainedModel
from tests.hostile import many

values = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
    | st.lists(st.integers() | st.text(max_size=3) | st.none(), max_size=3)
)  # fmt: skip


class Settings:
    """What transformers makes of a generation_config.json, which checks few types."""

    def __init__(self, **told: Any) -> None:
        self.do_sample = True
        self.__dict__ |= told


@many
@given(st.dictionaries(st.sampled_from(
    ["temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "stop_strings"]
), values))  # fmt: skip
def test_any_value_to_draw_by_is_mended(told: dict[str, Any]) -> None:
    settings = Settings(**told)
    _mend(settings)
    for name in told:
        value = getattr(settings, name)
        if name == "stop_strings":
            assert value is None or all(isinstance(one, str) and one for one in value)
        else:
            assert value is None or isinstance(value, int | float)


def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[ev.AnyEvent]:
    from fluxtrain.config.schema import demo_config
    from fluxtrain.train.checkpoint.recovery import new_run

    monkeypatch.setenv("FLUXTRAIN_RUNS", str(tmp_path))
    config = demo_config(["train.steps=1", "data.sequence_length=32", "train.batch_rows=2"])
    target = new_run(config)
    run_module.train(config, target)
    run: RunDir = target.run_dir
    assert (run.model / "model.safetensors").exists()
    assert json.loads(run.result.read_text())["exit_code"] == 0
    return list(read_events(run.journal))


class PanicException(BaseException):
    """What libraries in Rust raise."""


@pytest.mark.thinned(1)
@pytest.mark.parametrize("kind", [ValueError, PanicException])
def test_a_sample_that_fails_after_the_training_is_a_warning_and_the_run_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    def fails(*_: object, **__: object) -> str:
        raise kind("There are one or more stop strings\nand more")

    monkeypatch.setattr(run_module, "sample_text", fails)
    told = trained(tmp_path, monkeypatch)
    warned = [event.text for event in told if isinstance(event, ev.LogWritten)]
    said = "the model is saved, and no sample of it is shown: There are one or more stop strings"
    assert said in warned
    assert isinstance(told[-1], ev.Done) and told[-1].exit_code == 0


def test_a_tokenizer_that_panics_on_an_answer_is_bad_input_which_ends_samples_alone() -> None:
    class Panics:
        def decode(self, token_ids: Any, **options: Any) -> Any:
            raise PanicException("index out of bounds")

    with pytest.raises(BadInput, match="the decoder .* failed .index out of bounds."):
        text_of(Panics(), [1, 2])


@pytest.mark.parametrize(
    "told", [{"bad_words_ids": [[-1]]}, {"sequence_bias": {"a": 1}}, {"forced_eos_token_id": 10**9}]
)
def test_settings_that_transformers_refuses_are_bad_input_with_its_words(
    told: dict[str, Any],
) -> None:
    loaded = load_model(ModelSource())
    for name, value in told.items():
        setattr(loaded.model.generation_config, name, value)
    model = TrainedModel(loaded=loaded, device=torch.device("cpu"))
    with pytest.raises(BadInput, match=r"demo: its generation settings cannot be used \(.+\)"):
        write(model, [[1, 2, 3]], Sampling(max_new_tokens=2))
