"""The lines of `fluxtrain generate --json`: a JSON object each, told apart by `kind`.

It reads an `ask` or a `stop` a line from standard input, and answers many at once. First it writes
`progress` and `ready`; then for every ask some `text` and one `answer`, or a `refused`. It leaves
when its input ends and all is answered. Started with `--slots N` it also reads `mount` and
`unmount`, and an ask may name an adapter that is mounted. With `--prompts FILE` it reads no input:
`ready`, one `expected`, and an `answer` for each prompt.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

COMMAND = "generate"

# Why an answer ended: by a token that ends answers, by the most tokens that were asked for, because
# the model knows no further positions, or because it was stopped.
Ended = Literal["end", "length", "context", "stopped"]


class _Request(msgspec.Struct, frozen=True, tag_field="kind", forbid_unknown_fields=True):
    """A line of input. An unknown key is refused: an answer that ignores it would be wrong."""


class Ask(_Request, frozen=True, kw_only=True, tag="ask"):
    """Asks for an answer. Missing keys have the values of the command line."""

    id: str = ""
    messages: tuple[dict[str, Any], ...] | None = None  # a conversation, with role and content
    prompt: str | None = None  # one user's words; without a chat template, text to continue
    plain: bool = False  # the prompt is text to continue, also with a chat template
    max_new_tokens: int | None = None
    temperature: float | None = None  # 0: always the most likely token
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] | None = None  # texts that end the answer and are left out of it
    logprobs: int | None = None  # say how likely tokens were, and so many others in their place
    adapter: str | None = None  # that is mounted; None: the model as it was opened


class Stop(_Request, frozen=True, kw_only=True, tag="stop"):
    """Stop an answer, or all that were asked for so far; they end with the text so far."""

    id: str = ""  # of the ask; "": all


class Mount(_Request, frozen=True, kw_only=True, tag="mount"):
    """Put an adapter into a slot; the one that was used least recently leaves its own."""

    name: str
    path: str  # of its folder


class Unmount(_Request, frozen=True, kw_only=True, tag="unmount"):
    """Free the slot of an adapter."""

    name: str


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="ready"):
    """The model is loaded, and a pass over it was measured."""

    COMMAND: ClassVar[str] = COMMAND

    model: str
    base: str | None  # of an adapter
    has_template: bool  # without one there are no conversations
    context: int | None  # tokens of prompt and answer; None: not known
    ends: tuple[str, ...]  # tokens that end an answer
    dtype: str
    device: str
    placed: str  # where the weights are
    pass_s: float  # measured: one token of one answer
    max_new_tokens: int
    slots: int = 0  # for adapters
    slot_rank: int = 0
    slot_bytes: int = 0  # of memory that each takes


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="progress"):
    """Tells the work before the model is ready."""

    text: str


class Expected(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="expected"):
    """How long the prompts of a file take at most, from a measured pass over one batch."""

    prompts: int
    batches: int
    batch_rows: int
    max_new_tokens: int
    pass_s: float
    at_most_s: float


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """How likely a token was: the logarithm of its probability, before temperature and top_p."""

    text: str
    logprob: float
    bytes: tuple[int, ...] | None = None  # of its text; None: not known
    at: int = 0  # characters of the answer before it
    top: tuple[TokenLogprob, ...] = ()  # the most likely tokens of its place


class Text(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="text"):
    """The next characters of an answer."""

    id: str
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()  # of their tokens, where they were asked for


class Answered(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="answer"):
    """A whole answer."""

    id: str  # of the ask; of a prompt in a file, its number from 1
    text: str
    ended: Ended
    tokens: int
    prompt_tokens: int
    seconds: float  # of the batch
    logprobs: tuple[TokenLogprob, ...] = ()  # of all tokens, where they were asked for


class Mounted(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="mounted"):
    """The slots have changed."""

    name: str
    mounted: tuple[str, ...]  # all adapters in slots now
    seconds: float


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="refused"):
    """An ask, a mount or an unmount that cannot be done, with the cure; the next one may be."""

    id: str  # of a mount or unmount: its name
    message: str
    later: bool = False  # the same may be done when an answer has ended


Request = Ask | Stop | Mount | Unmount
Event = Progress | Ready | Expected | Text | Answered | Mounted | Refused


def read_request(line: str | bytes) -> Request:
    """Read a line of input. Raises msgspec.DecodeError, also for an unknown kind."""
    request: Request = msgspec.json.decode(line, type=Request)
    return request


def read_event(line: str | bytes) -> Event:
    """Read a line of output. Raises msgspec.DecodeError, also for an unknown kind."""
    event: Event = msgspec.json.decode(line, type=Event)
    return event


def encoded(message: Request | Event) -> bytes:
    """Return a message as a line, with its end."""
    return msgspec.json.encode(message) + b"\n"
