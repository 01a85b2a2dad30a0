"""Encodes documents to token ids in compact arrays; conversations train the assistant alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from jinja2 import TemplateError

from fluxtrain.data.row import Message, Row
from fluxtrain.errors import BadInput

BATCH_CHARACTERS = 1 << 20  # texts handed to the tokenizer at once: its threads share them

_GENERATION_TAG = re.compile(r"\{%-?\+?\s*generation\s*-?\+?%\}")

# A template raises TemplateError itself, or fails on content that it does not expect.
_TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError)

Ids = npt.NDArray[np.uint32]


class Tokenizer(Protocol):
    """The part of `transformers.PreTrainedTokenizerBase` that is used."""

    eos_token_id: int | None
    is_fast: bool

    def __call__(self, text: Any, **options: Any) -> Any: ...
    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...
    def get_chat_template(self) -> str: ...


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """All documents' tokens in one array; 4 bytes a token, 5 with a loss mask."""

    ids: Ids  # (N,)
    starts: npt.NDArray[np.int64]  # (D + 1,): document d is ids[starts[d] : starts[d + 1]]
    trained: npt.NDArray[np.bool_] | None = None  # (N,): token is predicted; None: all are

    @property
    def documents(self) -> int:
        """Return the number of documents."""
        return len(self.starts) - 1

    @property
    def count(self) -> int:
        """Return the number of tokens."""
        return len(self.ids)


def tokenize(documents: Iterable[Row], tokenizer: Tokenizer) -> Tokens:
    """Encode `documents` of one format (all texts or all conversations).

    A text gets the tokenizer's own special tokens and ends with its end-of-sequence token; a
    conversation is rendered with the chat template. Raises BadInput when a template is missing,
    does not show which tokens are the assistant's, or when no token comes out.
    """
    reader = iter(documents)
    first = next(reader, None)
    if first is None:
        raise BadInput("the data has no documents")
    whole = chain((first,), reader)
    encoded = _conversations(whole, tokenizer) if first.messages else _texts(whole, tokenizer)
    ids: list[Ids] = []
    trained: list[npt.NDArray[np.bool_]] = []
    for tokens, mask in encoded:
        if len(tokens):
            ids.append(tokens)
            if mask is not None:
                trained.append(mask)
    if not ids:
        raise BadInput("the tokenizer made no tokens of the data: every document is empty to it")
    starts = np.zeros(len(ids) + 1, dtype=np.int64)
    np.cumsum([len(tokens) for tokens in ids], out=starts[1:])
    return Tokens(np.concatenate(ids), starts, np.concatenate(trained) if trained else None)


def check_vocabulary(tokens: Tokens, embedding_rows: int) -> None:
    """Raise BadInput when a token has no row in the model's embedding."""
    largest = int(tokens.ids.max())
    if largest >= embedding_rows:
        raise BadInput(
            f"the tokenizer makes token {largest} and the model's embedding has {embedding_rows} "
            "rows: this tokenizer belongs to another model, or the embedding was not resized"
        )


_Encoded = tuple[Ids, npt.NDArray[np.bool_] | None]


def _texts(documents: Iterable[Row], tokenizer: Tokenizer) -> Iterator[_Encoded]:
    for batch in _batches(documents):
        encoded = tokenizer([document.text for document in batch], verbose=False)["input_ids"]
        for document, tokens in zip(batch, encoded, strict=True):
            ids = list(tokens)
            end = tokenizer.eos_token_id
            if document.ends and end is not None and (not ids or ids[-1] != end):
                ids.append(end)
            yield np.asarray(ids, dtype=np.uint32), None


def _batches(documents: Iterable[Row]) -> Iterator[list[Row]]:
    batch: list[Row] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _conversations(documents: Iterable[Row], tokenizer: Tokenizer) -> Iterator[_Encoded]:
    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:
        raise BadInput(
            "the data has `messages` and the model's tokenizer has no chat template: "
            "use an instruction-tuned model, add chat_template.jinja to its folder, "
            "or give the data as `text`"
        ) from error
    marks_assistant = _GENERATION_TAG.search(template) is not None
    if not marks_assistant and not tokenizer.is_fast:
        raise BadInput(
            "this tokenizer cannot tell where its tokens lie in the text, so the assistant's "
            "tokens cannot be found: convert it to tokenizer.json"
        )
    encode = _by_generation_tag if marks_assistant else _by_prefixes
    for document in documents:
        ids, mask = encode(document, tokenizer)
        if not any(mask):
            raise BadInput(
                f"{document.origin}: the chat template renders no assistant tokens of this "
                "conversation, so there is nothing to learn from it"
            )
        yield np.asarray(ids, dtype=np.uint32), np.asarray(mask, dtype=np.bool_)


def _by_generation_tag(document: Row, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    try:
        rendered = tokenizer.apply_chat_template(
            list(document.messages),
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
    except _TEMPLATE_ERRORS as error:
        raise _template_refused(document, error) from error
    return list(rendered["input_ids"]), [bool(mark) for mark in rendered["assistant_masks"]]


def _by_prefixes(document: Row, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """Find assistant spans by rendering the conversation up to and with each of its messages."""
    whole = _rendered(document, document.messages, tokenizer)
    spans: list[tuple[int, int]] = []
    for index, message in enumerate(document.messages):
        if message["role"] != "assistant":
            continue
        before = _rendered(document, document.messages[:index], tokenizer, opened=True)
        with_it = _rendered(document, document.messages[: index + 1], tokenizer)
        if not (with_it.startswith(before) and whole.startswith(with_it)):
            raise BadInput(
                f"{document.origin}: the chat template renders message {index + 1} otherwise "
                "when more follows, so the assistant's tokens cannot be told apart: add "
                "{% generation %} to the template, or give one assistant turn a conversation"
            )
        spans.append((len(before), len(with_it)))
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    mask = [
        any(start >= first and end <= last for first, last in spans) and end > start
        for start, end in encoded["offset_mapping"]
    ]
    return list(encoded["input_ids"]), mask


def _rendered(
    document: Row,
    messages: tuple[Message, ...],
    tokenizer: Tokenizer,
    opened: bool = False,
) -> str:
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=opened
        )
    except _TEMPLATE_ERRORS as error:
        raise _template_refused(document, error) from error
    return str(text)


def _template_refused(document: Row, error: BaseException) -> BadInput:
    return BadInput(f"{document.origin}: the model's chat template refuses this: {error}")
