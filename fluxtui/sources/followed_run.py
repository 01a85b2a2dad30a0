"""Follow one run in a thread, and post its news to the app."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from textual.app import App
from textual.message import Message

from fluxtui.sources.following import News, follow
from fluxtui.sources.source import RunSource


class FollowedRun:
    """Follows `source` from `begin` on; `change_to` replaces the source.

    Args:
        app: gets a `FollowedRun.Updated` with each piece of news.
        group: names the worker threads.
        period_s: the time between two looks at the source.
        source: the run; None follows nothing.
    """

    class Updated(Message):
        """News of a followed run; newer news of the same follower replace waiting ones."""

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
