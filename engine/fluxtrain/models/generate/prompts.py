"""Prompts as tokens: conversations through the model's chat template, other text as it is."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fluxtrain.data.encoding.tokenizer import TokenKinds, too_large
from fluxtrain.data.rendering.chat_template import ChatTemplate, TemplateRefused
from fluxtrain.errors import BadInput
from fluxtrain.files.opening import read_plain
from fluxtrain.models.generate.sampling import DecodedModel
from fluxtrain.units import bytes_text

# A JSON value takes up to 20 times its text in memory, a prompt of one letter 300 bytes.
PROMPTS_LIMIT_BYTES = 64 << 20
MOST_PROMPTS = 1 << 20

Conversation = list[dict[str, Any]]
_KEYS = "a JSON string, or an object with `prompt` or `messages`"


@dataclass(frozen=True, kw_only=True, slots=True)
class UserPrompt:
    """A user's text or conversation, and its place."""

    text: str | None = None
    messages: Conversation | None = None
    where: str = "the prompt"

    @property
    def words(self) -> str:
        """Return the last words of the question."""
        return str(self.messages[-1].get("content") if self.messages else self.text)

    def check(self) -> None:
        """Raise BadInput for an empty prompt, or one that is no text."""
        if self.messages is not None:
            _check_messages(self.messages, self.where)
            for message in self.messages:
                refuse_other_bytes(str(message["content"]), self.where)
        elif not (self.text or "").strip():
            raise BadInput(f"{self.where} is empty: write something to answer or to continue")
        refuse_other_bytes(self.text or "", self.where)


class Prompting:
    """Makes tokens of prompts, as the model was taught them."""

    def __init__(self, opened: DecodedModel, *, plain: bool = False, system: str = "") -> None:
        """Prepare prompts.

        plain: continue text as it is, without the chat template. system: begins conversations.
        Raises BadInput where `system` is given without a template.
        """
        refuse_other_bytes(system, "--system")
        self._kinds = TokenKinds(opened.tokenizer)
        self._system = system
        self._template = None if plain else template_of(opened)
        if system and self._template is None:
            raise BadInput(f"--system needs a chat template, and {opened.name} {_without(plain)}")
        self._why = _without(plain)

    @property
    def talks(self) -> bool:
        """Return whether prompts are turns of a conversation."""
        return self._template is not None

    def tokens(self, prompt: UserPrompt, *, plain: bool = False) -> list[int]:
        """Return the tokens of a prompt; `plain`: of text to continue, without the chat template.

        Raises BadInput where it cannot be written.
        """
        prompt.check()
        if prompt.messages is None and (plain or self._template is None):
            return self._encoded(prompt.text or "", prompt.where, begins=True)
        messages = prompt.messages or [{"role": "user", "content": prompt.text}]
        if self._template is None:
            raise BadInput(
                f"{prompt.where} is a conversation, and the model {self._why}: give `prompt`"
            )
        if self._system and messages[0].get("role") != "system":
            messages = [{"role": "system", "content": self._system}, *messages]
        try:
            text = self._template.render(messages, opened=True)
        except TemplateRefused as error:
            raise BadInput(f"{prompt.where}: the model's chat template says: {error}") from error
        return self._encoded(text, prompt.where, begins=False)

    def _encoded(self, text: str, where: str, *, begins: bool) -> list[int]:
        """Encode a text; `begins`: with the special tokens around it."""
        if why := too_large(len(text)):
            raise BadInput(f"{where}: {why}: shorten it")
        encode = self._kinds.encode_whole if begins else self._kinds.encode
        return encode([text])[0]


def refuse_other_bytes(text: str, where: str) -> None:
    """Raise BadInput for invalid text: bytes that are not UTF-8, which Python reads as halves of
    surrogate pairs, and such halves in JSON."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ord(text[error.start])
        if 0xDC80 <= half <= 0xDCFF:  # PEP 383
            raise BadInput(
                f"{where} is not UTF-8 (it has the byte 0x{half & 0xFF:02X}): convert it, as with "
                "`iconv -f latin1 -t utf-8`"
            ) from None
        raise BadInput(
            f"{where} has \\u{half:04x}, half of a surrogate pair and no character: write both "
            "halves, or the character itself"
        ) from None


def template_of(opened: DecodedModel) -> ChatTemplate | None:
    """Return the model's chat template; None where it has none."""
    try:
        return ChatTemplate(opened.tokenizer)
    except BadInput:
        return None


def read_prompts(path: Path, named: str = "--prompts") -> list[UserPrompt]:
    """Read prompts from a file: `.jsonl` and `.ndjson` hold one JSON value a line, any other file
    one prompt a line. Empty lines are passed over. `named`: the option or setting that names it.

    Raises BadInput where there is no file, no prompt or too many, naming the line that cannot be
    used.
    """
    try:
        file = path.expanduser()
        size_bytes = file.stat().st_size
        if not file.is_file() and not file.is_dir():
            raise BadInput(f"{path} is a pipe or a device: {named} takes a text file")
        if size_bytes > PROMPTS_LIMIT_BYTES:
            raise BadInput(
                f"{path} has {bytes_text(size_bytes)}, and {named} takes at most "
                f"{bytes_text(PROMPTS_LIMIT_BYTES)}: divide it into several files"
            )
        raw = read_plain(file, PROMPTS_LIMIT_BYTES, follow=True)
        whole = raw.decode("utf-8-sig", errors="surrogateescape")
    except FileNotFoundError as error:
        raise BadInput(f"{path} does not exist: check {named}") from error
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error}): {named} takes a text file") from error
    is_json = path.suffix in (".jsonl", ".ndjson")
    found = []
    for number, line in enumerate(io.StringIO(whole, newline=None), 1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        refuse_other_bytes(line, where)
        text = line.rstrip("\n")
        found.append(_parsed(line, where) if is_json else UserPrompt(text=text, where=where))
        if len(found) > MOST_PROMPTS:
            raise BadInput(
                f"{path} holds more than {MOST_PROMPTS:,} prompts: divide it into several files"
            )
    if not found:
        raise BadInput(f"{path} holds no prompts: write one a line")
    for prompt in found:
        prompt.check()
    return found


def _parsed(line: str, where: str) -> UserPrompt:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{where} is not JSON ({error}): write {_KEYS}") from error
    if isinstance(value, str):
        return UserPrompt(text=value, where=where)
    if isinstance(value, dict):
        if isinstance(value.get("messages"), list):
            return UserPrompt(messages=value["messages"], where=where)
        if isinstance(value.get("prompt"), str):
            return UserPrompt(text=value["prompt"], where=where)
        for name, wanted in (("messages", "a list"), ("prompt", "text")):
            if name in value:
                told = json.dumps(value[name])[:40]
                raise BadInput(f"{where}: `{name}` is {told}, and it must be {wanted}")
    raise BadInput(f"{where} has no prompt: write {_KEYS}")


def _check_messages(messages: Sequence[Any], where: str) -> None:
    if not messages:
        raise BadInput(f"{where} is a conversation without messages: write at least one")
    for message in messages:
        known = isinstance(message, dict) and isinstance(message.get("role"), str)
        if not known or not (
            isinstance(message.get("content"), str | list)
            or ("content" in message and message.get("tool_calls"))
        ):
            raise BadInput(
                f"{where} has the message {json.dumps(message)[:80]}: each needs role and content, "
                "which is text"
            )
    last = messages[-1]
    if last["role"] == "user" and not str(last["content"] or "").strip():
        raise BadInput(f"{where} is empty: write something to answer")


def _without(plain: bool) -> str:
    return "is used without one (--plain)" if plain else "has none"
