"""A screen that has a name in the table of actions, and runs actions where they belong."""

from __future__ import annotations

from textual.dom import DOMNode
from textual.screen import Screen, ScreenResultType


class ActionScreen(Screen[ScreenResultType]):
    """Base of the run's screens and of the wizard."""

    @property
    def place(self) -> str:
        """Return the screen's name in the table of actions, such as `loss` or `wizard.model`."""
        raise NotImplementedError

    @property
    def holders(self) -> tuple[DOMNode, ...]:
        """Return the nodes that may have an action's method; the first one that has it runs it."""
        return (self, self.app)

    async def do(self, action: str) -> None:
        """Run an action of the table, as its key does."""
        method = f"action_{action.split('(', maxsplit=1)[0]}"
        holder = next(one for one in self.holders if hasattr(one, method))
        await self.app.run_action(action, holder)

    def come_from(self) -> None:
        """Note that the user comes from another screen of the run."""

    def draw(self) -> None:
        """Draw the app's view of the run; nothing on a screen without a run."""
