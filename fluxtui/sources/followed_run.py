"""Follow one run in a thread, and post its news to the app."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from textual.app import App
from textual.message import Message

from fluxtrain.events.run_folder.run_dir import RunDir
from fluxtrain.events.trace.ring import RingReader
from fluxtui.sources.source import RunSource
from fluxtui.state.run import FoldedRun
from fluxtui.state.status import Link
from fluxtui.state.timeline import Timeline


@dataclass(frozen=True, slots=True)
class News:
    """The present state of a run; newer news replace older ones."""

    source: RunSource
    state: FoldedRun
    link: Link
    timeline: Timeline = field(default_factory=Timeline)


def follow(
    source: RunSource,
    say: Callable[[News], None],
    stop: threading.Event,
    period_s: Callable[[], float],
) -> None:
    """Fold events of `source` and `say` the result every `period_s()` at most, until `stop`.

    Runs in a thread of its own; the fold is pure, so the state may be read while the next is made.
    """
    state = FoldedRun()
    timeline = Timeline()
    ring = RingReader(RunDir(source.run_dir).timeline) if source.run_dir is not None else None
    said_s, heard_s = float("-inf"), time.monotonic()
    while not stop.is_set():
        batch = source.poll()
        state = (FoldedRun() if batch.restarted else state).after_all(batch.events)
        now_s = time.monotonic()
        heard_s = now_s if batch.events else heard_s
        if now_s - said_s >= period_s():
            said_s = now_s
            if ring is not None and ring.poll():
                timeline = Timeline(ring.exists, ring.steps)
            link = replace(batch.link, quiet_s=now_s - heard_s)
            say(News(source, state, link, timeline))
        if not batch.more:
            stop.wait(period_s())
    source.close()


class FollowedRun:
    """Follows `source` from `begin` on; `change_to` replaces the source.

    Args:
        app: gets a `FollowedRun.Updated` with each piece of news.
        group: names the worker threads.
        period_s: the time between two looks at the source.
        source: the run; None follows nothing.
    """

    class Updated(Message):
        """Posted with news of a followed run; newer news of the same follower replace waiting
        ones."""

        def __init__(self, follower: FollowedRun, news: News) -> None:
            super().__init__()
            self.follower = follower
            self.news = news

        @property
        def outdated(self) -> bool:
            """Return whether the news are of a source that is no longer followed."""
            return self.news.source is not self.follower.source

        def can_replace(self, message: Message) -> bool:
            return isinstance(message, FollowedRun.Updated) and message.follower is self.follower

    def __init__(
        self,
        app: App[Any],
        group: str,
        period_s: Callable[[], float],
        source: RunSource | None = None,
    ) -> None:
        self.source = source
        self._app, self._group, self._period_s = app, group, period_s
        self._stop = threading.Event()

    def begin(self) -> None:
        """Start to follow the source, if there is one."""
        source, stop = self.source, threading.Event()
        self._stop = stop
        if source is not None:
            self._app.run_worker(
                lambda: follow(source, self._say, stop, self._period_s),
                thread=True, exclusive=False, group=self._group, name=self._group,
            )  # fmt: skip

    def stop(self) -> None:
        """End the thread, but remember the source."""
        self._stop.set()

    def change_to(self, source: RunSource | None) -> None:
        """Follow another source from its beginning; None follows nothing."""
        self.stop()
        self.source = source
        self.begin()

    def _say(self, news: News) -> None:
        self._app.post_message(self.Updated(self, news))
