"""Exports a model as GGUF, read back and compared before it takes its place."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from fluxtrain.errors import BadInput
from fluxtrain.events.answers.answers import ComparedLogits, ExportAnswer
from fluxtrain.files.terminations import terminations_told
from fluxtrain.models.export import save_folder
from fluxtrain.models.generation import stops_of
from fluxtrain.models.loading import ModelSource, empty_model, model_folder, tokenizer_of_folder
from fluxtrain.models.model_files import ModelFiles, check_model_folder
from fluxtrain.results.adapter.chosen_base import ExportRequest, refuse_unknown
from fluxtrain.results.export.adapter_export import Tell, export, progress_told, usual_folder
from fluxtrain.results.export.base_files import base_files
from fluxtrain.results.export.gate import accepted
from fluxtrain.results.gguf.gguf_file import (
    WRITTEN,
    GgufModel,
    gguf_package,
    size_bytes,
    write_gguf,
)
from fluxtrain.results.gguf.read_back import compared
from fluxtrain.results.model_request import find_model
from fluxtrain.results.opened import generation_settings

# Made by llama.cpp's program from a file with every bit of the model.
BY_LLAMA_CPP = (
    "q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k",
)  # fmt: skip
_PROGRAM = "llama-quantize"
_EXACT = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


def export_gguf(request: ExportRequest, tell: Tell) -> ExportAnswer:
    """Write a folder with one GGUF file, or nothing; `tell` is called with the progress.

    Raises BadInput, NoSpace, DoesNotFit, or Disagrees where the check fails.
    """
    started_s = time.perf_counter()
    request.check_values()
    kind = _kind(request.gguf)
    gguf_package()
    found = find_model(request.named, request.step)
    to = (request.to or usual_folder(found, f"gguf-{kind}")).expanduser()
    if to.exists() and not (to.is_dir() and not any(to.iterdir())):
        raise BadInput(f"{to} exists: remove it, or name another folder with --to")
    with terminations_told("the export was whole"), ExitStack() as until_written:
        merged: ExportAnswer | None = None
        if found.adapter is None and found.checkpoint is None:
            source = ModelSource(path=found.path, trust_remote_code=request.trust_remote_code)
            folder = model_folder(source)
        else:
            folder = _beside(until_written, to) / "model"
            is_whole = found.checkpoint is not None and found.checkpoint.is_whole
            plain = replace(request, gguf=None, merge=not is_whole, to=folder)
            merged = export(plain, tell)
        tell(f"reading {folder}")
        opened = _opened(request, folder, (found.run_dir or Path(found.path)).name)
        logits: ComparedLogits | None = None

        def write(made: Path) -> None:
            nonlocal logits
            path = made / f"model-{kind}.gguf"
            _write(opened, path, kind, tell)
            if request.check:
                logits = accepted(
                    compared(request, opened.model, opened.tokenizer, path, found.run, tell)
                )

        extra = 0 if kind in WRITTEN else opened.files.weight_bytes
        size = save_folder(write, size_bytes(opened.model, kind) + extra, to)
    return ExportAnswer(
        kind="gguf", folder=str(to), bytes=size, files=1,
        base=merged.base if merged else str(folder), dtype=kind,
        onto=merged.onto if merged else None, changed=merged.changed if merged else 0,
        layers=merged.layers if merged else None, logits=logits,
        quantisation=None, seconds=time.perf_counter() - started_s,
        notes=(*(merged.notes if merged else ()), *opened.notes),
    )  # fmt: skip


def _kind(given: str | None) -> str:
    """Return the type that is written; raise BadInput where it is not known or cannot be made."""
    kind = (given or "").lower()
    refuse_unknown("--gguf", kind, (*WRITTEN, *BY_LLAMA_CPP))
    if kind in BY_LLAMA_CPP and shutil.which(_PROGRAM) is None:
        raise BadInput(
            f"--gguf {kind} is made by llama.cpp's {_PROGRAM}, which is not on the PATH: install "
            "llama.cpp, or use --gguf q8_0"
        )
    return kind


def _beside(until: ExitStack, to: Path) -> Path:
    """Make a folder for a whole model on the disk where the result will be."""
    place = to.absolute().parent
    place.mkdir(parents=True, exist_ok=True)
    return Path(until.enter_context(tempfile.TemporaryDirectory(dir=place, prefix=".gguf-")))


@dataclass(frozen=True, kw_only=True)
class _Opened:
    """A model folder, ready to be written."""

    files: ModelFiles
    name: str
    model: GgufModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def notes(self) -> tuple[str, ...]:
        config = self.model.config
        length = self.model.family.settings(config)["context_length"]
        if length == config.max_position_embeddings:
            return ()
        return (
            f"llama.cpp leaves the sliding window of this model out: the file tells a context of "
            f"{length:,} tokens, up to which both compute the same",
        )


def _opened(request: ExportRequest, folder: Path, name: str) -> _Opened:
    trusted = request.trust_remote_code
    files = check_model_folder(folder, trusted)
    empty = empty_model(folder, getattr(torch, files.dtype or "float32"), trusted)
    tokenizer = tokenizer_of_folder(folder, trusted)
    model = GgufModel.of(base_files(files, empty), empty, tokenizer)
    return _Opened(files=files, name=name, model=model, tokenizer=tokenizer)


def _write(opened: _Opened, path: Path, kind: str, tell: Tell) -> None:
    settings: Any = generation_settings(opened.files.folder)
    ends = tuple(stops_of(settings)) if settings else ()
    exact = kind if kind in WRITTEN else _EXACT[opened.files.dtype or "float32"]
    place = path if kind in WRITTEN else path.with_name(f"exact-{exact}.gguf")
    write_gguf(
        place, opened.model, opened.tokenizer, exact, name=opened.name, ends=ends,
        tell=progress_told(tell, "writing tensor"),
    )  # fmt: skip
    if place != path:
        tell(f"{_PROGRAM} makes {kind}")
        _quantise(place, path, kind)
        place.unlink()


def _quantise(exact: Path, path: Path, kind: str) -> None:
    done = subprocess.run(
        [_PROGRAM, str(exact), str(path), kind.upper()],
        capture_output=True, text=True, errors="replace", check=False,
    )  # fmt: skip
    if done.returncode or not path.is_file():
        words = (done.stderr.strip() or done.stdout.strip() or "no word").splitlines()[-1]
        raise BadInput(
            f"{_PROGRAM} ended with code {done.returncode} ({words:.200}): look at its version, "
            "or use --gguf q8_0"
        )
