"""`fluxtrain generate`: a chat in the terminal, the prompts of a file, or lines of JSON."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fluxtrain.errors import BadInput, Interrupted
from fluxtrain.events.answers.generation import Event, Expected, Progress, Ready, encoded
from fluxtrain.events.printable import printable_lines
from fluxtrain.models.generate.prompts import Prompting, UserPrompt, read_prompts
from fluxtrain.models.generate.sampling import Sampling
from fluxtrain.models.generate.writing import Written
from fluxtrain.results.generation_session import Batches, GenerationSession
from fluxtrain.results.model_request import ModelRequest
from fluxtrain.results.opened import open_model
from fluxtrain.results.serving import Stopping, serve
from fluxtrain.units import duration_text

Tell = Callable[[str], None]
NEW, HELP = "/new", "/help"
LEAVE = ("/quit", "/exit", "/bye")
_HELP = "Ctrl-C stops an answer, Ctrl-D or /quit leaves, /new forgets what was said"


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """The options of the command line."""

    model: ModelRequest
    sampling: Sampling
    prompts: Path | None = None
    prompt: str | None = None  # one, in place of a file
    rows: int | None = None
    system: str = ""
    plain: bool = False  # text is continued without the chat template

    def check_values(self) -> None:
        """Raise BadInput for a value that is out of its bounds."""
        self.sampling.check_values()
        if self.rows is not None and self.rows < 1:
            raise BadInput(f"--rows is {self.rows}: use at least 1, or leave it out")
        if self.prompt is not None and self.prompts is not None:
            raise BadInput("--prompt and --prompts are both given: leave one out")
        if self.rows is not None and self.prompts is None:
            raise BadInput("--rows is of --prompts: a chat has one answer at a time")

    def asked(self) -> list[UserPrompt] | None:
        """Return the prompts to answer; None for a chat. Raises BadInput for anything that is no
        prompt."""
        if self.prompt is not None:
            if not self.prompt.strip():
                raise BadInput("--prompt is empty: write something to answer")
            return [UserPrompt(text=self.prompt, where="--prompt")]
        return None if self.prompts is None else read_prompts(self.prompts)


@contextmanager
def opened_session(request: GenerationRequest, tell: Tell) -> Iterator[GenerationSession]:
    """Open the model and measure a pass; `tell` is called with the progress."""
    request.check_values()
    opened = open_model(request.model, tell)
    try:
        prompting = Prompting(opened, plain=request.plain, system=request.system)
        tell("measuring a pass")
        yield GenerationSession.of(opened, prompting, request.sampling)
    finally:
        opened.close()


def answer_prompts(request: GenerationRequest, tell: Tell, show: Tell) -> None:
    """Show the answers to the prompts of a file, in their order, or to the one that is given."""
    prompts = request.asked()  # before the model, which takes longer
    assert prompts is not None
    with opened_session(request, tell) as session, stopped_by_interrupts() as stopping:
        batches = Batches(session, prompts, request.rows)
        tell(expectation(batches.expected()))
        for prompt, answer in zip(prompts, batches.answers(stopping.asked), strict=False):
            alone = request.prompt is not None
            show(answer.text if alone else f"> {prompt.words}\n{answer.text}\n")
        _refuse_stopped(stopping, request)


def answer_in_json(request: GenerationRequest) -> None:
    """Answer in lines of JSON: the prompts of a file, or asks that come as lines."""
    prompts = request.asked()
    try:
        _answer_in_json(request, prompts)
    except BrokenPipeError:  # nobody reads any more, so nobody asks
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the exit


def _answer_in_json(request: GenerationRequest, prompts: list[UserPrompt] | None) -> None:
    def tell(text: str) -> None:
        write_line(Progress(text=text))

    with opened_session(request, tell) as session, stopped_by_interrupts() as stopping:
        write_line(session.ready())
        if prompts is None:
            serve(session, sys.stdin.buffer, write_lines, stopping)
            return
        batches = Batches(session, prompts, request.rows)
        write_line(batches.expected())
        for answer in batches.answers(stopping.asked):
            write_line(answer)
        _refuse_stopped(stopping, request)


def _refuse_stopped(stopping: Stopping, request: GenerationRequest) -> None:
    """Raise Interrupted where not all prompts were answered."""
    if stopping.asked():
        raise Interrupted(
            f"stopped: not all prompts of {request.prompts or '--prompt'} are answered"
        )


def write_line(event: Event) -> None:
    """Write an event to standard output. Raises BrokenPipeError when nobody reads any more."""
    write_lines([event])


def write_lines(events: Sequence[Event]) -> None:
    """Write events to standard output at once. Raises BrokenPipeError when nobody reads any
    more."""
    sys.stdout.buffer.write(b"".join(map(encoded, events)))
    sys.stdout.buffer.flush()


def expectation(expected: Expected) -> str:
    """Say how long the prompts of a file take."""
    prompts = "1 prompt" if expected.prompts == 1 else f"{expected.prompts} prompts"
    batches = "1 batch" if expected.batches == 1 else f"{expected.batches} batches"
    return (
        f"{prompts} in {batches} of {expected.batch_rows}: {duration_text(expected.pass_s)} a "
        f"token (measured), so answers of {expected.max_new_tokens} tokens take "
        f"{duration_text(expected.at_most_s)} at most, without reading the prompts"
    )


def greeting(ready: Ready) -> str:
    """Say who answers, and how long an answer takes."""
    base = f" on {ready.base}" if ready.base else ""
    ends = ", ".join(ready.ends) or "no token"
    most = duration_text(ready.pass_s * ready.max_new_tokens)
    kind = (
        ""
        if ready.has_template
        else ("\nno chat template: each line is continued as it is, without what was said before")
    )
    return (
        f"{ready.model}{base} in {ready.dtype}, {ready.placed}\n"
        f"a token takes {duration_text(ready.pass_s)} (measured), an answer of "
        f"{ready.max_new_tokens} tokens {most} at most; answers end at {ends}{kind}\n{_HELP}"
    )


class Chat:
    """A conversation in the terminal."""

    def __init__(
        self,
        session: GenerationSession,
        ask: Callable[[], str],
        show: Tell,
        tell: Tell,
        stopping: Stopping,
    ) -> None:
        """Prepare a chat.

        ask: returns the next line, or raises EOFError; show: gets pieces of an answer as they
        come; tell: gets everything else.
        """
        self._session, self._ask, self._stopping = session, ask, stopping
        self._show, self._tell = show, tell
        self._said: list[dict[str, Any]] = []

    def run(self) -> None:
        """Answer line by line until the input ends, or a word for leaving comes."""
        while True:
            try:
                line = self._ask()
            except EOFError:
                return
            except KeyboardInterrupt:
                self._tell(_HELP)
                continue
            if line.strip() in LEAVE:
                return
            if line.strip() == NEW:
                self._said.clear()
                self._tell("a new conversation")
            elif line.strip() == HELP:
                self._tell(_HELP)
            elif line.strip():
                self._answer(line)

    def _answer(self, line: str) -> None:
        prompt = UserPrompt(text=line)
        if self._session.prompting.talks:
            prompt = UserPrompt(messages=[*self._said, {"role": "user", "content": line}])
        self._stopping.begin()
        try:
            written = self._session.answer(
                prompt, self._session.sampling, self._show, self._stopping.asked
            )
        except BadInput as error:
            self._tell(f"{error}; {NEW} begins a new conversation" if self._said else str(error))
            return
        self._show("\n")
        self._tell(self._count(written))
        if prompt.messages is not None:
            self._said = [*prompt.messages, {"role": "assistant", "content": written.text}]

    def _count(self, written: Written) -> str:
        count = len(written.tokens)
        rate = f", {count / written.seconds:.3g} tokens/s" if written.seconds else ""
        why = {
            "end": "",
            "length": "; stopped at --max-new-tokens",
            "context": "; the model knows no further positions: /new begins a new conversation",
            "stopped": "; stopped",
        }[written.ended]
        return f"[{count} tokens in {duration_text(written.seconds)}{rate}{why}]"


def chat(request: GenerationRequest, tell: Tell) -> None:
    """Talk in the terminal until the input ends."""
    with opened_session(request, tell) as session, stopped_by_interrupts() as stopping:
        tell(greeting(session.ready()))
        Chat(session, asking(), show_piece, tell, stopping).run()


def show_piece(text: str) -> None:
    """Print a piece of an answer, without codes that a terminal would obey."""
    sys.stdout.write(printable_lines(text))
    sys.stdout.flush()


def asking() -> Callable[[], str]:
    """Return a function that reads a line: with a prompt and line editing where a person types.

    Bytes that are no text come as Python's marks of them, and are refused with their line.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    if not sys.stdin.isatty():
        return input
    import readline  # noqa: F401 - `input` edits lines once it is imported

    def ask() -> str:
        with _default_interrupts():
            return input("> ")

    return ask


@contextmanager
def stopped_by_interrupts() -> Iterator[Stopping]:
    """Let the first Ctrl-C stop the answer that is being written, and a second one the program."""
    stopping = Stopping()

    def interrupted(*_: object) -> None:
        if stopping.asked():
            raise KeyboardInterrupt
        stopping.ask()

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        yield stopping
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _default_interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
