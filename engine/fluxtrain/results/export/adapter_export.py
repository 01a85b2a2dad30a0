"""Exports an adapter: alone, or merged into its base; checked before it takes its place."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fluxtrain.errors import BadInput
from fluxtrain.events.answers.answers import ComparedLayers, ComparedLogits, ExportAnswer
from fluxtrain.models.beside import OF_TOKENIZERS, copy_beside, files_beside
from fluxtrain.models.export import save_folder
from fluxtrain.models.loading import empty_model
from fluxtrain.results.export.agreement import Agreement, kept_share
from fluxtrain.results.export.attached import attach
from fluxtrain.results.export.base_files import TrainedBase, base_files
from fluxtrain.results.export.chosen_base import (
    ChosenBase,
    UseRequest,
    base_name_of,
    chosen_base,
    refuse_unknown,
)
from fluxtrain.results.export.compared_rows import ComparedRows
from fluxtrain.results.export.gate import Gate, compared, refuse_logits, refuse_rounded_away
from fluxtrain.results.export.merging import SHARD_BYTES, Merge
from fluxtrain.results.export.refusals import CONFIG, note_without_effect
from fluxtrain.results.export.source import WEIGHTS, AdapterSource, find_adapter

Tell = Callable[[str], None]
_BESIDE_BYTES = 64 << 20  # tokenizer and configuration, at most
_TELL_EVERY_S = 3.0
ONTO = ("dequantised", "original")
MOST_ROWS = 64
_CARRIED = (*OF_TOKENIZERS, "generation_config")


@dataclass(frozen=True, kw_only=True)
class ExportRequest(UseRequest):
    """What the command line asks for."""

    to: Path | None = None
    merge: bool = False
    onto: str = "dequantised"  # or `original`
    check: bool = True
    data: str | None = None
    rows: int = 4
    shard_bytes: int = SHARD_BYTES

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """The dtype to write; None for `auto`."""
        return None if self.dtype == "auto" else getattr(torch, self.torch_name)

    def check_values(self) -> None:
        """Raise BadInput for a value that is not known."""
        super().check_values()
        refuse_unknown("--onto", self.onto, ONTO)
        if not 1 <= self.rows <= MOST_ROWS:
            raise BadInput(f"--rows is {self.rows}: compare 1 to {MOST_ROWS} rows")

    @property
    def compute_device(self) -> str:
        """Where the check computes."""
        return self.device or ("cuda" if torch.cuda.is_available() else "cpu")


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
    made = _Merged(request, source, tell) if request.merge else _Alone(request, source, tell)
    answer = made.export(to)
    return msgspec.structs.replace(answer, seconds=time.perf_counter() - started_s)


def _usual_folder(source: AdapterSource, request: ExportRequest) -> Path:
    kind = "merged" if request.merge else "adapter"
    folder = source.folder.absolute()
    return folder.parent / (kind if source.run is not None else f"{folder.name}-{kind}")


@dataclass(frozen=True)
class _Alone:
    """An adapter's own folder. Only another dtype changes its values, so only that is checked."""

    request: ExportRequest
    source: AdapterSource
    tell: Tell

    def export(self, to: Path) -> ExportAnswer:
        request, source = self.request, self.source
        dtype = request.torch_dtype
        checked: list[ComparedLogits] = []
        converts = dtype is not None and request.check
        with chosen_base(request, source) if converts else nullcontext() as base:

            def write(made: Path) -> None:
                write_adapter(source, name, dtype, made)
                if base is not None:
                    checked.append(self._checked(base, made))

            name = base_name_of(request, source)
            size = save_folder(write, adapter_bytes(source, dtype) + _BESIDE_BYTES, to)
        first = next(iter(_tensors(source, dtype)[0].values()))
        return ExportAnswer(
            kind="adapter",
            folder=str(to),
            bytes=size,
            files=_count_files(to),
            base=name,
            dtype=str(first.dtype).removeprefix("torch."),
            onto=None,
            changed=0,
            layers=None,
            logits=checked[0] if checked else None,
            quantisation=None,
            seconds=0.0,
            notes=(),
        )

    def _checked(self, base: ChosenBase, made: Path) -> ComparedLogits:
        gate = _gate(self.request, self.source, base)
        self.tell("computing base and adapter")
        expected, rows, blocks = gate.expected(base.storage)
        self.tell("computing base and exported adapter")
        found = gate.adapted(made, rows, base.storage)
        dtype = self.request.torch_dtype
        assert dtype is not None
        return _accepted(compared(expected, found, (base.dtype, dtype), blocks), rows)


