"""Encodes conversations: the assistant's words and the end of each answer are trained on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

from fluxtrain.data.encoding.notes import Notes, SampleRefused
from fluxtrain.data.encoding.samples import Sample, sample_of
from fluxtrain.data.encoding.texts import TextEncoder
from fluxtrain.data.encoding.tokenizer import Tokenizer, TokenKinds, too_large
from fluxtrain.data.rendering.answers import Rendering, renderings
from fluxtrain.data.rendering.chat_template import ChatTemplate, TemplateRefused
from fluxtrain.data.rendering.left_out import left_out, lost_answer
from fluxtrain.data.row import Row

MOST_RENDERED_CHARACTERS = 2 << 30  # answers times characters
OPENING = "an opening answer from what is trained on"


@dataclass(frozen=True, slots=True)
class _Stretch:
    """An answer in tokens: from `first` to before `last`; `end` is its last token, None: no end."""

    first: int
    last: int
    end: int | None


class ConversationEncoder:
    """Renders conversations with a chat template and encodes them."""

    def __init__(self, tokenizer: Tokenizer, kinds: TokenKinds, template: ChatTemplate) -> None:
        self._template = template
        self._kinds = kinds
        self._end = tokenizer.eos_token_id

    def encode(self, rows: Sequence[Row], notes: Notes) -> Iterator[Sample]:
        """Yield the samples of `rows` in order; a row that gives none is counted in `notes`."""
        rendered = [(row, self._rendered(row, notes)) for row in rows]
        texts = [
            (one.text, list(chain.from_iterable((a.start, a.end) for a in one.answers)))
            for _, found in rendered
            for one in found
        ]
        cuts = iter(encode_with_places(texts, self._kinds))
        for row, found in rendered:
            samples: list[Sample] = []
            for _ in found:
                cut = next(cuts)
                stretches = [
                    self._stretch(cut.ids, first, last)
                    for first, last in zip(cut.places[::2], cut.places[1::2], strict=True)
                ]
                worded = [one for one in stretches if one is not None]
                samples += self._samples(row, cut.ids, worded, notes)
            if found and not samples:
                notes.refuse(row, SampleRefused("the chat template renders nothing of it to learn"))
            yield from samples

    def _rendered(self, row: Row, notes: Notes) -> list[Rendering]:
        try:
            check_weights(row)
            check_size(row)
            found = renderings(row, self._template)
            for one in found:
                check_length(len(one.text))
        except TemplateRefused as error:
            notes.refuse(row, SampleRefused(f"the chat template refuses this: {error}"))
            return []
        except SampleRefused as error:
            notes.refuse(row, error)
            return []
        if not any(one.answers for one in found):
            notes.refuse(row, _nothing_trained_on(row))
            return []
        texts = [one.text for one in found]
        said = [one.text[a.start : a.end] for one in found for a in one.answers]
        opens = any(one.opening_untrained for one in found)
        if (lost := lost_answer(row, said, opens)) is not None:
            notes.refuse(row, _lost(lost))
            return []
        missing = left_out(row, texts)
        if opens:
            missing.add(OPENING)
        notes.leaves_out(row, missing)
        words = "\n".join(str(message.get("content") or "") for message in row.messages)
        notes.holds(row, self._kinds.special_in(words))
        notes.dated += self._template.prints_date(row.tools)
        return found

    def _stretch(self, ids: list[int], first: int, last: int) -> _Stretch | None:
        """Find the token that ends the answer between `first` and `last`, or directly behind it."""
        kinds, tail = self._kinds, last
        while tail > first and (kinds.ends_a_turn(ids[tail - 1]) or kinds.is_blank(ids[tail - 1])):
            tail -= 1
        # a call has marks of its own in front of the end of the turn
        ends = [at for at in range(tail, last) if kinds.ends_a_turn(ids[at])]
        at = next((at for at in ends if ids[at] == kinds.usual_end), ends[0] if ends else None)
        if tail == first and at is not None:
            return None  # an end alone, which some templates mark behind the last answer
        if at is not None:
            return _Stretch(first, at + 1, ids[at])
        behind = last
        while behind < len(ids) and kinds.is_blank(ids[behind]):
            behind += 1
        if behind < len(ids) and kinds.ends_a_turn(ids[behind]) and self._tagged:
            return _Stretch(first, behind + 1, ids[behind])
        return _Stretch(first, last, None)

    @property
    def _tagged(self) -> bool:
        """Return whether the template itself marks answers; some such templates leave out an
        answer's end."""
        return self._template.tags_answers()

    def _samples(
        self, row: Row, ids: list[int], stretches: list[_Stretch], notes: Notes
    ) -> Iterator[Sample]:
        """Yield one sample of all answers that have an end, and one for each other answer, with an
        end added."""
        stretches = [one for one in stretches if one.last > max(one.first, 1)]
        for one in (found for found in reversed(stretches) if found.end is None):
            if self._end is None:
                raise _no_end()
            notes.added_ends += 1
            notes.ends[self._end] += 1
            marks = _marks(one.last + 1, [(one.first, one.last + 1)])
            yield sample_of(row, [*ids[: one.last], self._end], marks)
        ended = [one for one in stretches if one.end is not None]
        notes.ends.update(one.end for one in ended if one.end is not None)
        if ended:
            marks = _marks(len(ids), [(one.first, one.last) for one in ended])
            yield sample_of(row, ids, marks)


