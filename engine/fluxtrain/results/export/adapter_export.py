"""Exports an adapter: alone, or merged into its base; checked before it takes its place."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fluxtrain.errors import BadInput
from fluxtrain.events.answers.answers import ComparedLogits, ExportAnswer
from fluxtrain.files.terminations import terminations_told
from fluxtrain.models.beside import OF_TOKENIZERS, copy_beside, files_beside
from fluxtrain.models.export import save_folder
from fluxtrain.models.loading import empty_model
from fluxtrain.results.export.agreement import compared_layers
from fluxtrain.results.export.attached import attach
from fluxtrain.results.export.base_files import TrainedBase, base_files
from fluxtrain.results.export.chosen_base import (
    ChosenBase,
    ExportRequest,
    base_name_of,
    chosen_base,
)
from fluxtrain.results.export.gate import Gate, accepted, refuse_rounded_away
from fluxtrain.results.export.merging import Merge
from fluxtrain.results.export.refusals import CONFIG, note_without_effect
from fluxtrain.results.export.source import WEIGHTS, AdapterSource, find_adapter

Tell = Callable[[str], None]
_BESIDE_BYTES = 64 << 20  # tokenizer and configuration, at most
_TELL_EVERY_S = 3.0
_CARRIED = (*OF_TOKENIZERS, "generation_config")


def export(request: ExportRequest, tell: Tell) -> ExportAnswer:
    """Write the folder, or nothing; `tell` is called with the progress.

    Raises BadInput, NoSpace, DoesNotFit, or Disagrees where the check fails.
    """
    started_s = time.perf_counter()
    request.check_values()
    source = find_adapter(request.named)
    to = (request.to or _usual_folder(source, request)).expanduser()
    if to.exists() and not (to.is_dir() and not any(to.iterdir())):
        raise BadInput(f"{to} exists: remove it, or name another folder with --to")
    note_without_effect(source.folder, source.config, source.weights)
    with terminations_told("the export was whole"):
        facts = (_merged if request.merge else _alone)(request, source, to, tell)
    return ExportAnswer(
        kind="merged" if request.merge else "adapter",
        folder=str(to),
        files=sum(path.is_file() for path in to.iterdir()),
        seconds=time.perf_counter() - started_s,
        **facts,
    )


def _usual_folder(source: AdapterSource, request: ExportRequest) -> Path:
    kind = "merged" if request.merge else "adapter"
    folder = source.folder.absolute()
    return folder.parent / (kind if source.run is not None else f"{folder.name}-{kind}")


def _alone(request: ExportRequest, source: AdapterSource, to: Path, tell: Tell) -> dict[str, Any]:
    """Write an adapter's own folder. Only another dtype changes its values, so only that is
    checked."""
    dtype, name = request.torch_dtype, base_name_of(request, source)
    tensors, metadata = _tensors(source, dtype)
    logits: ComparedLogits | None = None
    converts = dtype is not None and request.check
    with chosen_base(request, source) if converts else nullcontext() as base:

        def write(made: Path) -> None:
            nonlocal logits
            save_file(tensors, made / WEIGHTS, metadata=metadata)
            _write_beside(source, name, made)
            if base is not None and dtype is not None:
                gate = Gate(request, source, base)
                tell("computing base and adapter")
                expected = gate.trained(base.storage)
                tell("computing base and exported adapter")
                logits = accepted(gate.compared(expected, gate.trained(base.storage, made), dtype))

        needed = sum(tensor.nbytes for tensor in tensors.values()) + _BESIDE_BYTES
        size = save_folder(write, needed, to)
    stored = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    return {
        "bytes": size, "base": name, "dtype": stored, "onto": None, "changed": 0, "layers": None,
        "logits": logits, "quantisation": None, "notes": (),
    }  # fmt: skip


def _merged(request: ExportRequest, source: AdapterSource, to: Path, tell: Tell) -> dict[str, Any]:
    """Write a base with the adapter in its weights."""
    with chosen_base(request, source) as base:
        merge = _merge(request, source, base)
        original = request.onto == "original" and base.storage != "plain"
        logits: ComparedLogits | None = None
        quantisation: ComparedLogits | None = None

        def write(made: Path) -> None:
            nonlocal logits, quantisation
            merge.write(made, _progress(tell))
            if not request.check:
                return
            if (layers := compared_layers(merge.rounded)) is not None:
                refuse_rounded_away(layers)
            gate = Gate(request, source, base)
            tell("computing base and adapter")
            expected = gate.trained("plain" if original else base.storage)
            tell("computing the merged model")
            found, dtype = gate.saved(made)
            logits = accepted(gate.compared(expected, found, dtype))
            if original:
                tell("computing base and adapter as they were trained")
                quantisation = gate.compared(gate.trained(base.storage), found, dtype)

        size = save_folder(write, merge.size_bytes + _BESIDE_BYTES, to)
    plain = base.storage == "plain"
    return {
        "bytes": size, "base": base.name, "dtype": merge.stated_dtype,
        "onto": "original" if plain or original else f"dequantised ({base.storage})",
        "changed": len(merge.attached.changed), "layers": compared_layers(merge.rounded),
        "logits": logits, "quantisation": quantisation, "notes": _notes(request, base),
    }  # fmt: skip


def _merge(request: ExportRequest, source: AdapterSource, base: ChosenBase) -> Merge:
    empty = empty_model(base.files.folder, base.dtype, request.trust_remote_code)
    files = base_files(base.files, empty)
    attached = attach(source, empty, base.storage)
    storage = "plain" if request.onto == "original" else base.storage
    merge = Merge(
        attached=attached,
        onto=TrainedBase(files, base.dtype, storage, attached.packed),
        adapter=source.folder,
        dtype=request.torch_dtype,
        measured=request.check,
    )
    merge.check()
    return merge


def _progress(tell: Tell) -> Callable[[int, int], None]:
    told_s = time.monotonic()

    def progress(done: int, count: int) -> None:
        nonlocal told_s
        if time.monotonic() - told_s >= _TELL_EVERY_S:
            tell(f"merging weight {done + 1} of {count}")
            told_s = time.monotonic()

    return progress


def _notes(request: ExportRequest, base: ChosenBase) -> tuple[str, ...]:
    if request.onto != "original":
        return ()
    if base.storage == "plain":
        return ("the base was not packed in training, so --onto changes nothing",)
    return (
        f"the adapter was trained beside weights packed as {base.storage}: beside the original "
        "ones it computes something else than was trained",
    )


def _write_beside(source: AdapterSource, base: str, to: Path) -> None:
    """Write configuration and tokenizer to the folder `to`; the tokenizer is taken from the base
    where the adapter has none. base: its name or folder, for the configuration."""
    told: dict[str, Any] = json.loads((source.folder / CONFIG).read_text(encoding="utf-8"))
    told["base_model_name_or_path"] = base
    text = json.dumps(told, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    (to / CONFIG).write_text(text, encoding="utf-8")
    for folder in (source.folder, Path(base)):
        paths = [
            path
            for path in (files_beside(folder) if folder.is_dir() else [])
            if path.relative_to(folder).as_posix().startswith(_CARRIED)
        ]
        for path in paths:
            copy_beside(path, folder, to)
        if paths:
            return


def _tensors(
    source: AdapterSource, dtype: torch.dtype | None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safe_open(source.weights, "pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = dict(file.metadata() or {"format": "pt"})
    if dtype is not None:
        found = {n: t.to(dtype) if t.is_floating_point() else t for n, t in found.items()}
    return found, metadata
