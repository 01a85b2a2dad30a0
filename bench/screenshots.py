"""Draw screenshots/*.svg from recorded runs: `make screenshots`.

The app replays a journal that a real run wrote, up to a moment, and what it shows is saved. There
are no made numbers: what the recording lacks is "-" in the picture.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path

from fluxtui.app import FluxApp
from fluxtui.shell import StartScreen
from fluxtui.sources.replay import ReplaySource

ROOT = Path(__file__).parent.parent
RECORDED = ROOT / "tests" / "tui" / "recorded"
FOLDER = ROOT / "screenshots"


@dataclass(frozen=True)
class Picture:
    """One screenshot: which run, which screen, how large, and when in the run (None is its end)."""

    name: str
    run: str = "demo"
    screen: StartScreen = "dashboard"
    size: tuple[int, int] = (120, 40)
    until_share: float | None = 0.66
    theme: str = "flux-dark"
    keys: tuple[str, ...] = ()


PICTURES = (
    Picture("dashboard-120x40"),
    Picture("dashboard-80x24", size=(80, 24)),
    Picture("dashboard-200x60", size=(200, 60)),
    Picture("dashboard-light", theme="flux-light"),
    Picture("dashboard-sixteen", theme="sixteen"),
    Picture("dashboard-high-contrast", size=(80, 24), theme="high-contrast"),
    Picture("dashboard-finished", until_share=None),
    Picture("dashboard-failed", run="diverged", until_share=None),
    Picture("dashboard-resumed", run="resumed", until_share=None),
    Picture("memory", screen="memory"),
    Picture("transfer", run="streamed", screen="transfer", until_share=None, keys=("left",) * 5),
    Picture("loss", screen="loss"),
    Picture("log", screen="log", until_share=None),
    Picture("plan", run="changed", screen="plan", until_share=0.52),
    Picture("advice", run="changed", until_share=0.29),
    Picture("gpu-dashboard", run="h200", until_share=0.35),
    Picture("gpu-dashboard-80x24", run="h200", size=(80, 24), until_share=0.35),
    Picture("gpu-memory", run="h200", screen="memory", until_share=0.35),
    Picture("gpu-transfer", run="h200", screen="transfer", until_share=0.35),
    Picture("help", keys=("question_mark",)),
)


async def draw(picture: Picture) -> Path:
    """Replay, draw, save."""
    journal = RECORDED / picture.run / "events.ndjson"
    source = ReplaySource(journal, speed=None, until_share=picture.until_share)
    app = FluxApp(
        source, start_screen=picture.screen, theme_name=picture.theme, sample_machine=False
    )
    async with app.run_test(size=picture.size) as pilot:
        while not source.over or app.view.state.hello is None:
            await pilot.pause(0.05)
        await pilot.press(*picture.keys)
        await pilot.pause(0.6)  # two updates: the layout of the first may still move
        path = FOLDER / f"{picture.name}.svg"
        path.write_text(app.export_screenshot(title="FluxTrain") + "\n")
    return path


def main() -> None:
    """Draw all of them."""
    os.environ["TZ"] = "UTC"
    time.tzset()
    FOLDER.mkdir(exist_ok=True)
    for picture in PICTURES:
        print(asyncio.run(draw(picture)).relative_to(ROOT))


if __name__ == "__main__":
    main()
