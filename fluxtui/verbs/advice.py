"""Apply a piece of advice to the running training, and take a change back."""

from __future__ import annotations

from dataclasses import replace

from fluxtui.state.changes import ranked
from fluxtui.verbs.run import RunVerbs


class AdviceVerbs(RunVerbs):
    """Actions on advice; what they ask for is made by the trainer between two steps."""

    def action_select_advice(self, by: int) -> None:
        """The next piece of advice, the best first."""
        held = ranked(self.view.state.advice)
        if held:
            at = max(0, min(len(held) - 1, self.view.advice_at + by))
            self.view = replace(self.view, advice_at=at)
            self.redraw()

    def action_apply_advice(self) -> None:
        """The selected piece on the plan screen, the best live one elsewhere."""
        if not self._may_command("apply"):
            return
        held = ranked(self.view.state.advice)
        chosen = held[: self.view.advice_at + 1][-1:]
        if getattr(self.screen, "NAME", "") != "plan":
            chosen = [given for given in held if given.apply][:1] or held[:1]
        if not chosen:
            self.notify("there is no advice now", title="Cannot apply", severity="warning")
        elif not chosen[0].apply:
            text = f"not while it trains; for the next run: {chosen[0].how}"
            self.notify(text, title="Cannot apply", severity="warning")
        else:
            self.send("apply", {"advice": chosen[0].id})

    def action_undo_change(self) -> None:
        """Take back the newest change."""
        self.send("undo")
