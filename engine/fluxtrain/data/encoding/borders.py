"""Encodes texts so that it is known which tokens lie before given places in them.

The tokens are those of the whole text. Where a tokenizer merges characters of both sides of a place
into one token, the text is encoded on both sides by itself, as inference does it: a prompt is
encoded alone, and the model goes on from its last token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

from fluxtrain.data.encoding.tokenizer import TokenKinds

# A part is encoded behind one of these: some tokenizers treat the beginning of a text otherwise.
_ANCHORS = ("", "\n", "x", ".")


@dataclass(frozen=True, slots=True)
class Cut:
    """The tokens of a text, and how many of them lie before each of the places."""

    ids: list[int]
    places: list[int]


def encode_with_places(texts: Sequence[tuple[str, Sequence[int]]], kinds: TokenKinds) -> list[Cut]:
    """Encode texts, each with ascending places in characters from 0 to its length."""
    parts = [[text[a:b] for a, b in pairwise((0, *places, len(text)))] for text, places in texts]
    found = iter(kinds.encode([piece for (text, _), own in zip(texts, parts, strict=True)
                               for piece in (text, *own)]))  # fmt: skip
    made: list[Cut] = []
    for (text, places), own in zip(texts, parts, strict=True):
        whole = next(found)
        alone = [next(found) for _ in own]
        if list(chain.from_iterable(alone)) == whole:
            made.append(_cut(alone))
        else:
            made.append(_encode_one(text, places, own, whole, kinds))
    return made


def _cut(parts: list[list[int]]) -> Cut:
    ends = list(accumulate(len(part) for part in parts))
    return Cut(list(chain.from_iterable(parts)), ends[:-1])


def _encode_one(
    text: str, places: Sequence[int], parts: list[str], whole: list[int], kinds: TokenKinds
) -> Cut:
    prefixes = [_common(ids, whole) for ids in kinds.encode([text[:place] for place in places])]
    if all(is_all for _, is_all in prefixes):
        return Cut(whole, [same for same, _ in prefixes])
    wanted = kinds.decode(whole)
    for anchor in _ANCHORS:
        behind = _behind(anchor, parts, kinds)
        if behind is not None and kinds.decode(list(chain.from_iterable(behind))) == wanted:
            return _cut(behind)
    # Nothing gives the same text: a token that lies on both sides counts to the later one.
    return Cut(whole, [same for same, _ in prefixes])


def _behind(anchor: str, parts: list[str], kinds: TokenKinds) -> list[list[int]] | None:
    """Encode the parts, all but the first behind `anchor`; None where it merges with one."""
    first, *later = kinds.encode([parts[0], *(anchor + part for part in parts[1:])])
    before = kinds.encode([anchor])[0] if anchor else []
    if any(ids[: len(before)] != before for ids in later):
        return None
    return [first, *(ids[len(before) :] for ids in later)]


def _common(ids: list[int], whole: list[int]) -> tuple[int, bool]:
    """Count the tokens that a text up to a place has in common with the `whole` text; say whether
    that is all of them."""
    pairs = zip(ids, whole, strict=False)
    same = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(whole)))
    return same, same == len(ids)
