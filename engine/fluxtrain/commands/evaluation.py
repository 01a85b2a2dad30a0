"""`fluxtrain evaluate`: the loss and the perplexity of a model on data."""

from __future__ import annotations

from fluxtrain.events.answers.answers import EvaluationAnswer
from fluxtrain.units import duration_text


def page(found: EvaluationAnswer) -> str:
    """Say how well the model predicts, and what was computed."""
    base = f" on {found.base}" if found.base else ""
    perplexity = "beyond any number" if found.perplexity is None else f"{found.perplexity:.4g}"
    rate = found.tokens / found.seconds if found.seconds else 0.0
    return "\n".join(
        [
            f"loss {found.loss:.4f}, perplexity {perplexity}",
            f"of {found.model}{base} in {found.dtype}, {found.placed}",
            f"on {found.tokens:,} tokens {_whose(found)}: {found.rows:,} sequences of "
            f"{found.sequence_length} tokens, in batches of {found.batch_rows}",
            f"{duration_text(found.seconds)}, {rate:,.0f} tokens/s",
            *found.notes,
        ]
    )


def _whose(found: EvaluationAnswer) -> str:
    return found.data if found.data.startswith("held out of ") else f"of {found.data}"
