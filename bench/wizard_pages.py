"""The wizard's pages as pictures: the real engine is asked on the machine that draws them."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from textual.pilot import Pilot

from fluxtui.answers.answers import Answers, ModelSource
from fluxtui.answers.rows import StepName
from fluxtui.app import FluxApp
from fluxtui.wizard.screen import WizardScreen


@dataclass(frozen=True)
class Page:
    """One page of the wizard, as it is when the engine has answered and the keys were pressed."""

    step: StepName
    size: tuple[int, int] = (120, 40)
    keys: tuple[str, ...] = ()
    model: ModelSource = "demo"

    @property
    def name(self) -> str:
        """Of the file."""
        small = "" if self.size == (120, 40) else f"-{self.size[0]}x{self.size[1]}"
        return f"wizard-{self.step}{'' if self.model == 'demo' else '-images'}{small}"


PAGES = (
    Page("start"),
    Page("model"),
    Page("data"),
    Page("data", size=(80, 24)),
    Page("method", keys=("right", "right")),
    Page("method", size=(80, 24), keys=("right", "right")),
    Page("training", keys=("right", "right", "right", "right")),
    Page("training", size=(80, 24)),
    Page("strategy", keys=("right", "right", "down", "down", "down")),
    Page("strategy", size=(80, 24)),
    Page("launch", keys=("t",)),
    Page("data", model="images"),
)


async def draw_page(page: Page, runs: Path, folder: Path) -> Path:
    """Open the wizard at the page, let the engine answer, press the keys, save."""
    with tempfile.TemporaryDirectory() as scratch:
        draft = Path(scratch) / "draft.json"
        wizard = WizardScreen(Answers(step=page.step, model_source=page.model), runs, draft=draft)
        app = FluxApp(
            start_screen="wizard", sample_machine=False, make_wizard=lambda: wizard,
            runs_folder=runs,
        )  # fmt: skip
        async with app.run_test(size=page.size) as pilot:
            await _answered(wizard, pilot)
            for key in page.keys:
                await pilot.press(key)
            await _answered(wizard, pilot)
            path = folder / f"{page.name}.svg"
            path.write_text(app.export_screenshot(title="FluxTrain") + "\n")
    return path


async def _answered(wizard: WizardScreen, pilot: Pilot[None]) -> None:
    """Nothing is asked, and what was answered is drawn."""
    quiet = 0
    while quiet < 5:
        await pilot.pause(0.1)
        quiet = 0 if wizard.background.busy else quiet + 1
