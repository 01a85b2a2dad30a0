"""The Textual application: it follows a run, draws it, and asks the trainer for things."""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from textual.app import App, SystemCommand
from textual.binding import BindingType
from textual.message import Message
from textual.screen import Screen

from fluxtrain.errors import FluxTrainError
from fluxtrain.telemetry.control import send_command
from fluxtrain.telemetry.launch import TrainerProcess
from fluxtrain.telemetry.rundir import RunDir, runs_root
from fluxtui.actions import ACTIONS, Action, bindings, rebound
from fluxtui.commands import palette_commands
from fluxtui.screens.charts import Dashboard, LossScreen, MemoryScreen, TransferScreen
from fluxtui.screens.dialogs import HelpScreen, StopDialog
from fluxtui.screens.log import LogScreen
from fluxtui.screens.panel_screen import PanelScreen
from fluxtui.screens.plan import PlanScreen
from fluxtui.screens.run_screen import RunScreen
from fluxtui.screens.runs import RunsScreen
from fluxtui.settings import Settings, load_settings, save_settings
from fluxtui.sources.following import News, follow
from fluxtui.sources.journal import JournalSource
from fluxtui.sources.machine import MachineSampler
from fluxtui.sources.source import RunSource
from fluxtui.state.view import ChartSettings, View
from fluxtui.tables import csv_of
from fluxtui.themes import DEFAULT_THEME, PLAIN, Palette, ThemeFile, load_themes

StartScreen = Literal["dashboard", "memory", "transfer", "loss", "log", "plan", "runs", "wizard"]
SCREENS: dict[str, type[RunScreen]] = {
    screen.NAME: screen
    for screen in (
        Dashboard,
        MemoryScreen,
        TransferScreen,
        LossScreen,
        LogScreen,
        PlanScreen,
        RunsScreen,
    )
}
REFRESH_HZ = 4.0
LOW_BANDWIDTH_HZ = 1.0


