"""The base of all answers."""

from __future__ import annotations

from typing import ClassVar

import msgspec


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The one JSON object that a command prints with `--json`."""

    COMMAND: ClassVar[str]  # as a user types it after `fluxtrain`