class PlainEncoder:
    """Encodes a prompt and its completion one after the other, without a template."""

    def __init__(self, kinds: TokenKinds, texts: TextEncoder) -> None:
        self._kinds = kinds
        self._texts = texts

    def encode(self, rows: Sequence[Row], notes: Notes) -> Iterator[Sample]:
        """Yield a sample a row; the completion and the end of sequence are trained on."""
        rows, pairs = self._pairs(rows, notes)
        cuts = encode_with_places([(a + b, [len(a)]) for a, b in pairs], self._kinds)
        for row, cut in zip(rows, cuts, strict=True):
            ids, added = self._texts.bordered(row, cut.ids, notes)
            first = added + cut.places[0]
            if len(ids) <= max(first, 1):
                notes.refuse(row, SampleRefused("it has no completion to learn"))
                continue
            yield sample_of(row, ids, _marks(len(ids), [(first, len(ids))]))

    def _pairs(self, rows: Sequence[Row], notes: Notes) -> tuple[list[Row], list[tuple[str, str]]]:
        """Return the rows that are not too long, with their prompts and completions."""
        kept, pairs = [], []
        for row in rows:
            pair = _prompt_and_completion(row)
            try:
                check_length(sum(map(len, pair)))
            except SampleRefused as error:
                notes.refuse(row, error)
                continue
            kept.append(row)
            pairs.append(pair)
        return kept, pairs


def check_weights(row: Row) -> None:
    """Raise SampleRefused for a weight between 0 and 1: messages are trained on, or context."""
    for number, weight in enumerate(row.weights, start=1):
        if weight not in (0.0, 1.0):
            raise SampleRefused(
                f"message {number} has the weight {weight:g}: use 1 (trained on) or 0 (context)"
            )


def check_length(characters: int) -> None:
    """Raise SampleRefused for a text that cannot be encoded in bounded memory."""
    if why := too_large(characters):
        raise SampleRefused(f"{why}: divide the row")


def check_size(row: Row) -> None:
    """Raise SampleRefused for a row that is too long, or has so many answers that rendering up to
    each takes minutes."""
    check_length(row.characters)
    answers = sum(message["role"] == "assistant" for message in row.messages)
    if answers * row.characters > MOST_RENDERED_CHARACTERS:
        raise SampleRefused(
            f"it has {answers:,} answers in {row.characters:,} characters, and is rendered up to "
            f"each of them: at most {MOST_RENDERED_CHARACTERS:,} characters are, so divide the row"
        )


def _prompt_and_completion(row: Row) -> tuple[str, str]:
    last = len(row.messages) - 1
    said = [str(message.get("content") or "") for message in row.messages]
    return "".join(said[:last]), said[last]


def _nothing_trained_on(row: Row) -> SampleRefused:
    roles = ", ".join(message["role"] for message in row.messages[:8])
    if any(message["role"] == "assistant" for message in row.messages):
        return SampleRefused(
            "none of it is trained on: its answers have the weight 0, or are empty"
        )
    return SampleRefused(
        f"no message has the role assistant (roles: {roles}), so there is nothing to learn: the "
        "loss is on the assistant's words"
    )


def _lost(name: str) -> SampleRefused:
    return SampleRefused(
        f"the chat template leaves out {name} that would be trained on: set "
        "data.chat_template to one that writes it, or remove the row"
    )


def _no_end() -> SampleRefused:
    return SampleRefused(
        "the chat template puts no end behind an answer and the tokenizer has no end of sequence, "
        "so the model would never learn to stop: set eos_token in tokenizer_config.json, or "
        "data.chat_template for a template that ends turns"
    )


def _marks(count: int, spans: list[tuple[int, int]]) -> list[bool]:
    marks = [False] * count
    for first, last in spans:
        marks[first:last] = [True] * (last - first)
    return marks


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
    """Encode the parts, each but the first behind the text `anchor`; None where tokens merge
    across that border."""
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