class FluxApp(App[None]):
    """Draws `source`. Leaving it never touches the training.

    Args:
        source: the run to follow; None starts without one (the wizard, or the list of runs).
        start_screen: what is shown first.
        read_only: refuse everything that would change the run.
        low_bandwidth: draw once a second.
        theme_name: a theme of `themes/`; an unknown name falls back to the default and says so.
        settings_file: where the user's choices are kept; None keeps none.
        wall_clock: Unix time (tests give their own).
        sample_machine: show this machine's own load.
        make_wizard: builds the wizard's screen; by default the real one.
    """

    TITLE = "FluxTrain"
    ENABLE_COMMAND_PALETTE = True
    BINDINGS: ClassVar[list[BindingType]] = [*bindings()]
    CSS = """
    RunScreen { background: $background; color: $foreground; }
    Toast { max-width: 70; }
    * {
        scrollbar-size-vertical: 1; scrollbar-background: $surface; scrollbar-color: $panel;
        scrollbar-color-hover: $primary; scrollbar-background-hover: $surface;
    }
    """

    class Updated(Message):
        """News from the follower; a newer one replaces one that still waits."""

        def __init__(self, news: News) -> None:
            super().__init__()
            self.news = news

        def can_replace(self, message: Message) -> bool:
            return isinstance(message, FluxApp.Updated)

    def __init__(
        self,
        source: RunSource | None = None,
        *,
        start_screen: StartScreen = "dashboard",
        read_only: bool = False,
        low_bandwidth: bool = False,
        theme_name: str | None = None,
        settings_file: Path | None = None,
        runs_folder: Path | None = None,
        wall_clock: Callable[[], float] = time.time,
        sample_machine: bool = True,
        make_wizard: Callable[[], Screen[Any]] | None = None,
    ) -> None:
        super().__init__()
        self._settings_file = settings_file
        self.settings, self._skipped = (
            load_settings(settings_file) if settings_file else (Settings(), [])
        )
        self.actions: tuple[Action, ...] = rebound(self.settings.keys)
        chart = ChartSettings(smooth=self.settings.smooth, log_scale=self.settings.log_scale)
        self.view = View(read_only=read_only, chart=chart)
        self.palette: Palette = PLAIN
        self.runs_folder = runs_folder or runs_root()
        self.trainer: TrainerProcess | None = None
        self._source = source
        self._start_screen = start_screen
        self._theme_name = theme_name or self.settings.theme
        slow = low_bandwidth or self.settings.low_bandwidth
        self._period_s = 1.0 / (LOW_BANDWIDTH_HZ if slow else REFRESH_HZ)
        self._wall_clock = wall_clock
        self._sampler = MachineSampler() if sample_machine else None
        self._make_wizard = make_wizard
        self._stop_following = threading.Event()
        self._themes: dict[str, ThemeFile] = {}

    # -- start and end

    def on_mount(self) -> None:
        self._load_themes()
        self.set_keymap(dict(self.settings.keys))
        for problem in self._skipped:
            self.notify(problem, title="Setting left out", severity="warning")
        for name, screen in SCREENS.items():
            self.install_screen(screen(), name)
        first = "dashboard" if self._start_screen == "wizard" else self._start_screen
        self.push_screen(first)
        if self._start_screen == "wizard":
            self.action_new_run()
        if self._source is not None:
            self._follow(self._source)

    def on_unmount(self) -> None:
        self._stop_following.set()

    def _load_themes(self) -> None:
        self._themes, problems = load_themes()
        for theme in self._themes.values():
            self.register_theme(theme.theme)
        if self._theme_name not in self._themes:
            problems.append(f"there is no theme {self._theme_name!r}: {', '.join(self._themes)}")
            self._theme_name = DEFAULT_THEME
        if self._theme_name in self._themes:
            self._set_theme(self._theme_name)
        for problem in problems:
            self.notify(problem, title="Theme left out", severity="warning")

    def _set_theme(self, name: str) -> None:
        self.theme = name
        self.palette = self._themes[name].palette
        self.redraw()

    # -- following a run

    @property
    def run_dir(self) -> Path | None:
        """The directory of the run that is followed; None without one."""
        return self._source.run_dir if self._source else None

    def attach(self, source: RunSource) -> None:
        """Follow another run from its beginning."""
        self._stop_following.set()
        self._source = source
        chart = replace(self.view.chart, last_step=None)
        self.view = View(read_only=self.view.read_only, chart=chart)
        self._follow(source)
        self.action_show("dashboard")

    def attach_to(self, run_dir: Path) -> None:
        """Follow the run in `run_dir`; through its pipe if this app started it."""
        trainer = self.trainer
        own = trainer is not None and trainer.run_dir.path == run_dir.absolute()
        pipe = trainer.reader if own and trainer is not None and not trainer.reader.closed else None
        self.attach(JournalSource(run_dir, pipe))

    def _follow(self, source: RunSource) -> None:
        stop = self._stop_following = threading.Event()
        self.run_worker(
            lambda: follow(source, self._say, stop, self._period_s, self._sampler),
            thread=True, exclusive=False, group="follow", name="follower",
        )  # fmt: skip

    def _say(self, news: News) -> None:
        self.post_message(self.Updated(news))

    def on_flux_app_updated(self, message: Updated) -> None:
        """Take the news and draw them, unless they are of a run that was left meanwhile."""
        news = message.news
        if news.source is not self._source:
            return
        self.view = replace(
            self.view,
            state=news.state,
            link=news.link,
            machine_sample=news.machine,
            wall_s=self._wall_clock(),
        )
        self.redraw()

    def redraw(self) -> None:
        """Draw the present view on the screen in front."""
        if self._screen_stack and isinstance(self.screen, RunScreen):
            self.screen.draw()

    # -- actions of the registry

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Keys of the registry do nothing while a dialog or the wizard is in front."""
        if action in _OWN_ACTIONS and not isinstance(self.screen, RunScreen):
            return False
        return super().check_action(action, parameters)

    def action_show(self, name: str) -> None:
        """Bring a screen to the front."""
        if isinstance(self.screen, RunScreen) and name != self.screen.NAME:
            self.switch_screen(name)

    def action_detach(self) -> None:
        """Leave; the trainer is a process of its own and goes on."""
        self.exit()

    def action_pause(self) -> None:
        """Pause, or go on when paused."""
        self.action_command("resume" if self.view.status.kind == "paused" else "pause")

    def action_stop(self) -> None:
        """Ask, then stop the run after a checkpoint."""
        if self._may_command("stop"):
            self.push_screen(StopDialog(), self._stop_if)

    def _stop_if(self, stop: bool | None) -> None:
        if stop:
            self.action_command("stop")

    def action_command(self, command: str) -> None:
        """Send a command to the trainer without blocking; its answer is shown."""
        if not self._may_command(command) or self.run_dir is None:
            return
        socket = RunDir(self.run_dir).socket
        self.run_worker(
            lambda: self._ask(socket, command), thread=True, exclusive=False, group="commands"
        )

    def _may_command(self, command: str) -> bool:
        reason = None
        if self._source is None:
            reason = "no run is attached"
        elif self.view.read_only:
            reason = "this view is read-only"
        elif not self._source.controllable:
            reason = "this is a recording"
        elif self.view.status.ended:
            reason = f"the run has ended ({self.view.status.word.lower()})"
        if reason is not None:
            self.notify(reason, title=f"Cannot {command}", severity="warning")
        return reason is None

    def _ask(self, socket: Path, command: str) -> None:
        try:
            answer = send_command(socket, command)
        except FluxTrainError as error:
            self.call_from_thread(self.notify, str(error), title=command, severity="error")
            return
        severity: Literal["information", "warning"] = "information" if answer.ok else "warning"
        self.call_from_thread(self.notify, answer.message, title=command, severity=severity)

    def action_new_run(self) -> None:
        """The wizard; what it launches is attached."""
        if self._make_wizard is None:
            from fluxtui.wizard.screen import WizardScreen

            self._make_wizard = WizardScreen
        self.push_screen(self._make_wizard(), self._launched)

    def _launched(self, launch: Any) -> None:
        if launch is None:
            if self._source is None:
                self.exit()  # there is nothing behind the wizard to go back to
            return
        from fluxtui.wizard.launching import begin

        try:
            self.trainer = begin(launch)
        except FluxTrainError as error:
            self.notify(str(error), title="The run was not started", severity="error")
            return
        self.attach_to(self.trainer.run_dir.path)

    def action_smooth(self) -> None:
        """Moving average on or off."""
        self._change_chart(smooth=not self.view.chart.smooth)

    def action_log_scale(self) -> None:
        """Logarithmic loss axis on or off."""
        self._change_chart(log_scale=not self.view.chart.log_scale)

    def action_zoom(self, factor: float) -> None:
        """A smaller or larger share of the steps, between all and 1/64."""
        self._change_chart(zoom=max(1 / 64, min(1.0, self.view.chart.zoom * factor)))

    def action_look(self, steps: int) -> None:
        """Older or newer ones of the last steps."""
        self._change_chart(last_step=self.view.looked_at(steps))

    def _change_chart(self, **changes: Any) -> None:
        self.view = replace(self.view, chart=replace(self.view.chart, **changes))
        chart = self.view.chart
        self._keep(smooth=chart.smooth, log_scale=chart.log_scale)
        self.redraw()

    def _keep(self, **changes: Any) -> None:
        """Remember a choice for the next start."""
        changed = replace(self.settings, **changes)
        if changed != self.settings and self._settings_file is not None:
            save_settings(changed, self._settings_file)
        self.settings = changed

    def action_maximise(self) -> None:
        """The focused panel in full, or back."""
        if isinstance(self.screen, PanelScreen):
            self.screen.toggle_maximised()

    def action_filter(self) -> None:
        """Filter the log."""
        if isinstance(self.screen, LogScreen):
            self.screen.open_filter()

    def action_follow(self) -> None:
        """Follow the log's end, or not."""
        if isinstance(self.screen, LogScreen):
            self.screen.toggle_following()

    def action_next_theme(self) -> None:
        """The next theme in the order of names."""
        names = sorted(self._themes)
        if names:
            at = names.index(self.theme) if self.theme in names else -1
            self._choose_theme(names[(at + 1) % len(names)])
            self.notify(self._themes[self.theme].title, title="Theme", timeout=2)

    def _choose_theme(self, name: str) -> None:
        self._set_theme(name)
        self._keep(theme=name)

    def action_help(self) -> None:
        """Keys and panels."""
        self.push_screen(HelpScreen())

    def action_copy(self) -> None:
        """To the terminal's clipboard (OSC 52: it works over SSH too)."""
        text = self.screen.newest if isinstance(self.screen, LogScreen) else ""
        if not text and self.run_dir is not None:
            text = f"fluxtrain-tui --attach {shlex.quote(str(self.run_dir))}"
        if text:
            self.copy_to_clipboard(text)
            self.notify(text, title="Copied", markup=False)

    def action_table(self) -> None:
        """Save the numbers behind the screen as CSV where the app was started."""
        name = self.screen.NAME if isinstance(self.screen, RunScreen) else ""
        run_id = self.view.state.hello.run_id if self.view.state.hello else "run"
        path = Path(f"{Path(run_id).name}-{name}.csv")
        try:
            path.write_text(csv_of(name, self.view.state), "utf-8")
        except OSError as error:
            self.notify(str(error), title="Not saved", severity="error")
        else:
            self.notify(str(path), title="Saved")

    def action_export(self) -> None:
        """Save the screen as SVG where the app was started."""
        try:
            path = self.save_screenshot(path=".")
        except OSError as error:
            self.notify(str(error), title="Not saved", severity="error")
        else:
            self.notify(path, title="Saved")

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """The palette: the registry, and each theme by its title."""
        name = screen.NAME if isinstance(screen, RunScreen) else ""
        run = partial(self.call_later, self.run_action)
        return palette_commands(self.actions, name, self._themes, run, self._choose_theme)


_OWN_ACTIONS = frozenset(action.do.split("(")[0] for action in ACTIONS)
