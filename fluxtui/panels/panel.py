"""What a panel is: a title and pure functions from a view and a size to lines."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from fluxtrain.units import UNKNOWN, duration_text
from fluxtui.actions.table import find
from fluxtui.state.view import ChartSettings, View
from fluxtui.widgets.spans import Line

Body = Callable[[View, int, int], list[Line]]  # view, width, height -> at most `height` lines
# view, width, height, and the click's place -> the chart settings from then on
Pick = Callable[[View, int, int, int, int], ChartSettings | None]
Shows = Callable[[View], tuple[object, ...]]  # what the panel draws, compared by identity
Heading = Callable[[View, int], Line]  # view, width -> the text in the frame after the title


def no_heading(view: View, width: int) -> Line:
    """Return no heading, for panels whose title says enough."""
    return ()


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. Adding one is a file with a `PANEL` and a line in the registry."""

    id: str
    title: str
    body: Body
    heading: Heading = no_heading
    about: str = ""  # for the help screen
    title_off_gpu: str = ""  # where it differs, for a run on the processor alone
    pick: Pick | None = None  # what a click does
    shows: Shows | None = None  # an expensive panel is drawn again only if one of these changed

    def title_in(self, view: View) -> str:
        """Return the title in the words of the machine that runs."""
        return self.title if view.on_gpu else self.title_off_gpu or self.title


def key_of(view: View, action: str) -> str:
    """Return an action's key as a person reads it, the user's own if set."""
    return view.key_texts.get(action) or find(action).key_text


def pair(label: str, value: str, role: str = "strong") -> Line:
    """Draw a quiet label and its value; an unknown value is quiet too."""
    return ((f"{label} ", "dim"), (value, "dim" if value == UNKNOWN else role))


def stale_note(age_s: float | None) -> Line:
    """Explain values drawn as "-": the age of the newest sample; "" if no sample ever came."""
    return () if age_s is None else ((f"last sample {whole_text(age_s)} ago", "warn"),)


def time_left_s(eta_s: float, since_s: float, steps_left: int) -> float:
    """Return the rest of an estimate made `since_s` ago.

    It is counted down by one step at most, because the other steps still have to run, even if this
    one is held up (an evaluation, a checkpoint).
    """
    others_s = eta_s * max(0, steps_left - 1) / max(1, steps_left)
    return max(0.0, others_s, eta_s - since_s)


def share_text(share: float | None) -> str:
    """Write a share of one as a percentage, with a decimal below 100 %."""
    if share is None or not math.isfinite(share * 100):
        return UNKNOWN
    return f"{share * 100:.{int(abs(share) < 0.9995)}f}%"


def whole_share(share: float | None) -> str:
    """Write a share of one in whole percent, for values that change while they are read."""
    if share is None or not math.isfinite(share * 100):
        return UNKNOWN
    return f"{share * 100:.0f}%"


def gain_text(share: float) -> str:
    """Write a gain as a signed percentage."""
    return f"{share:+.1%}" if math.isfinite(share * 100) else UNKNOWN


def whole_text(seconds: float | None) -> str:
    """Write a duration in whole seconds, for values that change while they are read."""
    if seconds is None or not 0 <= seconds < math.inf:
        return UNKNOWN
    return f"{round(seconds)} s" if seconds < 59.5 else duration_text(seconds)
