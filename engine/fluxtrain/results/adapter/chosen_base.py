"""Finds the base of an adapter, and says how training computed with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fluxtrain.config.schema import SHORT_NAMES
from fluxtrain.errors import BadInput
from fluxtrain.files.opening import whole
from fluxtrain.files.temporary import temporary_folder
from fluxtrain.methods.trained_on import TrainedOn
from fluxtrain.models.export import save_model
from fluxtrain.models.loading import DEMO, ModelSource, load_model, model_folder
from fluxtrain.models.model_files import (
    ModelFiles,
    QuantisedWeights,
    base_key,
    check_model_folder,
)
from fluxtrain.models.precision import DTYPES
from fluxtrain.plan.states import PACKED_FORMATS, StorageFormat

MOST_ROWS = 64  # that are compared

if TYPE_CHECKING:  # peft is imported where there are adapters
    from fluxtrain.results.adapter.source import AdapterSource


@dataclass(frozen=True, kw_only=True)
class UseRequest:
    """The options common to the commands that use a trained model."""

    named: str  # a run, `last`, or an adapter's folder; to evaluate and generate: any model
    step: int | None = None  # of a run's checkpoint; None: its result, else the newest one
    base: str | None = None  # of an adapter, where it is now
    other_base: bool = False  # take a base whose files are not those of training
    packed: str | None = None  # how the base was stored in training, where the adapter says nothing
    dtype: str = "auto"
    device: str | None = None
    trust_remote_code: bool = False

    def check_values(self) -> None:
        """Raise BadInput for a value that is not known."""
        refuse_unknown("--dtype", self.dtype, ("auto", *SHORT_NAMES, *DTYPES))
        refuse_unknown("--packed", self.packed, (None, *PACKED_FORMATS))
        refuse_unknown("--device", self.device, (None, "cpu", "cuda"))
        if self.device == "cuda" and not torch.cuda.is_available():
            raise BadInput("--device is cuda, and torch finds no GPU here: use --device cpu")

    @property
    def torch_name(self) -> str:
        """Return the dtype as torch names it, or `auto`."""
        return SHORT_NAMES.get(self.dtype, self.dtype)


@dataclass(frozen=True, kw_only=True)
class ExportRequest(UseRequest):
    """The options of `fluxtrain export`."""

    to: Path | None = None
    merge: bool = False
    gguf: str | None = None  # the type of its tensors
    onto: str = "dequantised"  # or `original`
    check: bool = True
    data: str | None = None
    rows: int = 4

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """Return the dtype to write; None for `auto`."""
        return None if self.dtype == "auto" else getattr(torch, self.torch_name)

    def check_values(self) -> None:
        """Raise BadInput for a value that is not known."""
        super().check_values()
        refuse_unknown("--onto", self.onto, ("dequantised", "original"))
        if not 1 <= self.rows <= MOST_ROWS:
            raise BadInput(f"--rows is {self.rows}: compare 1 to {MOST_ROWS} rows")


def refuse_unknown(option: str, given: str | None, known: tuple[str | None, ...]) -> None:
    """Raise BadInput for a value of an option that is none of those `known`."""
    if given not in known:
        raise BadInput(f"{option} is {given!r}: use one of {', '.join(filter(None, known))}")


@dataclass(frozen=True, kw_only=True)
class ChosenBase:
    """The base's folder, and how training computed with it."""

    files: ModelFiles
    name: str  # as configurations name it
    dtype: torch.dtype
    storage: StorageFormat


def base_name_of(request: UseRequest, source: AdapterSource) -> str:
    """Return the base's folder or hub id. A folder is absolute: an adapter may be moved.

    Raises BadInput where nothing names it.
    """
    named = request.base or source.config.base_model_name_or_path
    if not named:
        raise BadInput(f"{source.folder} does not say which base it is for: name it with --base")
    path = Path(named).expanduser()
    return str(whole(path)) if path.is_dir() else str(named)


@contextmanager
def chosen_base(request: UseRequest, source: AdapterSource) -> Iterator[ChosenBase]:
    """Find and check the base; the demo's, which is made and not stored, is written for a while.

    Raises BadInput where it is missing, quantised, or not the one of training.
    """
    name = base_name_of(request, source)
    if name == DEMO:
        with temporary_folder("base", "the demo's model") as made:
            yield _chosen(request, source, name, _demo(source, made / DEMO))
        return
    revision = None if request.base else source.config.revision
    model = ModelSource(path=name, revision=revision, trust_remote_code=request.trust_remote_code)
    try:
        folder = model_folder(model)
    except BadInput as error:
        raise BadInput(
            f"the base of {source.folder} is not here: {error}; name its folder with --base"
        ) from error
    yield _chosen(request, source, name, folder)


def _chosen(request: UseRequest, source: AdapterSource, name: str, folder: Path) -> ChosenBase:
    try:
        files = check_model_folder(folder, request.trust_remote_code)
    except QuantisedWeights as error:
        raise BadInput(
            f"the adapter's base {error} with --base, and how the base was packed in training with "
            "--packed (nf4-double is bitsandbytes' nf4 with double quantisation)"
        ) from error
    packed: StorageFormat = next((one for one in PACKED_FORMATS if one == request.packed), "plain")
    known = source.trained_on or TrainedOn(dtype=files.dtype or "float32", storage=packed)
    if request.packed not in (None, known.storage):
        raise BadInput(
            f"--packed is {request.packed}, and {source.weights} says that its base was stored as "
            f"{known.storage}: leave --packed out"
        )
    if known.key and known.key != base_key(files.weights) and not request.other_base:
        raise BadInput(
            f"{folder} is not the base that {source.folder} was trained on: its weight files "
            "are others; name the right one with --base, or add --other-base if it holds the same "
            "weights in other files"
        )
    return ChosenBase(
        files=files, name=name, dtype=getattr(torch, known.dtype), storage=known.storage
    )


def _demo(source: AdapterSource, folder: Path) -> Path:
    if source.run is None:
        raise BadInput(
            f"{source.folder} is of the demo's model, which is made of a run's seed: name the run"
        )
    dtype = source.trained_on.dtype if source.trained_on else source.run.model.dtype
    loaded = load_model(ModelSource(path=DEMO, dtype=dtype, seed=source.run.train.seed))
    save_model(loaded.model, loaded.tokenizer, folder)
    return folder
