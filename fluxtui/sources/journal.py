"""Follows a run directory as it grows, with the trainer's own pipe if we started the trainer."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from fluxtrain.errors import native_end
from fluxtrain.events.events import AnyEvent, Done, Failed, Gauge, Hello
from fluxtrain.events.journal import tail_lines
from fluxtrain.events.printable import printable
from fluxtrain.events.reader import JournalFollower, PipeReader, SchemaTooNew
from fluxtrain.events.run_folder.run_dir import RunDir
from fluxtrain.files.atomic import read_json
from fluxtui.sources.source import EventBatch
from fluxtui.state.status import Link, Process

LIVENESS_PERIOD_S = 1.0
PROGRESS = re.compile(r"step \d+/\d+ ")  # the line of the trainer's log after each step
MANY_EVENTS = 500  # so many events in one poll mean that there are probably more


class JournalSource:
    """Facts from the journal, which has them all; samples from the pipe while it is open.

    The pipe brings samples more often than the journal keeps them. Facts are read from the journal
    alone, so none is counted twice and none is missed when the pipe drops frames.
    """

    def __init__(self, run_dir: Path | str, pipe: PipeReader | None = None) -> None:
        self._run = RunDir(run_dir)
        self._journal = JournalFollower(self._run.journal)
        self._pipe = pipe
        self._restarts = 0
        self._process: Process = "unknown"
        self._last_words = ""
        self._looked_s = float("-inf")
        self._was_there = False  # the folder
        self._ended = False  # the newest process said so itself

    @property
    def run_dir(self) -> Path | None:
        return self._run.path

    @property
    def controllable(self) -> bool:
        return True

    def poll(self) -> EventBatch:
        """Return new events; an unreadable journal raises nothing, the link has the reason."""
        problem: str | None = None
        events: list[AnyEvent] = []
        try:
            events = self._journal.poll()
        except SchemaTooNew as error:
            problem = printable(str(error))
        except OSError as error:
            problem = printable(f"{self._run.journal} cannot be read: {error.strerror or error}")
        there = os.path.isdir(self._run.path)
        if self._was_there and not there:
            problem = printable(f"its folder is gone: {self._run.path}")
        self._was_there = self._was_there or there
        restarted, self._restarts = self._journal.restarts > self._restarts, self._journal.restarts
        many = len(events) >= MANY_EVENTS
        for event in events:
            if isinstance(event, Hello):
                self._ended = False
            elif isinstance(event, Done | Failed):
                self._ended = True
        if self._pipe is not None and not self._pipe.closed:
            events = [event for event in events if not isinstance(event, Gauge)]
            events += [event for event in self._pipe.poll() if isinstance(event, Gauge)]
        self._look_after_the_process()
        return EventBatch(events, self._link(problem), restarted, many)

    def close(self) -> None:
        """Stop reading the pipe; the trainer continues."""
        if self._pipe is not None:
            self._pipe.close()

    def _link(self, problem: str | None) -> Link:
        return Link(
            run_dir=self._run.path,
            process=self._process,
            live=self._pipe is not None and not self._pipe.closed,
            corrupt_lines=self._journal.garbage_lines,
            problem=problem,
            last_words=self._last_words,
        )

    def _look_after_the_process(self) -> None:
        now_s = time.monotonic()
        if now_s - self._looked_s < LIVENESS_PERIOD_S:
            return
        self._looked_s = now_s
        try:
            state = self._run.liveness()
        except OSError:  # a folder that we may not look into tells nothing
            self._process = "unknown"
            return
        if state == "running":
            self._process = "alive"
        elif state == "waiting":  # no process has claimed it; ours closed its pipe when it ended
            ours_ended = self._pipe is not None and self._pipe.closed
            self._process = "dead" if ours_ended else "unknown"
        else:
            self._process = "dead"
        ended_silently = self._process == "dead" and not self._ended
        self._last_words = last_words(self._run) if ended_silently else ""


def last_words(run: RunDir) -> str:
    """Say why a run ended without an entry in its journal: error.json, or the log's last line."""
    message = (read_json(run.error) or {}).get("message")
    if message:
        return printable(str(message))
    lines = [printable(raw.decode("utf-8", "replace")).strip() for raw in tail_lines(run.log)]
    last = native_end(lines) or next(filter(None, lines), "")
    return "" if PROGRESS.match(last) else last  # a line of progress is no cause