@dataclass(frozen=True)
class _Merged:
    """A base with the adapter in its weights."""

    request: ExportRequest
    source: AdapterSource
    tell: Tell

    def export(self, to: Path) -> ExportAnswer:
        request, source = self.request, self.source
        with chosen_base(request, source) as base:
            merge = self._merge(base)
            checked: tuple[ComparedLogits | None, ComparedLogits | None] = (None, None)

            def write(made: Path) -> None:
                nonlocal checked
                merge.write(made, self._progress("merging weight"))
                if request.check:
                    refuse_rounded_away(merge.rounded)
                    checked = self._check(base, made)

            size = save_folder(write, merge.size_bytes + _BESIDE_BYTES, to)
        return ExportAnswer(
            kind="merged",
            folder=str(to),
            bytes=size,
            files=_count_files(to),
            base=base.name,
            dtype=merge.stated_dtype,
            onto=_onto(request, base),
            changed=len(merge.attached.changed),
            layers=_rounded(merge),
            logits=checked[0],
            quantisation=checked[1],
            seconds=0.0,
            notes=_notes(request, base),
        )

    def _merge(self, base: ChosenBase) -> Merge:
        request, source = self.request, self.source
        empty = empty_model(base.files.folder, base.dtype, request.trust_remote_code)
        files = base_files(base.files, empty)
        attached = attach(source, empty, base.storage)
        storage = "plain" if request.onto == "original" else base.storage
        onto = TrainedBase(files, base.dtype, storage, attached.packed)
        merge = Merge(
            attached=attached,
            onto=onto,
            adapter=source.folder,
            dtype=request.torch_dtype,
            shard_bytes=request.shard_bytes,
            measured=request.check,
        )
        merge.check()
        return merge

    def _check(self, base: ChosenBase, made: Path) -> tuple[ComparedLogits, ComparedLogits | None]:
        """Compare the folder with base and adapter, as they are merged and as they were trained."""
        request = self.request
        gate = _gate(request, self.source, base)
        original = request.onto == "original" and base.storage != "plain"
        self.tell("computing base and adapter")
        expected, rows, blocks = gate.expected("plain" if original else base.storage)
        self.tell("computing the merged model")
        found, dtype = gate.merged(made, rows)
        accepted = _accepted(compared(expected, found, (base.dtype, dtype), blocks), rows)
        if not original:
            return accepted, None
        self.tell("computing base and adapter as they were trained")
        trained = gate.expected(base.storage)[0]
        return accepted, _told(compared(trained, found, (base.dtype, dtype), blocks), rows)

    def _progress(self, doing: str) -> Callable[[int, int], None]:
        told_s = time.monotonic()

        def progress(done: int, count: int) -> None:
            nonlocal told_s
            if time.monotonic() - told_s >= _TELL_EVERY_S:
                self.tell(f"{doing} {done + 1} of {count}")
                told_s = time.monotonic()

        return progress


def _gate(request: ExportRequest, source: AdapterSource, base: ChosenBase) -> Gate:
    return Gate(
        source=source,
        base=base.files.folder,
        dtype=base.dtype,
        trust_remote_code=request.trust_remote_code,
        device=request.compute_device,
        data=request.data,
        rows=request.rows,
    )


def _accepted(found: Agreement, rows: ComparedRows) -> ComparedLogits:
    """Return the numbers of an agreement; raise Disagrees where it is none."""
    refuse_logits(found, rows.source)
    return _told(found, rows)


def _told(found: Agreement, rows: ComparedRows) -> ComparedLogits:
    return ComparedLogits(
        source=rows.source,
        rows=rows.rows,
        tokens=found.positions,
        mean_kl=found.mean_kl,
        kl_limit=found.kl_limit,
        largest=found.largest,
        largest_limit=found.largest_limit,
        top1=found.top1,
    )


def _rounded(merge: Merge) -> ComparedLayers | None:
    """Return what writing the merged weights in their dtype has cost."""
    if not merge.rounded:
        return None
    worst = max(merge.rounded, key=lambda weight: weight.difference / weight.limit)
    return ComparedLayers(
        count=len(merge.rounded),
        worst=worst.name,
        difference=worst.difference,
        limit=worst.limit,
        kept=kept_share(merge.rounded),
    )


def _onto(request: ExportRequest, base: ChosenBase) -> str:
    if base.storage == "plain" or request.onto == "original":
        return "original"
    return f"dequantised ({base.storage})"


def _notes(request: ExportRequest, base: ChosenBase) -> tuple[str, ...]:
    if base.storage == "plain" and request.onto == "original":
        return ("the base was not packed in training, so --onto changes nothing",)
    if base.storage != "plain" and request.onto == "original":
        return (
            f"the adapter was trained beside weights packed as {base.storage}: beside the original "
            "ones it computes something else than was trained",
        )
    return ()


def _count_files(folder: Path) -> int:
    return sum(path.is_file() for path in folder.iterdir())


def adapter_bytes(source: AdapterSource, dtype: torch.dtype | None) -> int:
    """Count the bytes of the adapter's tensors in a dtype (None: as they are)."""
    return sum(tensor.nbytes for tensor in _tensors(source, dtype)[0].values())


def write_adapter(source: AdapterSource, base: str, dtype: torch.dtype | None, to: Path) -> None:
    """Write weights, configuration and tokenizer to the folder `to`; the tokenizer is taken from
    the base where the adapter has none. base: its name or folder, for the configuration."""
    tensors, metadata = _tensors(source, dtype)
    save_file(tensors, to / WEIGHTS, metadata=metadata)
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
