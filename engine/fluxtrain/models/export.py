"""Saves a model so that `from_pretrained` loads it anywhere; tries its files before the training.

The folder appears complete or not at all: it is written next to its place, synced, and renamed.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    modeling_utils,
)

from fluxtrain.errors import BadInput, FluxTrainError, NoSpace, system_error
from fluxtrain.files.atomic import replace_folder
from fluxtrain.files.folders import unfinished_folder
from fluxtrain.files.temporary import FULL, free_text, moved_by, temporary_folder, written_in
from fluxtrain.models.beside import CONFIG, GENERATION, TOKENIZER, Beside, write_model_files
from fluxtrain.models.carried import add_tensors
from fluxtrain.models.loading import LoadedModel
from fluxtrain.models.quiet import quiet_transformers
from fluxtrain.models.tensor_files import SHARD_BYTES, save_tensors
from fluxtrain.units import bytes_text


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    beside: Beside | None = None,
) -> int:
    """Write weights (safetensors), configuration, generation settings and tokenizer to `folder`.

    beside: the files and further tensors of the folder that the model is from: carried over.
    Returns the bytes written. Wait for pending updates before the call. A folder of that name from
    an earlier save is replaced once the new one is complete. Raises NoSpace if the disk fills up
    and BadInput if the place cannot be written; both leave the earlier folder.
    """

    carried = beside or Beside()
    tensors = [*_distinct(model), *carried.tensors.values()]

    def write(made: Path) -> None:
        _save_pretrained(model, made, max_shard_size=SHARD_BYTES)
        add_tensors(made, carried.tensors, SHARD_BYTES)
        write_model_files(made, model, tokenizer, carried)

    return save_folder(write, sum(tensor.nbytes for tensor in tensors), folder)


def try_saving_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, beside: Beside
) -> None:
    """Write the files of `save_model`, without the weights, to an existing folder."""
    _save_pretrained(model, folder, state_dict={})
    for path in folder.glob("model*.safetensors"):
        path.unlink()
    write_model_files(folder, model, tokenizer, beside)


def _save_pretrained(model: PreTrainedModel, folder: Path, **options: Any) -> None:
    """Save with transformers, which refuses doubtful generation settings: they are written apart,
    so it gets some that are beyond doubt. It lays out the files, and `save_tensors` writes them."""
    known = getattr(model, "generation_config", None)
    if known is not None:
        model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
    library: Any = modeling_utils
    save_file, library.safe_save_file = library.safe_save_file, save_tensors
    try:
        with quiet_transformers():
            model.save_pretrained(folder, **options)
    finally:
        library.safe_save_file = save_file
        if known is not None:
            model.generation_config = known


def save_folder(write: Callable[[Path], None], needed: int, folder: Path) -> int:
    """Let `write` fill a new folder, which becomes `folder` once it is complete and on disk.

    Returns the bytes written. Raises NoSpace if the `needed` bytes are not there or the disk fills
    up, and BadInput if the place cannot be written; both leave an earlier folder of that name.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder.parent).free
        if free < needed:
            raise NoSpace(
                f"saving {folder} needs {bytes_text(needed)} and {bytes_text(free)} is free: "
                f"make room, or {moved_by(folder) or 'choose another disk'}"
            )
        return replace_folder(folder, write)
    except OSError as error:
        raise _explained(error, folder) from error
    except Exception as error:  # safetensors and tokenizers have kinds of their own
        refused = system_error(error)
        if refused is None:
            raise
        raise _explained(refused, folder) from error


def _distinct(model: PreTrainedModel) -> list[Tensor]:
    """Return the tensors to save, tied ones once."""
    return list({id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}.values())


def _explained(error: OSError, folder: Path) -> NoSpace | BadInput:
    if isinstance(error, NoSpace):
        return error
    if error.errno in FULL:
        cure = moved_by(folder)
        cure = f"make room, or {cure}" if cure else "make room and resume, or choose another disk"
        return NoSpace(
            f"no space left while saving {folder} ({os.strerror(error.errno or 0)}; "
            f"{free_text(folder.parent)} free): {cure}"
        )
    return BadInput(f"{folder} cannot be written: {error.strerror or error}")


_log = logging.getLogger(__name__)
_PROBE = "The quick brown fox, 1 + 2 = 3.\n\tüß 漢字"


def try_saving(loaded: LoadedModel, write: Callable[[Path], None], beside: Path) -> None:
    """Let `write` fill a temporary folder with all but the weights, and read it as others will.

    Where the temporary folder takes no more, one in the folder `beside` is used, with a warning.
    Raises BadInput for what cannot be written or read; later, it would be said when the training is
    done. Raises NoSpace or BadInput, which name TMPDIR, where neither folder takes it.
    """
    what = f"the files beside the weights of {loaded.name}, saved to try it,"
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
            "the trained model could not be saved: the files beside the weights of "
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
