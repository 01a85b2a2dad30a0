"""Format what `fluxtrain export` and `fluxtrain evaluate` found for people."""

from __future__ import annotations

from fluxtrain.events.answers.answers import EvaluationAnswer, ExportAnswer, TasksAnswer
from fluxtrain.units import bytes_text, duration_text


def evaluation_page(found: EvaluationAnswer) -> str:
    """Report how well the model predicts, and on which data."""
    data = found.data if found.data.startswith("held out of ") else f"of {found.data}"
    base = f" on {found.base}" if found.base else ""
    perplexity = "beyond any number" if found.perplexity is None else f"{found.perplexity:.4g}"
    rate = found.tokens / found.seconds if found.seconds else 0.0
    return "\n".join(
        [
            f"loss {found.loss:.4f}, perplexity {perplexity}",
            f"of {found.model}{base} in {found.dtype}, {found.placed}",
            f"on {found.tokens:,} tokens {data}: {found.rows:,} sequences of "
            f"{found.sequence_length} tokens, in batches of {found.batch_rows}",
            f"{duration_text(found.seconds)}, {rate:,.0f} tokens/s",
            *found.notes,
        ]
    )


def tasks_page(found: TasksAnswer) -> str:
    """Report what a model gets in each task."""
    lines = []
    for one in found.results:
        spread = "" if one.error is None else f" ± {one.error:.4f}"
        better = "" if one.higher_is_better else ", lower is better"
        lines.append(f"{one.task}: {one.metric} {one.value:.4f}{spread}, {one.rows} rows{better}")
    base = f" on {found.base}" if found.base else ""
    return "\n".join(
        [
            *lines,
            f"of {found.model}{base} in {found.dtype}, {found.placed}",
            f"in batches of {found.batch_rows}, {duration_text(found.seconds)}",
        ]
    )


def export_page(found: ExportAnswer) -> str:
    """Report the written files, and their difference from the trained model."""
    size = f"{bytes_text(found.bytes)} in {found.files} files, {duration_text(found.seconds)}"
    if found.kind == "adapter":
        lines = [
            f"{found.folder}: the adapter ({found.dtype}) in peft's format; {size}",
            f"its base: {found.base}",
        ]
    elif found.kind == "model":
        lines = [f"{found.folder}: the model ({found.dtype}), trained from {found.base}; {size}"]
    elif found.kind == "gguf":
        lines = [f"{found.folder}: {found.base} as GGUF ({found.dtype}); {size}"]
    else:
        lines = [
            f"{found.folder}: {found.base} with the adapter in it ({found.dtype}); {size}",
            f"{found.changed} weights changed, onto the {found.onto} base",
        ]
    checked = [part.line for part in (found.layers, found.logits) if part is not None]
    lines += [f"checked: {line}" for line in checked]
    if found.kind not in ("adapter", "model") and not checked:  # these are copied bit for bit
        lines.append("not checked")
    if found.quantisation is not None:
        lines.append(f"compared with the base as it was trained: {found.quantisation.line}")
    return "\n".join([*lines, *found.notes])
