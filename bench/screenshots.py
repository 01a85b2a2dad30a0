"""Draw screenshots/*.svg from recorded runs, and the wizard of this machine: `make screenshots`.

The app replays a journal that a real run wrote, up to a moment, and what it shows is saved. There
are no made numbers: what the recording lacks is "-" in the picture.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from wizard_pages import PAGES, draw_page

from fluxtrain.events.reader import JournalFollower
from fluxtui.app import FluxApp
from fluxtui.app_base import StartScreen
from fluxtui.sources.replay import ReplaySource

ROOT = Path(__file__).parent.parent
RECORDED = ROOT / "tests" / "tui" / "recorded"
FOLDER = ROOT / "screenshots"
RUNS = Path("/tmp/fluxtrain/runs")  # the recorded runs for the list of runs, dated as they ended
COMPARED = ("v", "down", "down", "down", "down", "enter", "left", "H", "H")


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
    Picture("memory", run="blocks", screen="memory", keys=("right", "right")),
    Picture("memory-80x24", run="blocks", screen="memory", size=(80, 24), keys=("right",)),
    Picture("transfer", run="streamed", screen="transfer", until_share=None, keys=("left",) * 5),
    Picture("loss", screen="loss", until_share=None, keys=("left", "H", "H", "H")),
    Picture("loss-compared", run="blocks", screen="loss", until_share=None, keys=COMPARED),
    Picture("loss-80x24", screen="loss", size=(80, 24), keys=("left", "H")),
    Picture("log", screen="log", until_share=None),
    Picture("log-searched", screen="log", until_share=None, keys=("slash", *"loss", "enter")),
    Picture("runs", screen="runs", until_share=None, keys=("down", "down")),
    Picture("settings", keys=("S", "down")),
    Picture("plan", run="advised", screen="plan", until_share=0.62),
    Picture("advice", run="advised", until_share=0.42),
    Picture("gpu-dashboard", run="h200", until_share=0.97),
    Picture("gpu-dashboard-80x24", run="h200", size=(80, 24), until_share=0.97),
    Picture("gpu-memory", run="h200", screen="memory", until_share=0.97),
    Picture("gpu-transfer", run="h200", screen="transfer", until_share=0.97),
    Picture("cards", run="h200-cards", until_share=0.9),
    Picture("cards-80x24", run="h200-cards", size=(80, 24), until_share=0.9),
    Picture("cards-memory", run="h200-cards", screen="memory", until_share=0.9),
    Picture(
        "cards-transfer", run="h200-cards", screen="transfer", until_share=0.9, keys=("left",) * 3
    ),
    Picture("samples", run="images", screen="loss", until_share=None),
    Picture("help", keys=("question_mark",)),
)


async def draw(picture: Picture) -> Path:
    """Replay, draw, save."""
    journal = RUNS / picture.run / "events.ndjson"
    source = ReplaySource(journal, speed=None, until_share=picture.until_share)
    app = FluxApp(
        source, start_screen=picture.screen, theme_name=picture.theme, sample_machine=False,
        runs_folder=RUNS, wall_clock=newest_s,
    )  # fmt: skip
    async with app.run_test(size=picture.size) as pilot:
        while not source.over or app.view.state.hello is None:
            await pilot.pause(0.05)
        for key in picture.keys:
            await pilot.press(key)
            await pilot.pause(0.15)  # a list that is chosen from has to be read first
        await pilot.pause(0.6)  # two updates: the layout of the first may still move
        path = FOLDER / f"{picture.name}.svg"
        path.write_text(app.export_screenshot(title="FluxTrain") + "\n")
    return path


def newest_s() -> float:
    """A minute after the newest of the recorded runs: what the pictures call now."""
    return max(journal.stat().st_mtime for journal in RUNS.glob("*/events.ndjson")) + 60.0


def lay_out() -> None:
    """The recorded runs where their journals say they were, each dated by its last event.

    Raises SystemExit where others are there: the folder is deleted afterwards.
    """
    others = {run.name for run in RUNS.glob("*")} - {run.name for run in RECORDED.iterdir()}
    if others:
        raise SystemExit(f"{RUNS} holds {', '.join(sorted(others))}: move that away first")
    shutil.rmtree(RUNS, ignore_errors=True)
    shutil.copytree(RECORDED, RUNS, ignore=shutil.ignore_patterns("*.md"))
    for journal in RUNS.glob("*/events.ndjson"):
        last_s = JournalFollower(journal).read_all()[-1].wall_s
        os.utime(journal, (last_s, last_s))


def main() -> None:
    """Draw all of them."""
    os.environ["TZ"] = "UTC"
    time.tzset()
    os.environ["FLUXTRAIN_RUNS"] = str(RUNS)
    os.environ["PATH"] = (
        f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # as in an activated one
    )
    FOLDER.mkdir(exist_ok=True)
    lay_out()
    try:
        for picture in PICTURES:
            print(asyncio.run(draw(picture)).relative_to(ROOT))
        for page in PAGES:
            print(asyncio.run(draw_page(page, RUNS, FOLDER)).relative_to(ROOT))
    finally:
        shutil.rmtree(RUNS)


if __name__ == "__main__":
    main()
