"""`fluxtrain export`: a trained adapter as a folder of its own, or merged into its base."""

from __future__ import annotations

from collections.abc import Callable

from fluxtrain.events.answers.answers import ExportAnswer
from fluxtrain.files.terminations import terminations_told
from fluxtrain.results.export.adapter_export import ExportRequest
from fluxtrain.results.export.adapter_export import export as export_folder
from fluxtrain.units import bytes_text, duration_text


def export(request: ExportRequest, tell: Callable[[str], None]) -> ExportAnswer:
    """Write what is asked for; raise the documented errors."""
    with terminations_told("the export was whole"):
        return export_folder(request, tell)


def page(found: ExportAnswer) -> str:
    """Say what was written, and how far it is from what was trained."""
    size = f"{bytes_text(found.bytes)} in {found.files} files, {duration_text(found.seconds)}"
    if found.kind == "adapter":
        lines = [
            f"{found.folder}: the adapter ({found.dtype}) in peft's format; {size}",
            f"its base: {found.base}",
        ]
    else:
        lines = [
            f"{found.folder}: {found.base} with the adapter in it ({found.dtype}); {size}",
            f"{found.changed} weights changed, onto the {found.onto} base",
        ]
    checked = [part.line for part in (found.layers, found.logits) if part is not None]
    lines += [f"checked: {line}" for line in checked]
    if found.kind == "merged" and not checked:
        lines.append("not checked")
    if found.quantisation is not None:
        lines.append(f"compared with the base as it was trained: {found.quantisation.line}")
    return "\n".join([*lines, *found.notes])
