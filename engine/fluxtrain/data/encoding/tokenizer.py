"""What encoding needs to know of a tokenizer. Offsets are not used: some tokenizers trim them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from fluxtrain.data.rendering.chat_template import ChatTemplate, TemplateTokenizer
from fluxtrain.errors import BadInput, FluxTrainError, panics_refused

AT_ONCE_CHARACTERS = 1 << 20  # a fast tokenizer takes some 250 bytes for each
LARGEST_CHARACTERS = 2 << 20  # of one text or conversation: about half a million tokens

_WHAT = "the tokenizer of the model"
_CURE = "copy the tokenizer's files of the original model into the folder, or use another model"


class Tokenizer(TemplateTokenizer, Protocol):
    """The part of `transformers.PreTrainedTokenizerBase` that is used."""

    bos_token_id: int | None
    eos_token_id: int | None

    @property
    def all_special_ids(self) -> list[int]: ...
    @property
    def added_tokens_decoder(self) -> dict[int, Any]: ...
    def __call__(self, text: Any, **options: Any) -> Any: ...
    def __len__(self) -> int: ...
    def decode(self, token_ids: Any, **options: Any) -> Any: ...


class TokenKinds:
    """Which tokens end a turn, and which are white space."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None = None) -> None:
        self._tokenizer = tokenizer
        self._blank: dict[int, bool] = {}
        added = tokenizer.added_tokens_decoder
        ends = {number for number, token in added.items() if getattr(token, "special", False)}
        ends |= set(tokenizer.all_special_ids)
        self.usual_end: int | None = None  # what the template puts behind an answer of words
        if template is not None:
            behind = self.encode([template.plain_ending])[0]
            ends |= set([token for token in behind if token in added][:1])
            self.usual_end = next((token for token in behind if token in ends), None)
        self._ends = frozenset(ends)
        names = sorted({str(added[number]) for number in ends if number in added}, reverse=True)
        named = "|".join(re.escape(name) for name in names if name.strip())
        self._special = re.compile(named) if named else None

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts as they are, without the special tokens of a whole sequence, in calls of
        bounded size."""
        found: list[list[int]] = []
        for group in _groups(texts):
            found += encoded(self._tokenizer, group, add_special_tokens=False)
        return found

    def encode_whole(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts with the special tokens that the tokenizer puts around a sequence."""
        return encoded(self._tokenizer, texts)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return str(
            self._tokenizer.decode(
                list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def ends_a_turn(self, token: int) -> bool:
        """Return whether generation can stop at `token`: it is never part of words."""
        return token in self._ends

    def special_in(self, words: str) -> set[str]:
        """Return the special tokens that stand in words, which would be encoded as such."""
        return set(self._special.findall(words)) if self._special is not None else set()

    def is_blank(self, token: int) -> bool:
        """Return whether `token` is white space alone."""
        if token not in self._blank:
            self._blank[token] = not self.decode([token]).strip()
        return self._blank[token]


def encoded(tokenizer: Any, texts: Sequence[str], **options: Any) -> list[list[int]]:
    """Return the tokens of texts. Raises BadInput for a tokenizer that fails."""
    with panics_refused(_WHAT, _CURE):
        try:
            found = tokenizer(list(texts), verbose=False, **options)["input_ids"]
        except (FluxTrainError, MemoryError, OSError):
            raise
        except Exception as error:  # its parts fail in any way on text that they do not know
            words = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            raise BadInput(f"{_WHAT} failed on a text ({words}): {_CURE}") from error
    return [list(ids) for ids in found]


def too_large(characters: int) -> str:
    """Say that a text or a conversation has too many characters to be encoded; "" if it has not."""
    if characters <= LARGEST_CHARACTERS:
        return ""
    return f"it has {characters:,} characters, and at most {LARGEST_CHARACTERS:,} can be encoded"


def _groups(texts: Sequence[str]) -> Iterator[list[str]]:
    group: list[str] = []
    characters = 0
    for text in texts:
        if group and characters + len(text) > AT_ONCE_CHARACTERS:
            yield group
            group, characters = [], 0
        group.append(text)
        characters += len(text)
    if group:
        yield group
