"""Chat completions and completions: OpenAI's requests and answers around the worker's."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

import msgspec
from pydantic import Field

from fluxtrain.data.row import ROLES
from fluxtrain.errors import brief
from fluxtrain.events.answers.generation import Answered, Ask, Text, TokenLogprob
from fluxtrain.serve.refusal import Body, Refusal
from fluxtrain.serve.store import new_id
from fluxtrain.serve.worker import Said

REASONS = {"end": "stop", "length": "length", "context": "length", "stopped": "stop"}


class StreamOptions(Body):
    """Contents of a stream besides the text."""

    include_usage: bool = False
    include_obfuscation: bool | None = None  # does nothing: the answers stay on this machine


class SamplingFields(Body):
    """The fields of both kinds of requests; a field that this server lacks is refused by name."""

    model: str
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    stop: str | list[str] | None = None
    n: Literal[1] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None

    def ask(self) -> Ask:
        """Return the question to the worker. Raises Refusal."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        return Ask(
            max_new_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            stop=None if stop is None else tuple(stop),
        )


class ChatRequest(SamplingFields):
    """The body of `POST /v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    metadata: dict[str, str] | None = None
    store: bool | None = None

    def ask(self) -> Ask:
        """Return the question to the worker. Raises Refusal."""
        if self.top_logprobs is not None and not self.logprobs:
            raise Refusal("top_logprobs needs logprobs: true", param="top_logprobs")
        return msgspec.structs.replace(
            super().ask(),
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            messages=tuple(_plain(*one) for one in enumerate(self.messages)),
            max_new_tokens=self.max_completion_tokens or self.max_tokens,
        )


class CompletionRequest(SamplingFields):
    """The body of `POST /v1/completions`."""

    prompt: str = Field(min_length=1)
    logprobs: int | None = Field(default=None, ge=0, le=5)

    def ask(self) -> Ask:
        """Return the question to the worker."""
        asked = super().ask()
        return msgspec.structs.replace(
            asked, prompt=self.prompt, plain=True, logprobs=self.logprobs
        )


class GenerateRequest(Body):
    """The body of `POST /generate`: one user's words."""

    prompt: str = Field(min_length=1)
    max_new_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)


class OpenAIAnswer:
    """An answer while it is written, as OpenAI's objects."""

    def __init__(self, asked: ChatRequest | CompletionRequest) -> None:
        self._asked, self._chats = asked, isinstance(asked, ChatRequest)
        self._id = new_id("chatcmpl" if self._chats else "cmpl")
        self._created = int(time.time())

    async def whole(self, said: AsyncIterator[Said]) -> tuple[dict[str, Any], Answered]:
        """Return the whole answer, and the worker's summary of it."""
        answer = [event async for event in said][-1]
        assert isinstance(answer, Answered)
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": REASONS[answer.ended],
            "logprobs": self._logprobs(answer.logprobs),
        }
        if self._chats:
            choice["message"] = {"role": "assistant", "content": answer.text, "refusal": None}
        else:
            choice["text"] = answer.text
        kind = "chat.completion" if self._chats else "text_completion"
        return self._object(kind, [choice], usage=_usage(answer)), answer

    async def pieces(self, said: AsyncIterator[Said]) -> AsyncIterator[dict[str, Any] | Answered]:
        """Yield the objects of a stream, and in the end the worker's summary."""
        if self._chats:
            yield self._piece({"role": "assistant", "content": ""})
        told = 0  # tokens whose probabilities were sent
        async for event in said:
            if isinstance(event, Text):
                content = {"content": event.text} if self._chats else event.text
                yield self._piece(content, None, event.logprobs)
                told += len(event.logprobs)
            elif isinstance(event, Answered):
                content = {} if self._chats else ""
                yield self._piece(content, REASONS[event.ended], event.logprobs[told:])
                options = self._asked.stream_options
                if options is not None and options.include_usage:
                    yield self._object(self._kind, [], usage=_usage(event))
                yield event

    @property
    def _kind(self) -> str:
        return "chat.completion.chunk" if self._chats else "text_completion"

    def _piece(
        self,
        content: dict[str, str] | str,
        reason: str | None = None,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> dict[str, Any]:
        inner = {"delta": content} if self._chats else {"text": content}
        told = self._logprobs(logprobs) if logprobs else None
        choice = {"index": 0, "finish_reason": reason, "logprobs": told, **inner}
        return self._object(self._kind, [choice])

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """Return the probabilities of tokens in the form of the request; None where it asks for
        none."""
        if self._asked.logprobs in (None, False):
            return None
        if self._chats:
            shown = [
                {**_token(one), "top_logprobs": [_token(other) for other in one.top]}
                for one in tokens
            ]
            return {"content": shown, "refusal": None}
        return {
            "tokens": [one.text for one in tokens],
            "token_logprobs": [one.logprob for one in tokens],
            "top_logprobs": [{other.text: other.logprob for other in one.top} for one in tokens],
            "text_offset": [one.at for one in tokens],
        }

    def _object(self, kind: str, choices: list[Any], **more: Any) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._asked.model,
            "choices": choices,
            **more,
        }


def _usage(answer: Answered) -> dict[str, int]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.tokens,
        "total_tokens": answer.prompt_tokens + answer.tokens,
    }


def _token(told: TokenLogprob) -> dict[str, Any]:
    shown = None if told.bytes is None else list(told.bytes)
    return {"token": told.text, "logprob": told.logprob, "bytes": shown}


def _plain(number: int, message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose content is text. Raises Refusal for pictures, sound and files, and for
    a role that no model learns."""
    if (role := message.get("role")) not in ROLES:
        known = f"{', '.join(map(repr, ROLES[:-1]))}, and {ROLES[-1]!r}"
        raise Refusal(
            f"Invalid value: {brief(repr(role), 60)}. Supported values are: {known}.",
            code="invalid_value",
            param=f"messages[{number}].role",
        )
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = [one.get("text") for one in content if isinstance(one, dict)]
    if len(texts) != len(content) or not all(isinstance(text, str) for text in texts):
        raise Refusal("messages hold text alone here: leave other parts out", param="messages")
    return {**message, "content": "".join(map(str, texts))}
