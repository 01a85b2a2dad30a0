"""Text of an answer while its tokens come: complete characters, up to a stop string."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

from transformers.convert_slow_tokenizer import bytes_to_unicode

from fluxtrain.errors import panics_refused
from fluxtrain.events.answers.generation import Ended, TokenLogprob

_INCOMPLETE = "�"  # what a tokenizer makes of a character whose bytes are not all there
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a token of one byte, as sentencepiece writes it


class Decoder(Protocol):
    """The part of a tokenizer that makes text."""

    def decode(self, token_ids: Any, **options: Any) -> Any: ...


def text_of(tokenizer: Decoder, tokens: list[int], *, special: bool = False) -> str:
    """Return the text of an answer's tokens, without tidying spaces; `special`: with the special
    ones. Raises BadInput where its tokenizer panics."""
    with panics_refused("the decoder of the model's tokenizer", "repair it in the model's folder"):
        return str(
            tokenizer.decode(
                tokens, skip_special_tokens=not special, clean_up_tokenization_spaces=False
            )
        )


def token_text(tokenizer: Any, before: int, token: int) -> tuple[str, tuple[int, ...] | None]:
    """Return the text of one token behind another, and its bytes; None where they are not known.

    The token before it shows the space that tokenizers leave out at a text's beginning.
    """
    behind = text_of(tokenizer, [before, token], special=True)
    text = behind[len(text_of(tokenizer, [before], special=True)) :]
    if text and _INCOMPLETE not in text:
        return text, tuple(text.encode())
    piece = str(tokenizer.convert_ids_to_tokens(token))
    text = text or text_of(tokenizer, [token], special=True)
    if (byte := _BYTE.fullmatch(piece)) is not None:
        return text, (int(byte[1], 16),)
    known = _byte_of_letter()
    found = tuple(known[letter] for letter in piece if letter in known)
    return text, found if len(found) == len(piece) else None


@cache
def _byte_of_letter() -> dict[str, int]:
    """Return the byte for each letter of a byte-level vocabulary."""
    made: Any = bytes_to_unicode  # it is not typed
    return {letter: byte for byte, letter in made().items()}


class TextStream:
    """Collects an answer's tokens and hands out its text; the pieces joined are the whole text."""

    def __init__(self, tokenizer: Decoder, heard: Callable[[str], None], *, live: bool) -> None:
        """Begin; live: hand out text as it comes, and not at the end alone."""
        self._tokenizer, self._heard, self._live = tokenizer, heard, live
        self._tokens: list[int] = []
        self._told = ""

    @property
    def length(self) -> int:
        """Return the characters that were handed out."""
        return len(self._told)

    def add(self, token: int) -> None:
        """Take the next token; hand out the characters that are complete."""
        self._tokens.append(token)
        if self._live:
            text = text_of(self._tokenizer, self._tokens)
            if not text.endswith(_INCOMPLETE):
                self._tell(text)

    def end(self) -> None:
        """Hand out the remaining text."""
        self._tell(text_of(self._tokenizer, self._tokens))

    def _tell(self, text: str) -> None:
        """Hand out new text; with a tokenizer that rewrites earlier text this waits for the end."""
        if text.startswith(self._told) and len(text) > len(self._told):
            heard, self._told = text[len(self._told) :], text
            self._heard(heard)


class UntilStop:
    """Hands text on up to the first stop string; the beginning of a possible one waits for the
    next piece."""

    def __init__(self, strings: Sequence[str], heard: Callable[[str], None]) -> None:
        self._strings, self._heard = strings, heard
        self.text, self.found = "", False
        self.told = 0  # characters that were handed on

    def add(self, piece: str) -> None:
        """Take the next piece of the text."""
        if self.found:
            return
        self.text += piece
        places = [at for at in map(self.text.find, self._strings) if at >= 0]
        if places:
            self.text, self.found = self.text[: min(places)], True
        self._tell(len(self.text) - (0 if self.found else self._begun()))

    def end(self) -> None:
        """Hand on the waiting text."""
        self._tell(len(self.text))

    def _begun(self) -> int:
        """Return the characters at the end that may begin one of the strings."""
        longest = max(map(len, self._strings), default=1) - 1
        sizes = range(min(longest, len(self.text)), 0, -1)
        return next(
            (n for n in sizes if any(one.startswith(self.text[-n:]) for one in self._strings)), 0
        )

    def _tell(self, end: int) -> None:
        if end > self.told:
            begun, self.told = self.told, end
            self._heard(self.text[begun:end])


@dataclass(frozen=True, kw_only=True)
class Written:
    """An answer."""

    text: str
    ended: Ended
    tokens: tuple[int, ...]  # without the one that ended it
    prompt_tokens: int
    seconds: float  # of the batch
    logprobs: tuple[TokenLogprob, ...] = ()  # of `tokens`, where they were asked for
