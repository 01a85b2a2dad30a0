"""A run that `--set` alone defines: it needs both the model and the data."""

from __future__ import annotations

import pytest

from fluxtrain.config.schema import config_of
from fluxtrain.errors import BadInput


def test_model_and_data_make_a_run_without_a_file() -> None:
    config = config_of(["model.path=o/n", "data.path=[a.txt, {path: b.txt, weight: 2}]"])
    assert config is not None and config.model.path == "o/n"
    assert len(config.data.path) == 2


@pytest.mark.parametrize("sets", [[], ["model.path=o/n"], ["data.path=d"], ["model=3", "data=4"]])
def test_one_of_them_alone_makes_none(sets: list[str]) -> None:
    assert config_of(sets) is None


def test_a_mistake_in_one_is_told_with_its_key() -> None:
    with pytest.raises(BadInput, match="learning_rate"):
        config_of(["model.path=m", "data.path=d", "train.learning_rate=fast"])
