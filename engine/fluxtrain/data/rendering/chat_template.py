"""A tokenizer's chat template, with what must be found out about it by rendering."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, Literal, Protocol

from fluxtrain.data.rendering.named import NamingTokenizer, templates_for
from fluxtrain.data.row import Message, Tool
from fluxtrain.errors import BadInput, FluxTrainError

_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_PROBE_KEY, _PROBE_VALUE = "probe_key", "probe_value"
# Mistral's templates want tool calls to have ids of nine letters.
_PROBE_CALL = {"type": "function", "id": "probe0001"}
_WHAT = "the chat template of the model"
_CURE = "repair it in the model's folder, or set data.chat_template (chatml, llama-3, ...)"
_NONE = re.compile(r"\b(?:None|null)\b")
_PROBE_USER: Message = {"role": "user", "content": "question"}


# Stands for today's date, or data would become other tokens tomorrow, and a run could not go on.
# It is the one that Llama's templates print where they are not told the date.
DATE = datetime(2024, 7, 26)
_TODAY = "strftime_now"


class TemplateRefused(BadInput):
    """A chat template raised an error, or failed, on a conversation."""


class TemplateTokenizer(NamingTokenizer, Protocol):
    """The part of a tokenizer that renders conversations."""

    @property
    def special_tokens_map(self) -> dict[str, Any]: ...
    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...
    def get_chat_template(self, chat_template: None = None, tools: Any = None) -> str: ...


class ChatTemplate:
    """Renders conversations as the tokenizer does at inference."""

    def __init__(self, tokenizer: TemplateTokenizer) -> None:
        """Take the template of `tokenizer`; raises BadInput with the cure where it has none."""
        self._tokenizer = tokenizer
        try:
            tokenizer.get_chat_template()
        except ValueError as error:
            named = ", ".join([*templates_for(tokenizer), "or the path of a .jinja file"])
            raise BadInput(
                "the data has conversations and the model's tokenizer has no chat template: set "
                f"data.chat_template to {named}, use an instruction-tuned model, or give the data "
                "as `text`"
            ) from error

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, opened: bool = False
    ) -> str:
        """Render a conversation; `opened` ends it with the beginning of an answer of the model.

        Raises TemplateRefused with the template's own words, and BadInput where memory runs out.
        """
        with _failures_refused():
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages), tools=list(tools) or None, tokenize=False,
                    add_generation_prompt=opened, **self._date(tools),
                )
            )  # fmt: skip

    def render_tagged(
        self, messages: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> tuple[str, list[tuple[int, int]]]:
        """Render a conversation, and return the ranges of text inside `{% generation %}`."""
        from transformers.utils import chat_template_utils

        _render: Any = chat_template_utils.render_jinja_template  # its annotations are wrong
        with _failures_refused():
            texts, spans = _render(
                conversations=[list(messages)],
                tools=list(tools) or None,
                chat_template=self._text(tools),
                return_assistant_tokens_mask=True,
                **self._tokenizer.special_tokens_map,
                **self._date(tools),
            )
        return str(texts[0]), [(int(start), int(end)) for start, end in spans[0]]

    def tags_answers(self, tools: Sequence[Tool] = ()) -> bool:
        """Return whether the template itself marks the assistant's words."""
        return _GENERATION_TAG.search(self._text(tools)) is not None

    def prints_date(self, tools: Sequence[Tool] = ()) -> bool:
        """Return whether the template writes the day of the rendering."""
        return _TODAY in self._text(tools)

    def _date(self, tools: Sequence[Tool]) -> dict[str, Any]:
        return {_TODAY: DATE.strftime} if self.prints_date(tools) else {}

    @cached_property
    def opening(self) -> str:
        """Return the text between a question and an answer, such as `<|im_start|>assistant` and a
        newline; empty where unknown."""
        try:
            asked, opened = self.render([_PROBE_USER]), self.render([_PROBE_USER], opened=True)
        except TemplateRefused:
            return ""
        return opened.removeprefix(asked) if opened.startswith(asked) else ""

    @cached_property
    def plain_ending(self) -> str:
        """Return the text behind an answer of a few words; empty where unknown."""
        words = "probe answer"
        try:
            text = self.render([_PROBE_USER, {"role": "assistant", "content": words}])
        except TemplateRefused:
            return ""
        return text.rpartition(words)[2] if words in text else ""

    @cached_property
    def arguments(self) -> Literal["object", "string"]:
        """Return the form of a tool call's arguments that the template takes: an object, or its
        JSON.

        Templates of the first kind write an object's JSON, those of the second the string as it
        is; given the other, they write a string in quotes or a Python dictionary, or fail.
        """
        forms: dict[Literal["object", "string"], str | None] = {
            "object": self._called({_PROBE_KEY: _PROBE_VALUE}),
            "string": self._called(json.dumps({_PROBE_KEY: _PROBE_VALUE})),
        }
        written = json.dumps({_PROBE_KEY: _PROBE_VALUE}, separators=(",", ":"))
        for form, text in forms.items():
            if text is not None and written in "".join(text.split()):
                return form
        as_object = forms["object"]
        if as_object is not None and f"'{_PROBE_KEY}'" not in as_object:
            return "object"  # in a syntax of its own, or not at all
        return "object" if forms["string"] is None else "string"

    @cached_property
    def blank(self) -> str | None:
        """Return the words of an answer that only calls a tool: None, or an empty text where the
        template would fail on None or print it."""
        nothing: Any = {} if self.arguments == "object" else "{}"
        made = [self._called_with(content, nothing) for content in (None, "")]
        if made[0] is None or (
            made[1] is not None and len(_NONE.findall(made[0])) > len(_NONE.findall(made[1]))
        ):
            return ""
        return None

    def prepared(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with the arguments of their tool calls in the template's form."""
        if not any(message.get("tool_calls") for message in messages):
            return list(messages)
        return [
            {**message, "tool_calls": [self._with_form(call) for call in message["tool_calls"]]}
            if message.get("tool_calls")
            else message
            for message in messages
        ]

    def _with_form(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call.get("function")
        if self.arguments == "object" or not isinstance(function, dict):
            return call
        if isinstance(function.get("arguments"), str) or "arguments" not in function:
            return call
        text = json.dumps(function["arguments"], ensure_ascii=False)
        return {**call, "function": {**function, "arguments": text}}

    def _called(self, arguments: Any) -> str | None:
        made = self._called_with(None, arguments)
        return made if made is not None else self._called_with("", arguments)

    def _called_with(self, content: str | None, arguments: Any) -> str | None:
        call = {**_PROBE_CALL, "function": {"name": "probe_tool", "arguments": arguments}}
        answer: Message = {"role": "assistant", "content": content, "tool_calls": [call]}
        try:
            return self.render([_PROBE_USER, answer])
        except TemplateRefused:
            return None

    def _text(self, tools: Sequence[Tool]) -> str:
        return self._tokenizer.get_chat_template(None, list(tools) or None)


@contextlib.contextmanager
def _failures_refused() -> Iterator[None]:
    """Raise TemplateRefused where a template fails on content that it does not know."""
    try:
        yield
    except MemoryError:
        raise BadInput(f"{_WHAT} takes more memory than there is: {_CURE}") from None
    except FluxTrainError:  # a stop
        raise
    except Exception as error:
        raise TemplateRefused(str(error).strip() or type(error).__name__) from error
