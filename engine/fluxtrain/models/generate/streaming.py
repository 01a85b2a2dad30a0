"""Turns tokens into text while they come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from fluxtrain.errors import panics_refused

_INCOMPLETE = "�"  # what a tokenizer makes of a character whose bytes are not all there


class Decoder(Protocol):
    """The part of a tokenizer that makes text."""

    def decode(self, token_ids: Any, **options: Any) -> Any: ...


def text_of(tokenizer: Decoder, tokens: list[int]) -> str:
    """Return the text of an answer's tokens, without special ones and without tidying spaces.
    Raises BadInput where its tokenizer panics."""
    with panics_refused("the decoder of the model's tokenizer", "repair it in the model's folder"):
        return str(
            tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )


class TextStream:
    """Collects an answer's tokens and hands out its text; the pieces joined are the whole text."""

    def __init__(self, tokenizer: Decoder, heard: Callable[[str], None]) -> None:
        self._tokenizer, self._heard = tokenizer, heard
        self._tokens: list[int] = []
        self._told = ""

    def add(self, token: int) -> None:
        """Take the next token; hand out the characters that are complete."""
        self._tokens.append(token)
        text = text_of(self._tokenizer, self._tokens)
        if not text.endswith(_INCOMPLETE):
            self._tell(text)

    def end(self) -> str:
        """Hand out what is left; return the whole text."""
        text = text_of(self._tokenizer, self._tokens)
        self._tell(text)
        return text

    def _tell(self, text: str) -> None:
        """Hand out what is new; a tokenizer that rewrites earlier text waits for the end."""
        if text.startswith(self._told) and len(text) > len(self._told):
            self._heard(text[len(self._told) :])
            self._told = text
