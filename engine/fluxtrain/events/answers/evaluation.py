"""The answer of `fluxtrain evaluate --json`: how well a model predicts data."""

from __future__ import annotations

from typing import ClassVar

from fluxtrain.events.answers.answer import Answer


class EvaluationAnswer(Answer, frozen=True, kw_only=True):
    """The mean loss over all tokens of the data that are learnt."""

    COMMAND: ClassVar[str] = "evaluate"

    model: str
    base: str | None  # of an adapter
    data: str
    loss: float  # nats a token
    perplexity: float | None  # None: larger than a float holds
    tokens: int  # that the loss is a mean over
    rows: int
    sequence_length: int
    batch_rows: int
    dtype: str
    device: str
    placed: str  # where the weights are
    seconds: float  # of the evaluation, without loading
    notes: tuple[str, ...]  # sentences about the data
