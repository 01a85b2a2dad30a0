"""What an adapter was trained on: the dtype, the storage and the files of its base.

It lies in the metadata of the adapter's weights, which peft leaves alone, so that it stays with
them wherever they are copied to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import cast

from fluxtrain.plan.states import PACKED_FORMATS, StorageFormat

_KEY = "fluxtrain_base"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedOn:
    """The base that an adapter was trained on: its dtype, storage and files."""

    dtype: str  # of weights and activations, as torch names it
    storage: StorageFormat  # of the large frozen weights of its blocks
    key: str = ""  # of its weight files (`model_files.base_key`); empty where it is not known

    def metadata(self) -> dict[str, str]:
        """Return it as metadata of a safetensors file."""
        return {_KEY: json.dumps(asdict(self))}


def trained_on(metadata: Mapping[str, str] | None) -> TrainedOn | None:
    """Read it from the metadata of a safetensors file; None where it says nothing of it."""
    try:
        told = json.loads((metadata or {})[_KEY])
        dtype, storage, key = (str(told[name]) for name in ("dtype", "storage", "key"))
    except (KeyError, ValueError, TypeError):
        return None
    if storage not in ("plain", *PACKED_FORMATS):
        return None
    return TrainedOn(dtype=dtype, storage=cast(StorageFormat, storage), key=key)
