"""Saves a model's files beside its weights and reads them again, before the training begins."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from fluxtrain.errors import BadInput, FluxTrainError, system_error
from fluxtrain.files.folders import unfinished_folder
from fluxtrain.files.temporary import temporary_folder, written_in
from fluxtrain.models.beside import CONFIG, GENERATION, TOKENIZER
from fluxtrain.models.loading import LoadedModel
from fluxtrain.models.quiet import quiet_transformers

_log = logging.getLogger(__name__)
_PROBE = "The quick brown fox, 1 + 2 = 3.\n\tüß 漢字"


def try_saving(loaded: LoadedModel, write: Callable[[Path], None], beside: Path) -> None:
    """Let `write` fill a temporary folder with all but the weights, and read it as others will.

    Where the temporary folder takes no more, one in the folder `beside` is used, with a warning.
    Raises BadInput for what cannot be written or read; later, it would be said when the training is
    done. Raises NoSpace or BadInput, which name TMPDIR, where neither folder takes it.
    """
    what = f"what stands beside the weights of {loaded.name}, saved to try it,"
    try:
        with temporary_folder("trial", what) as folder, written_in(folder, what):
            _try_in(folder, loaded, write)
    except FluxTrainError as refused:
        if not isinstance(refused.__cause__, OSError):  # the model's own fault
            raise
        _log.warning("%s; it is tried in %s", refused, beside)
        try:
            with unfinished_folder(beside, ".trial-") as folder:
                _try_in(folder, loaded, write)
        except OSError:
            raise refused from None


def _try_in(folder: Path, loaded: LoadedModel, write: Callable[[Path], None]) -> None:
    # code is named in these two alone, and they are refused before loading unless it is trusted
    trusted = any("auto_map" in (loaded.beside.json(name) or {}) for name in (CONFIG, TOKENIZER))
    _tried("written", loaded, lambda: write(folder))
    if (folder / CONFIG).exists():
        _tried("read back: its configuration", loaded, lambda: _read_config(folder, trusted))
    if (folder / GENERATION).exists():
        _tried(
            "read back: its generation settings",
            loaded,
            lambda: GenerationConfig.from_pretrained(folder),
        )
    _tried("read back: its tokenizer", loaded, lambda: _compare(loaded, folder, trusted))


def _tried(doing: str, loaded: LoadedModel, act: Callable[[], object]) -> None:
    try:
        with quiet_transformers():
            act()
    except (FluxTrainError, MemoryError, OSError):
        raise
    except Exception as error:  # whatever the library makes of files that it does not like
        if (refused := system_error(error)) is not None:
            raise refused from error
        words = " ".join(str(error).split())[:300] or type(error).__name__
        raise BadInput(
            "the trained model could not be saved: what stands beside the weights of "
            f"{loaded.name} cannot be {doing} ({words}): repair it in the model's folder; nothing "
            "is trained yet"
        ) from error


def _read_config(folder: Path, trusted: bool) -> None:
    AutoConfig.from_pretrained(folder, trust_remote_code=trusted, local_files_only=True)


def _compare(loaded: LoadedModel, folder: Path, trusted: bool) -> None:
    tokenizer: Any = loaded.tokenizer
    again: Any = AutoTokenizer.from_pretrained(
        folder, trust_remote_code=trusted, local_files_only=True
    )
    if again.chat_template != tokenizer.chat_template:
        raise ValueError("its chat template is another one")
    if again(_PROBE)["input_ids"] != tokenizer(_PROBE)["input_ids"]:
        raise ValueError("it makes other tokens of the same text")
