"""A hub model that the disk refuses is told with its folder and what moves it, not as a network."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from fluxtrain.errors import BadInput, FluxTrainError, NoSpace
from fluxtrain.models.loading import ModelSource, load_model


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, NoSpace), (errno.EDQUOT, NoSpace), (errno.EROFS, BadInput)]
)
def test_a_disk_that_refuses_a_hub_model_is_told(
    number: int, kind: type[FluxTrainError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: object, **__: object) -> str:
        raise OSError(number, os.strerror(number), str(tmp_path / "blob"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", breaks)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(FluxTrainError, match=rf"nobody/none .*to {tmp_path} ") as told:
        load_model(ModelSource(path="nobody/none"))
    assert type(told.value) is kind
    assert "set HF_HOME to a folder on another disk" in str(told.value)
    assert os.strerror(number) in str(told.value) and "network" not in str(told.value)
