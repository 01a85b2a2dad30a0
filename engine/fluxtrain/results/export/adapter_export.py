"""Exports an adapter: alone, or merged into its base; checked before it takes its place."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fluxtrain.errors import BadInput
from fluxtrain.events.answers.answers import ComparedLogits, ExportAnswer
from fluxtrain.events.run_folder.run_dir import find_run
from fluxtrain.files.terminations import terminations_told
from fluxtrain.models.beside import OF_TOKENIZERS, copy_beside, files_beside
from fluxtrain.models.export import save_folder
from fluxtrain.models.loading import empty_model
from fluxtrain.results.adapter.attached import attach
from fluxtrain.results.adapter.chosen_base import (
    ChosenBase,
    ExportRequest,
    base_name_of,
    chosen_base,
)
from fluxtrain.results.adapter.refusals import CONFIG, note_without_effect
from fluxtrain.results.adapter.source import WEIGHTS, AdapterSource
from fluxtrain.results.export.agreement import compared_layers
from fluxtrain.results.export.base_files import TrainedBase, base_files
from fluxtrain.results.export.gate import Gate, accepted, refuse_rounded_away
from fluxtrain.results.export.merging import Merge
from fluxtrain.results.from_checkpoint import RunCheckpoint
from fluxtrain.results.model_request import FoundModel, find_model

Tell = Callable[[str], None]
Kind = Literal["adapter", "merged", "model"]
_BESIDE_BYTES = 64 << 20  # tokenizer and configuration, at most
_TELL_EVERY_S = 3.0
_CARRIED = (*OF_TOKENIZERS, "generation_config")


def export(request: ExportRequest, tell: Tell) -> ExportAnswer:
    """Write the folder, or nothing; `tell` is called with the progress.

    Raises BadInput, NoSpace, DoesNotFit, or Disagrees where the check fails.
    """
    started_s = time.perf_counter()
    request.check_values()
    found = find_model(request.named, request.step)
    kind = _kind(request, found)
    to = (request.to or usual_folder(found, kind)).expanduser()
    if to.exists() and not (to.is_dir() and not any(to.iterdir())):
        raise BadInput(f"{to} exists: remove it, or name another folder with --to")
    with ExitStack() as stack:
        stack.enter_context(terminations_told("the export was whole"))
        source, checkpoint = found.adapter, found.checkpoint
        if checkpoint is not None and kind != "model":
            tell(f"reading {found.path}")
            source = stack.enter_context(checkpoint.adapter(request))
        if source is not None:
            note_without_effect(source.folder, source.config, source.weights)
            facts = (_merged if request.merge else _alone)(request, source, to, tell)
        else:
            assert checkpoint is not None, "as `_kind` says"
            tell(f"reading {found.path}")
            facts = _whole(request, checkpoint, to)
    return ExportAnswer(
        kind=kind,
        folder=str(to),
        files=sum(path.is_file() for path in to.iterdir()),
        seconds=time.perf_counter() - started_s,
        **facts,
    )


def _kind(request: ExportRequest, found: FoundModel) -> Kind:
    """Return the kind to write. Raises BadInput where a complete model is in the folder already."""
    checkpoint = found.checkpoint
    if found.adapter is not None or (checkpoint is not None and not checkpoint.is_whole):
        return "merged" if request.merge else "adapter"
    if checkpoint is None:
        raise _no_adapter(Path(found.path).expanduser())
    refused = {
        "--merge": request.merge,
        "--dtype": request.dtype != "auto",
        "--packed": request.packed is not None,
    }
    if given := [option for option, is_given in refused.items() if is_given]:
        raise BadInput(
            f"{given[0]} is of adapters, and {found.path} holds a whole model: leave it out"
        )
    return "model"


def _no_adapter(path: Path) -> BadInput:
    if (path / "config.json").is_file():
        return BadInput(
            f"{path} holds a complete model and no adapter ({CONFIG}): it is ready for use as it "
            "is; --step N exports a checkpoint of a run"
        )
    if path.is_dir():
        return BadInput(
            f"{path} holds no adapter ({CONFIG}) and is no run: name a run, or the folder that "
            "peft's save_pretrained wrote"
        )
    find_run(str(path))  # names the nearest runs
    return BadInput(f"{path} is no adapter: name a run, or an adapter's folder")


def usual_folder(found: FoundModel, kind: str) -> Path:
    """Return the folder in the run's, or next to an adapter's own."""
    if found.run_dir is None:
        folder = Path(found.path).expanduser().absolute()
        return folder.parent / f"{folder.name}-{kind}"
    step = f"-step-{found.checkpoint.files.step}" if found.checkpoint is not None else ""
    return found.run_dir.absolute() / f"{kind}{step}"


def _whole(request: ExportRequest, checkpoint: RunCheckpoint, to: Path) -> dict[str, Any]:
    """Write the model of a checkpoint, bit for bit as it was trained."""
    loaded = checkpoint.save(request, to)
    return {
        "bytes": sum(path.stat().st_size for path in to.rglob("*") if path.is_file()),
        "base": request.base or checkpoint.run.model.path, "dtype": loaded.precision.dtype,
        "onto": None, "changed": 0, "layers": None, "logits": None, "quantisation": None,
        "notes": (),
    }  # fmt: skip


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
            merge.write(made, progress_told(tell, "merging weight"))
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


def progress_told(tell: Tell, what: str) -> Callable[[int, int], None]:
    """Return a function that reports every few seconds how many of many are done."""
    told_s = time.monotonic()

    def progress(done: int, count: int) -> None:
        nonlocal told_s
        if time.monotonic() - told_s >= _TELL_EVERY_S:
            tell(f"{what} {done + 1} of {count}")
            told_s = time.monotonic()

    return progress


def _notes(request: ExportRequest, base: ChosenBase) -> tuple[str, ...]:
    if request.onto != "original":
        return ()
    if base.storage == "plain":
        return ("the base was not packed in training, so --onto changes nothing",)
    return (
        f"the adapter was trained on weights packed as {base.storage}: on the original "
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
