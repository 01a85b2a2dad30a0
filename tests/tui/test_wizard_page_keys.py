"""What a page of the wizard tells to press is what the user has bound."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from textual.content import Content

from fluxtrain.events.answers.answers import InspectionAnswer
from fluxtui.actions.key_map import rebound
from fluxtui.actions.table import ACTIONS
from fluxtui.answers.answers import DATA_FORMATS, Answers
from fluxtui.wizard.checks.answer_checks import Check
from fluxtui.wizard.engine.asked import Asked
from fluxtui.wizard.pages.data import data_page
from fluxtui.wizard.pages.hardware import hardware_page
from fluxtui.wizard.pages.launch import launch_page
from fluxtui.wizard.pages.method import method_page
from fluxtui.wizard.pages.preview import preview_page
from fluxtui.wizard.pages.strategy import strategy_page
from fluxtui.wizard.pages.wizard_view import WizardView
from tests.tui.wizard_pilot import INSPECTION, opened, planned, probed

OWN = {
    action.id: f"f{number}"
    for number, action in enumerate(ACTIONS, start=21)
    if action.in_wizard or action.in_lists
}
OWN_TEXTS = {action.id: action.key_text for action in rebound(OWN)}
REFUSED: Asked[object] = Asked(asked_s=0.0, refusal="no room", exit_code=4)
ON_DATA = Answers(step="data")
UNSURE = {"data": Check(error="line 1 can be read as text or alpaca: set data.format")}
PENDING: Asked[object] = Asked(asked_s=0.0)
PLANNED = Asked(value=planned())
TOO_LARGE = Asked(value=planned(device_bytes=2**31))
PROBED = Asked(value=probed())

Page = Callable[[WizardView, int], Content]


def explained(view: WizardView, width: int) -> Content:
    return strategy_page(view, width, why=True)


@pytest.mark.parametrize(
    ("page", "state", "told"),
    [
        (
            data_page,
            {"answers": ON_DATA, "checks": UNSURE},
            "{wizard_read_as} tries the next format",
        ),
        (method_page, {"plan": REFUSED}, "{wizard_back} changes model or data, {wizard_again}"),
        (hardware_page, {"probe": REFUSED}, "Press {wizard_again} to measure again, or"),
        (hardware_page, {"probe": REFUSED}, "or {wizard_next} to go on"),
        (hardware_page, {"probe": PENDING}, "{wizard_next} goes on meanwhile"),
        (hardware_page, {"probe": PROBED}, "{wizard_again} measures again"),
        (strategy_page, {"plan": REFUSED}, "Press {wizard_back} to change an answer"),
        (strategy_page, {"plan": REFUSED}, "{wizard_offload} for another offload setting"),
        (strategy_page, {"plan": TOO_LARGE}, "press {wizard_offload} for more offload, or"),
        (strategy_page, {"plan": PLANNED}, "{wizard_faster} {wizard_smaller} from fast to fit"),
        (strategy_page, {"plan": PLANNED}, "{wizard_batch} batch"),
        (strategy_page, {"plan": PLANNED}, "{wizard_chunk} chunk"),
        (strategy_page, {"plan": PLANNED}, "{wizard_steps} steps"),
        (strategy_page, {"plan": PLANNED}, "{wizard_offload} offload"),
        (strategy_page, {"plan": PLANNED}, "choose, {wizard_why} all reasons"),
        (explained, {"plan": PLANNED}, "{wizard_why} fewer"),
        (preview_page, {"plan": REFUSED}, "Press {wizard_back} to change an answer, or"),
        (preview_page, {"plan": PLANNED}, "{wizard_try} trains three real steps"),
        (preview_page, {"plan": PLANNED, "trial": PENDING}, "{wizard_back} ends it"),
        (preview_page, {"plan": PLANNED}, "{wizard_command} copies it"),
        (preview_page, {"plan": PLANNED}, "{wizard_yaml} copies it"),
        (launch_page, {"plan": PLANNED}, "{wizard_next} starts the training"),
    ],
)
def test_a_page_names_the_keys_that_the_user_has_bound(
    page: Page, state: dict[str, Asked[object]], told: str
) -> None:
    def text(**changes: object) -> str:
        view = WizardView(**{"answers": Answers(), **state}, **changes)  # type: ignore[arg-type]
        return " ".join(page(view, 120).plain.split())

    default = {action.id: action.key_text for action in ACTIONS}
    assert told.format(**default).lower() in text().lower()
    assert told.format(**OWN_TEXTS).lower() in text(key_texts=OWN_TEXTS).lower()


def test_two_keys_that_stand_together_are_told_as_the_footer_tells_them() -> None:
    assert WizardView().key("list_up", "list_down") == "↑↓"
    assert WizardView(key_texts=OWN_TEXTS).key("list_up", "list_down") == " ".join(
        OWN_TEXTS[name] for name in ("list_up", "list_down")
    )
    assert re.fullmatch(r"f\d+", WizardView(key_texts=OWN_TEXTS).key("wizard_next"))


async def test_a_key_reads_the_data_in_the_next_shape_and_back(tmp_path: Path) -> None:
    path = tmp_path / "both.jsonl"
    path.write_text('{"prompt": "how", "completion": "so", "text": "how so"}\n' * 4)
    async with opened(tmp_path, Answers(data_source="path", data_path=str(path))) as wizard:
        await wizard.go_to("data")
        seen = [wizard.screen.answers.data_format]
        for _ in DATA_FORMATS:
            await wizard.press("ctrl+r")
            await wizard.until(lambda: wizard.screen.checks["data"] is not None)
            seen.append(wizard.screen.answers.data_format)
        assert seen == [*DATA_FORMATS, "auto"]


def test_the_shape_of_data_on_the_hub_is_what_the_engine_says() -> None:
    answers = Answers(step="data", data_source="hub", data_hub="owner/name")
    found = Asked(value=msgspec.convert(INSPECTION, InspectionAnswer))
    view = WizardView(
        answers=answers, checks={"data": Check(facts=(("place", "the hub"),))}, inspection=found
    )
    for width in (76, 120):
        text = " ".join(data_page(view, width).plain.split())
        assert "format conversations (messages), because its first line" in text
        assert "keys that are left out: `id` (in 4 rows)" in text
