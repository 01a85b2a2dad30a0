"""What is asked of an export, and the base that the adapter needs for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fluxtrain.config.schema import SHORT_NAMES
from fluxtrain.errors import BadInput
from fluxtrain.exporting.merging import SHARD_BYTES
from fluxtrain.exporting.source import AdapterSource
from fluxtrain.methods.trained_on import TrainedOn
from fluxtrain.models.export import save_model
from fluxtrain.models.loading import DEMO, ModelSource, load_model, model_folder
from fluxtrain.models.model_files import ModelFiles, base_key, check_model_folder
from fluxtrain.models.precision import DTYPES
from fluxtrain.plain_files import read_plain
from fluxtrain.plan.states import PACKED_FORMATS, StorageFormat
from fluxtrain.unfinished.temporary import temporary_folder

ONTO = ("dequantised", "original")
MOST_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """What the command line asks for."""

    named: str  # a run or an adapter's folder
    to: Path | None = None
    merge: bool = False
    onto: str = "dequantised"  # or `original`
    dtype: str = "auto"
    base: str | None = None
    other_base: bool = False  # take a base whose files are not those of training
    packed: str | None = None  # how the base was stored in training, where the adapter says nothing
    check: bool = True
    data: str | None = None
    rows: int = 4
    device: str | None = None
    trust_remote_code: bool = False
    shard_bytes: int = SHARD_BYTES

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """The dtype to write; None for `auto`."""
        name = SHORT_NAMES.get(self.dtype, self.dtype)
        return None if name == "auto" else getattr(torch, name)

    def check_values(self) -> None:
        """Raise BadInput for a value that is not known."""
        for option, given, known in (
            ("--dtype", self.dtype, ("auto", *SHORT_NAMES, *DTYPES)),
            ("--onto", self.onto, ONTO),
            ("--packed", self.packed, (None, *PACKED_FORMATS)),
            ("--device", self.device, (None, "cpu", "cuda")),
        ):
            if given not in known:
                raise BadInput(
                    f"{option} is {given!r}: use one of {', '.join(filter(None, known))}"
                )
        if not 1 <= self.rows <= MOST_ROWS:
            raise BadInput(f"--rows is {self.rows}: compare 1 to {MOST_ROWS} rows")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise BadInput("--device is cuda, and torch finds no GPU here: use --device cpu")

    @property
    def compute_device(self) -> str:
        """Where the check computes."""
        return self.device or ("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True, kw_only=True)
class ChosenBase:
    """The base's folder, and how training computed with it."""

    files: ModelFiles
    name: str  # as configurations name it
    dtype: torch.dtype
    storage: StorageFormat


def base_name_of(request: ExportRequest, source: AdapterSource) -> str:
    """Return the base's folder or hub id. A folder is absolute: an adapter may be moved.

    Raises BadInput where nothing names it.
    """
    named = request.base or source.config.base_model_name_or_path
    if not named:
        raise BadInput(f"{source.folder} does not say which base it is for: name it with --base")
    path = Path(named).expanduser()
    return str(path.absolute()) if path.is_dir() else str(named)


@contextmanager
def chosen_base(request: ExportRequest, source: AdapterSource) -> Iterator[ChosenBase]:
    """Find and check the base; the demo's, which is made and not stored, is written for a while.

    Raises BadInput where it is missing, quantised, or not the one of training.
    """
    name = base_name_of(request, source)
    if name == DEMO:
        with temporary_folder("base", "the demo's model") as made:
            base = _demo(source, made / DEMO)
            yield _chosen(request, source, name, base)
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


def _chosen(request: ExportRequest, source: AdapterSource, name: str, folder: Path) -> ChosenBase:
    _refuse_quantised(folder)
    files = check_model_folder(folder, request.trust_remote_code)
    known = source.trained_on or TrainedOn(
        dtype=files.dtype or "float32", storage=_packed(request.packed)
    )
    if request.packed not in (None, known.storage):
        raise BadInput(
            f"--packed is {request.packed}, and {source.weights} says that its base was stored as "
            f"{known.storage}: leave --packed out"
        )
    if known.key and known.key != base_key(files.weights) and not request.other_base:
        raise BadInput(
            f"{folder} is not the base that {source.folder} was trained beside: its weight files "
            "are others; name the right one with --base, or add --other-base if it holds the same "
            "weights in other files"
        )
    return ChosenBase(
        files=files, name=name, dtype=getattr(torch, known.dtype), storage=known.storage
    )


def _packed(given: str | None) -> StorageFormat:
    return next((known for known in PACKED_FORMATS if known == given), "plain")


def _refuse_quantised(folder: Path) -> None:
    try:
        config: Any = json.loads(read_plain(folder / "config.json", follow=True))
        told = config["quantization_config"]
    except (OSError, ValueError, KeyError, TypeError):
        return  # what is damaged is told by those who read it
    kind = told.get("quant_method", "unknown") if isinstance(told, dict) else "unknown"
    raise BadInput(
        f"the adapter's base {folder} is quantised ({kind}): name the original, unquantised model "
        "with --base, and how the base was packed in training with --packed (nf4-double is "
        "bitsandbytes' nf4 with double quantisation)"
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
