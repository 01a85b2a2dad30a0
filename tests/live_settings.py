"""Settings of a run on one card, made from counts."""

from __future__ import annotations

from dataclasses import replace

from fluxtrain.train.live.edit import with_count
from fluxtrain.train.live.live_run import LiveRun
from fluxtrain.train.live.settings import LiveSettings, SettingName

_COUNTS: tuple[SettingName, ...] = (
    "device_groups", "resident_blocks", "blocks_without_recompute",
)  # fmt: skip


def settings_with(run: LiveRun, **values: int) -> LiveSettings:
    """The settings as planned, but for these values, whether there is room or not."""
    settings = run.planned
    if "prefetch" in values:
        settings = replace(settings, slots=(values["prefetch"] + 1,) * run.cards)
    settings = replace(settings, chunk_rows=values.get("chunk_rows", settings.chunk_rows))
    for name in _COUNTS:
        if name in values:
            settings = with_count(run, settings, 0, name, values[name])
    return settings
