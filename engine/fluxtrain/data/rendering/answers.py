"""Finds the assistant's answers in renderings, as characters: from where the model would go on at
inference to the end of the turn.

Where the template has `{% generation %}` it says so itself. Otherwise the conversation is rendered
up to each answer and with it. A template that writes earlier turns otherwise than the last one
(without their reasoning, say) makes several renderings: each answer is trained on in the one that
inference would see, and answers share a rendering where one is the beginning of the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fluxtrain.data.rendering.chat_template import ChatTemplate, TemplateRefused
from fluxtrain.data.row import Message, Row

LARGEST_CHARACTERS = 32 << 20  # of all renderings of a row


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSpan:
    """The characters of an assistant's message that are trained on, its end of turn with them."""

    start: int
    end: int


@dataclass(slots=True, kw_only=True)
class Rendering:
    """A text that the model sees, with the answers to train on in their order."""

    text: str
    answers: list[AnswerSpan] = field(default_factory=list)
    opening_untrained: bool = False  # the template refuses an opening answer by itself


def renderings(row: Row, template: ChatTemplate) -> list[Rendering]:
    """Render a conversation so that each trained answer is in one rendering, the whole one first.

    Raises TemplateRefused where the template fails or hides where an answer is.
    """
    messages = _with_words(row, template)
    trained = [
        index
        for index, (message, weight) in enumerate(zip(messages, row.weights, strict=True))
        if message["role"] == "assistant" and weight > 0
    ]
    if not trained:
        return []
    if template.tags_answers(row.tools):
        return _by_tags(messages, trained, row, template)
    return _by_prefixes(messages, trained, row, template)


def _with_words(row: Row, template: ChatTemplate) -> list[Message]:
    """Return the messages as the template takes them: some print the None of a call's content, or
    add it to a text."""
    messages = template.prepared(row.messages)
    if all(message.get("content", "") is not None for message in messages):
        return messages
    if template.blank is None:
        try:
            template.render(messages, row.tools)
            return messages
        except TemplateRefused:
            pass
    return [
        {**message, "content": ""} if message.get("content", "") is None else message
        for message in messages
    ]


def _by_tags(
    messages: list[Message], trained: list[int], row: Row, template: ChatTemplate
) -> list[Rendering]:
    """Take the marked words of the whole, or those of an answer's own turn where they differ."""
    text, spans = template.render_tagged(messages, row.tools)
    whole, apart = Rendering(text=text), list[Rendering]()
    for index in trained:
        try:
            first = len(_tagged(messages[:index], row, template)[1])
            own_text, own = _tagged(messages[: index + 1], row, template)
        except TemplateRefused:
            roles = [message["role"] for message in messages]
            if len(spans) != roles.count("assistant"):
                raise
            at = roles[:index].count("assistant")  # a span for each answer
            whole.answers += _answers(spans[at : at + 1])
            continue
        here = spans[first : len(own)]
        own = own[first:]
        if [text[a:b] for a, b in here] == [own_text[a:b] for a, b in own]:
            whole.answers += _answers(here)
        else:
            apart.insert(0, Rendering(text=own_text, answers=_answers(own)))
    return [whole, *apart] if whole.answers else apart


def _tagged(
    messages: list[Message], row: Row, template: ChatTemplate
) -> tuple[str, list[tuple[int, int]]]:
    return template.render_tagged(messages, row.tools) if messages else ("", [])


def _answers(spans: list[tuple[int, int]]) -> list[AnswerSpan]:
    return [AnswerSpan(start=start, end=end) for start, end in spans if end > start]


def _by_prefixes(
    messages: list[Message], trained: list[int], row: Row, template: ChatTemplate
) -> list[Rendering]:
    made: list[Rendering] = []
    for index in reversed(trained):
        try:
            text = template.render(messages[: index + 1], row.tools)
        except TemplateRefused:
            if not made or any(message["role"] == "user" for message in messages[:index]):
                raise
            made[0].opening_untrained = True  # it is context, in front of the others
            break
        shared = next((found for found in made if found.text.startswith(text)), None)
        if shared is None:
            shared = Rendering(text=_with_the_rest(text, messages, index, row, template, made))
            made.append(shared)
            kept = sum(len(one.text) for one in made)
            if len(made) > 1 and kept > LARGEST_CHARACTERS:
                raise TemplateRefused(
                    f"it writes {len(made):,} answers in {kept:,} characters, as each is rendered "
                    f"otherwise, and at most {LARGEST_CHARACTERS:,} are kept: divide the row"
                )
        start = _start(text, messages, index, row, template)
        shared.answers.insert(0, AnswerSpan(start=start, end=len(text)))
    return made


def _with_the_rest(
    text: str,
    messages: list[Message],
    index: int,
    row: Row,
    template: ChatTemplate,
    made: list[Rendering],
) -> str:
    """Return the whole conversation, after its last trained answer, where it begins with `text`."""
    if made or index + 1 == len(messages):
        return text
    try:
        whole = template.render(messages, row.tools)
    except TemplateRefused:
        return text
    return whole if whole.startswith(text) else text


def _start(text: str, messages: list[Message], index: int, row: Row, template: ChatTemplate) -> int:
    """Return where in `text`, which ends with message `index`, its answer begins."""
    before = _prompt(messages[:index], row, template)
    if before and text.startswith(before):
        return len(before)
    words = _words_at(text, messages[index])
    if before:
        asked = template.render(messages[:index], row.tools)
        if text.startswith(asked):  # the prompt opens an answer otherwise than the rendering
            return min(_common(before, text), max(words, len(asked)))
    opening = template.opening
    at = text.rfind(opening, 0, words) if opening else -1
    return words if at < 0 else at + len(opening)


def _common(one: str, other: str) -> int:
    """Return how many characters two texts begin with together."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _prompt(asked: Sequence[Message], row: Row, template: ChatTemplate) -> str:
    """Return the text that the model would continue; empty where the template needs a message
    first."""
    if not asked:
        return ""
    try:
        return template.render(asked, row.tools, opened=True)
    except TemplateRefused:
        return ""


def _words_at(text: str, message: Message) -> int:
    """Return where the message's words begin; its last occurrence, as it is the last message."""
    for words in _possible_words(message):
        if (at := text.rfind(words)) >= 0:
            return at
    raise TemplateRefused("it writes an answer so that its words cannot be found")


def _possible_words(message: Message) -> list[str]:
    content = message.get("content") or ""
    calls = [call["function"]["name"] for call in message.get("tool_calls") or ()]
    found = [content, content.strip(), content.rpartition("</think>")[2].strip(), *calls]
    return [words for words in found if words]
