"""`fluxtrain evaluate`: the loss and the perplexity of a model on data."""

from __future__ import annotations

from fluxtrain.client.evaluation import EvaluationAnswer
from fluxtrain.units import duration_text


def page(found: EvaluationAnswer) -> str:
    """Say how well the model predicts, and what was computed."""
    beside = f" beside {found.base}" if found.base else ""
    perplexity = "beyond any number" if found.perplexity is None else f"{found.perplexity:.4g}"
    rate = found.tokens / found.seconds if found.seconds else 0.0
    return "\n".join(
        [
            f"loss {found.loss:.4f}, perplexity {perplexity}",
            f"of {found.model}{beside} in {found.dtype}, {found.placed}",
            f"on {found.tokens:,} tokens of {found.data}, in {found.rows:,} rows of "
            f"{found.sequence_length} tokens, {found.batch_rows} at a time",
            f"{duration_text(found.seconds)}, {rate:,.0f} tokens/s",
            *found.notes,
        ]
    )
