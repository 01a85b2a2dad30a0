"""Rows of tokens to compare two models on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fluxtrain.config.data_settings import DataSettings
from fluxtrain.config.schema import RunConfig
from fluxtrain.data.batches import in_order
from fluxtrain.data.encoding.encode import Encoder, check_vocabulary
from fluxtrain.data.packing import PackedRows
from fluxtrain.data.prepare import corpora
from fluxtrain.data.reading.corpus import Reading
from fluxtrain.data.reading.request import read_request
from fluxtrain.data.rendering.named import use_template
from fluxtrain.data.row import Row
from fluxtrain.data.splitting import whole
from fluxtrain.data.store.tokens import in_memory
from fluxtrain.errors import BadInput
from fluxtrain.models.loading import LoadedModel

MOST_TOKENS = 128  # of a row
LOGITS_BYTES = 1 << 30  # that are kept of one model, in fp32
_DOCUMENTS = 16  # for each row
_CHARACTERS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ComparedRows:
    """Rows of tokens, and where they are from."""

    inputs: dict[str, Any]  # of the model's forward
    kept: Tensor  # (R, T) bool: no padding
    source: str

    @property
    def rows(self) -> int:
        """Count the rows."""
        return int(self.kept.shape[0])


def compared_rows(
    loaded: LoadedModel,
    data: str | None,
    run: RunConfig | None,
    rows: int,
    longest: int = MOST_TOKENS,
) -> ComparedRows:
    """Take the first documents of `data`, of what the run was evaluated or trained on, or of the
    demo's text, as `rows` rows of `longest` tokens at most.

    Raises BadInput where they cannot be read.
    """
    settings = DataSettings(path=data) if data else (run or RunConfig()).data
    trained, evaluated = corpora(read_request(settings.model_dump()))
    corpus = evaluated or trained
    given = settings.sequence_length
    wanted = longest if given == "auto" else min(longest, given)
    wanted = min(wanted, loaded.max_positions or wanted)
    most = max(2, LOGITS_BYTES // (4 * loaded.embedding_rows))
    use_template(loaded.tokenizer, settings.chat_template)
    encoder = Encoder(loaded.tokenizer, corpus.max_bad_rows)
    first = _first(Reading(corpus), rows * _DOCUMENTS)
    tokens = in_memory(sample for batch in encoder.batches(first) for sample in batch)
    check_vocabulary(tokens.largest, loaded.embedding_rows)
    count = int(tokens.starts[-1])
    length = min(wanted, most, count)
    if length < 2:
        raise BadInput(
            f"{corpus.name} holds {count} tokens, and 2 are compared at least: name another "
            "file with --data"
        )
    packed = PackedRows(tokens, whole(tokens), length, loaded.pad_id, loaded.packs)
    if not len(packed):
        raise BadInput(
            f"the first documents of {corpus.name} have nothing to learn in {length} tokens: name "
            "another file with --data"
        )
    batch = next(iter(in_order(packed, max(1, min(rows, most // length, len(packed))))))
    inputs = batch.inputs()
    for name in ("labels", "num_items_in_batch"):
        inputs.pop(name)
    documents = packed.take(np.arange(len(batch.input_ids)), trim=True).document_ids
    kept = torch.from_numpy(documents >= 0)
    return ComparedRows(inputs=inputs, kept=kept, source=corpus.name)


def _first(rows: Iterable[Row], most: int) -> Iterator[Row]:
    characters = 0
    for row in islice(rows, most):
        yield row
        characters += row.characters
        if characters >= _CHARACTERS:
            return
