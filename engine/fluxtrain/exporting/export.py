"""Exports an adapter: alone, or merged into its base; checked before it takes its place."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import msgspec
from torch import Tensor

from fluxtrain.client.export import ComparedLayers, ComparedLogits, ExportAnswer
from fluxtrain.errors import BadInput
from fluxtrain.exporting.adapter_folder import adapter_bytes, write_adapter
from fluxtrain.exporting.attached import attach
from fluxtrain.exporting.base_files import base_files
from fluxtrain.exporting.check.agreement import Agreement
from fluxtrain.exporting.check.gate import Gate, compared, refuse_layers, refuse_logits
from fluxtrain.exporting.check.probing import Probed, probe
from fluxtrain.exporting.check.rows import ComparedRows
from fluxtrain.exporting.merging import Merge
from fluxtrain.exporting.request import (
    ChosenBase,
    ExportRequest,
    base_name_of,
    chosen_base,
)
from fluxtrain.exporting.source import WEIGHTS, AdapterSource, find_adapter
from fluxtrain.exporting.trained_base import TrainedBase
from fluxtrain.exporting.without_effect import note_without_effect
from fluxtrain.models.export import save_folder
from fluxtrain.models.loading import empty_model

Tell = Callable[[str], None]
_BESIDE_BYTES = 64 << 20  # tokenizer and configuration, at most
_TELL_EVERY_S = 3.0


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
    note_without_effect(source)
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
                tokenizer = Path(name) if Path(name).is_dir() else None
                write_adapter(source, name, dtype, tokenizer, made)
                if base is not None:
                    checked.append(self._checked(base, made))

            name = base_name_of(request, source)
            size = save_folder(write, adapter_bytes(source, dtype) + _BESIDE_BYTES, to)
        return ExportAnswer(
            kind="adapter",
            folder=str(to),
            bytes=size,
            files=_count_files(to),
            base=name,
            dtype=_stored_dtype(to / WEIGHTS),
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
            checks: list[_Checked] = []

            def write(made: Path) -> None:
                merge.write(made, self._progress("merging weight"))
                if request.check:
                    checks.append(self._check(base, merge, made))

            size = save_folder(write, merge.size_bytes + _BESIDE_BYTES, to)
        checked = checks[0] if checks else _Checked()
        return ExportAnswer(
            kind="merged",
            folder=str(to),
            bytes=size,
            files=_count_files(to),
            base=base.name,
            dtype=merge.stated_dtype,
            onto=_onto(request, base),
            changed=len(merge.attached.changed),
            layers=checked.layers,
            logits=checked.logits,
            quantisation=checked.quantisation,
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
        )
        merge.check()
        return merge

    def _check(self, base: ChosenBase, merge: Merge, made: Path) -> _Checked:
        request = self.request
        probed = self._probed(merge, made)
        refuse_layers(probed)
        gate = _gate(request, self.source, base)
        original = request.onto == "original" and base.storage != "plain"
        self.tell("computing base and adapter")
        expected, rows, blocks = gate.expected("plain" if original else base.storage)
        self.tell("computing the merged model")
        found, dtype = gate.merged(made, rows)
        accepted = _accepted(compared(expected, found, (base.dtype, dtype), blocks), rows)
        quantisation = None
        if original:
            self.tell("computing base and adapter as they were trained")
            trained = gate.expected(base.storage)[0]
            apart = compared(trained, found, (base.dtype, dtype), blocks)
            quantisation = _told(apart, rows)
        return _Checked(_told_layers(probed), accepted, quantisation)

    def _probed(self, merge: Merge, made: Path) -> Probed:
        from fluxtrain.models.model_files import check_model_folder

        files = check_model_folder(made, self.request.trust_remote_code)
        empty = empty_model(made, merge.onto.dtype, self.request.trust_remote_code)
        written = base_files(files, empty)
        return probe(merge.attached, merge.onto, written, self._progress("comparing layer"))

    def _progress(self, doing: str) -> Callable[[int, int], None]:
        told_s = time.monotonic()

        def progress(done: int, count: int) -> None:
            nonlocal told_s
            if time.monotonic() - told_s >= _TELL_EVERY_S:
                self.tell(f"{doing} {done + 1} of {count}")
                told_s = time.monotonic()

        return progress


@dataclass(frozen=True)
class _Checked:
    layers: ComparedLayers | None = None
    logits: ComparedLogits | None = None
    quantisation: ComparedLogits | None = None


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


def _told_layers(probed: Probed) -> ComparedLayers | None:
    worst = probed.worst
    if worst is None:
        return None
    return ComparedLayers(
        count=len(probed.layers),
        worst=worst.name,
        difference=worst.difference,
        limit=worst.limit,
        kept=probed.kept,
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


def _stored_dtype(path: Path) -> str:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        names = list(file.keys())
        found: Tensor = file.get_tensor(names[0])
    return str(found.dtype).removeprefix("torch.")
