"""Choose the length of rows from the first samples of the data, before anything is placed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from fluxtrain.config.data_settings import DataSettings
from fluxtrain.config.schema import RunConfig
from fluxtrain.data.encoding.encode import Encoder
from fluxtrain.data.encoding.notes import Notes
from fluxtrain.data.packing import Fit, RowLength, choose_row_length, pack_rows
from fluxtrain.data.prepare import corpora
from fluxtrain.data.reading.request import DEMO, read_request
from fluxtrain.data.reading.sampling import first_rows
from fluxtrain.data.rendering.named import use_template
from fluxtrain.data.splitting import few_held_out, split, whole
from fluxtrain.data.store.tokens import Tokens, in_memory
from fluxtrain.events.events import ChoiceMade
from fluxtrain.models.demo_model import SEQUENCE_LENGTH
from fluxtrain.models.loading import ModelSource, load_tokenizer
from fluxtrain.models.model_files import is_pipeline


@dataclass(frozen=True, kw_only=True)
class FirstSamples:
    """The first samples of the data as tokens, a `share` of all."""

    tokens: Tokens
    share: float
    notes: Notes
    positions: int | None  # of the model
    is_all: bool = False  # these are the samples of an epoch, each as often and in the same order

    def row_length(self) -> RowLength:
        """Choose the length of rows."""
        lengths = np.diff(self.tokens.starts)
        return choose_row_length(
            lengths, talks=self.tokens.has_marks, positions=self.positions, share=self.share
        )

    def fit(self, row_tokens: int) -> Fit:
        """Count the samples that do not fit into rows of a length."""
        return pack_rows(self.tokens, whole(self.tokens), row_tokens, pack=False).fit

    def rows(self, data: DataSettings, *, packs: bool) -> int:
        """Count the rows of an epoch by the split and the packing of the run; where these are not
        all samples, estimate them."""
        held_out = 0.0 if data.held_out_path is not None else data.held_out
        split_off = held_out if self.is_all else 0.0
        spans = split(self.tokens, split_off, data.row_tokens, data.seed).trained
        rows = pack_rows(self.tokens, spans, data.row_tokens, packs).rows
        return rows if self.is_all else max(1, round(rows * (1 - held_out) / self.share))

    def few_held_out(self, data: DataSettings) -> list[str]:
        """Say where these are all samples, and only a handful of them is held out."""
        if not self.is_all or data.held_out_path is not None:
            return []
        held = split(self.tokens, data.held_out, data.row_tokens, data.seed).held_out
        return few_held_out(len(held.lengths), held.tokens, self.tokens.documents)

    def told(self, row_tokens: int) -> list[str]:
        """Return notes for a person, a sentence each."""
        told = [*self.notes.sentences(), *self.fit(row_tokens).sentences()]
        if self.share >= 1:
            return told
        return [f"of {self.notes.rows:,} rows that were looked at: {line}" for line in told]


def first_samples(config: RunConfig) -> FirstSamples:
    """Read and encode the first rows; no weights are read.

    Raises BadInput as the run would for the tokenizer and these rows.
    """
    return samples_of(config, *tokenizer_of(config))


def tokenizer_of(config: RunConfig) -> tuple[PreTrainedTokenizerBase, PretrainedConfig]:
    """Return the tokenizer with the chat template that is asked for, and the model's shape.

    Raises BadInput as the run would for them.
    """
    tokenizer, shape = load_tokenizer(ModelSource.of(config.model))
    use_template(tokenizer, config.data.chat_template)
    return tokenizer, shape


def samples_of(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, shape: PretrainedConfig
) -> FirstSamples:
    """Encode the first rows with a tokenizer that is loaded, for a model of `shape`."""
    corpus, _ = corpora(read_request(config.data.model_dump()))
    rows, share = first_rows(corpus)
    encoder = Encoder(tokenizer, corpus.max_bad_rows)
    tokens = in_memory(encoder.samples(rows))
    positions = getattr(shape.get_text_config(), "max_position_embeddings", None)
    return FirstSamples(
        tokens=tokens,
        share=share,
        is_all=share == 1.0 and all(part.weight == 1.0 for part in corpus.parts),
        notes=encoder.notes,
        positions=positions,
    )


def with_row_length(
    config: RunConfig, first: FirstSamples | None = None
) -> tuple[RunConfig, tuple[ChoiceMade, ...]]:
    """Return the configuration with a length of rows, and the choice where it was automatic.

    Raises BadInput as `first_samples`.
    """
    if is_pipeline(config.model.path):
        from fluxtrain.methods.image.method import with_pair_length

        return with_pair_length(config)
    if config.data.sequence_length != "auto":
        return config, ()
    if config.data.path == DEMO:
        chosen = RowLength(SEQUENCE_LENGTH, "docstrings are short")
    else:
        chosen = (first or first_samples(config)).row_length()
    data = config.data.model_copy(update={"sequence_length": chosen.tokens})
    made = ChoiceMade(name="data.sequence_length", value=str(chosen.tokens), because=chosen.because)
    return config.model_copy(update={"data": data}), (made,)
