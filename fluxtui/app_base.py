"""The base of the app: settings, themes, the run that is followed, and the view of it.

Screens and actions know the app as `AppBase`; it knows none of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import RenderableType
from textual import on
from textual._compositor import ChopsUpdate
from textual.app import App
from textual.filter import LineFilter
from textual.message import Message
from textual.screen import Screen
from textual.signal import Signal

from fluxtrain.events.printable import printable
from fluxtrain.events.run_folder.process import boot_id
from fluxtrain.events.run_folder.run_dir import runs_root
from fluxtui.actions.action_screen import ActionScreen
from fluxtui.actions.key_map import rebound
from fluxtui.actions.table import RUN_SCREENS, Action
from fluxtui.settings import CHOICES, Settings, load_settings, save_settings
from fluxtui.sources.followed_run import FollowedRun
from fluxtui.sources.journal import JournalSource
from fluxtui.sources.source import RunSource
from fluxtui.state.machine_sample import MachineSample
from fluxtui.state.view import ChartSettings, ComparedRun, View
from fluxtui.terminal import TerminalDriver
from fluxtui.themes import (
    COLOURLESS_THEME,
    DEFAULT_THEME,
    GREYS,
    PLAIN,
    PLAIN_THEME,
    Colourless,
    Palette,
    ThemeFile,
    load_themes,
    theme_folders,
    wants_no_colour,
)
from fluxtui.widgets.screen_updates import PartsUpdate

if TYPE_CHECKING:
    from fluxtrain.events.run_folder.launch import TrainerProcess
    from fluxtui.sources.machine import MachineSampler

StartScreen = Literal["dashboard", "memory", "transfer", "loss", "log", "plan", "runs", "wizard"]
LOW_BANDWIDTH_HZ = 1.0
COMPARED_PERIOD_S = 2.0  # the compared run needs fewer updates


class AppBase(App[None]):
    """Settings, themes, the run that is followed, and the view of it that the screens draw.

    Args:
        source: the run to follow; None starts without one (the wizard, or the list of runs).
        start_screen: what is shown first.
        read_only: refuse everything that would change the run.
        low_bandwidth: draw once a second and in plain colours, whatever the settings say.
        theme_name: a theme of `themes/`; an unknown name falls back to the default and says so.
        settings_file: where the user's choices are kept; None keeps none.
        wall_clock: Unix time (tests give their own).
        sample_machine: show this machine's own load.
        make_wizard: builds the wizard's screen; by default the real one.
    """

    class MachineSampled(Message):
        """Posted with the machine's newest sample; it replaces an older one that still waits."""

        def __init__(self, sample: MachineSample) -> None:
            super().__init__()
            self.sample = sample

        def can_replace(self, message: Message) -> bool:
            return isinstance(message, AppBase.MachineSampled)

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
        super().__init__(driver_class=TerminalDriver)
        self.no_color = wants_no_colour()  # Textual would also take an empty NO_COLOR for one
        self._colourless = Colourless(self.no_color)
        self._settings_file = settings_file
        self.settings, self._skipped = (
            load_settings(settings_file) if settings_file else (Settings(), [])
        )
        self.actions: tuple[Action, ...] = rebound(self.settings.keys)
        kept = self.settings
        chart = ChartSettings(
            smooth=kept.smooth, log_scale=kept.log_scale, by_tokens=kept.by_tokens
        )
        own = {one.id: one.key_text for one in self.actions if one.id in kept.keys}
        self.view = View(read_only=read_only, chart=chart, key_texts=own)
        self.palette: Palette = PLAIN
        self.runs_folder = runs_folder or runs_root()
        self.trainer: TrainerProcess | None = None
        self.followed = FollowedRun(self, "follow", self.period_s, source)
        self._compared_with = FollowedRun(self, "compare", lambda: COMPARED_PERIOD_S)
        self._start_screen = start_screen
        self._theme_name = theme_name or self.settings.theme
        self._asked_for_low_bandwidth = low_bandwidth
        self._wall_clock = wall_clock
        self._samples_machine = sample_machine
        self._sampler: MachineSampler | None = None  # None makes one
        self._stop_sampling = threading.Event()
        self.machine_signal: Signal[MachineSample] = Signal(self, "machine")
        self.make_wizard = make_wizard
        self.engine: tuple[str, ...] = ()  # replaces the program that answers, in tests
        self.told_first = ""  # on the screen, once it is there
        self._keeps = True
        self.theme_files: dict[str, ThemeFile] = {}
        self._load_themes()

    def on_unmount(self) -> None:
        self.followed.stop()
        self._compared_with.stop()
        self._stop_sampling.set()

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Return Textual's filters, except that NO_COLOR removes colours instead of making them
        grey."""
        others = [one for one in super().get_line_filters() if not isinstance(one, GREYS)]
        return [*others, self._colourless] if self.no_color else others

    def _display(self, screen: Screen[Any], renderable: RenderableType | None) -> None:
        """Draw as Textual does, in fewer bytes."""
        if isinstance(renderable, ChopsUpdate):
            renderable = PartsUpdate.of(renderable)
        super()._display(screen, renderable)

    def _load_themes(self) -> None:
        """Load themes before the first style sheet is made, so that it is made only once."""
        self.theme_files, self._left_out = load_themes(theme_folders(self._settings_file))
        for theme in self.theme_files.values():
            self.register_theme(theme.theme)
        if self._theme_name not in self.theme_files:
            names = ", ".join(self.theme_files)
            self._left_out.append(f"there is no theme {self._theme_name!r}: {names}")
            self._theme_name = DEFAULT_THEME
        if self._theme_name in self.theme_files:
            self._set_colours()

    def tell_what_was_left_out(self) -> None:
        """Notify of settings and themes that could not be used, and of the run that was found."""
        if self.told_first:
            self.notify(self.told_first, title="Attached")
        for problem in self._skipped:
            self.notify(problem, title="Setting left out", severity="warning")
        for problem in self._left_out:
            self.notify(problem, title="Theme left out", severity="warning")

    def notify(self, message: str, *, title: str = "", **options: Any) -> None:
        """Notify as Textual does, but without markup and terminal codes, as the text is foreign."""
        options["markup"] = False
        super().notify(printable(message), title=printable(title), **options)

    @property
    def low_bandwidth(self) -> bool:
        """Return whether to send few bytes to the terminal, by command line or settings."""
        return self._asked_for_low_bandwidth or self.settings.low_bandwidth

    def period_s(self) -> float:
        """Return the time between two drawings."""
        return 1.0 / (LOW_BANDWIDTH_HZ if self.low_bandwidth else self.settings.refresh_hz)

    def use_colours(self) -> None:
        """Draw in the chosen theme, or in plain colours to save bytes."""
        self._set_colours()
        self.redraw()

    def _set_colours(self) -> None:
        name = self._theme_name
        for asked, instead in (
            (self.low_bandwidth, PLAIN_THEME), (self.no_color, COLOURLESS_THEME),
        ):  # fmt: skip
            name = instead if asked and instead in self.theme_files else name
        self.animation_level = "none" if self.low_bandwidth else "full"
        self.theme = name
        self.palette = self.theme_files[name].palette
        pictures = name != COLOURLESS_THEME and not (self.low_bandwidth or self.no_color)
        self.view = replace(self.view, pictures=pictures)

    @property
    def settings_file(self) -> Path | None:
        """Return the file of the settings; None keeps none."""
        return self._settings_file

    @property
    def run_dir(self) -> Path | None:
        """Return the directory of the followed run; None without one."""
        return self.followed.source.run_dir if self.followed.source else None

    def attach(self, source: RunSource) -> None:
        """Follow another run from its beginning, without a compared run."""
        self._compared_with.change_to(None)
        chart = replace(self.view.chart, last_step=None, crosshair=None, block=None)
        kept: Any = {"key_texts": self.view.key_texts, "pictures": self.view.pictures}
        self.view = View(read_only=self.view.read_only, chart=chart, **kept)
        self.followed.change_to(source)
        self.show_screen("dashboard")

    def attach_to(self, run_dir: Path) -> None:
        """Follow the run in `run_dir`; through its pipe if this app started it."""
        trainer = self.trainer
        own = trainer is not None and trainer.run_dir.path == run_dir.absolute()
        pipe = trainer.reader if own and trainer is not None and not trainer.reader.closed else None
        self.attach(JournalSource(run_dir, pipe))

    @on(FollowedRun.Updated)
    def take_news(self, message: FollowedRun.Updated) -> None:
        """Draw the news of a run, unless it was left meanwhile."""
        news = message.news
        if message.outdated:
            return
        if message.follower is self._compared_with:
            name = news.source.run_dir.name if news.source.run_dir else ""
            self.view = replace(self.view, compared=ComparedRun(name, news.state))
        else:
            self.view = replace(
                self.view,
                state=news.state,
                link=news.link,
                timeline=news.timeline,
                **self._clocks(),
            )
        self.redraw()

    def _clocks(self) -> dict[str, Any]:
        return {
            "wall_s": self._wall_clock(), "monotonic_s": time.monotonic(), "boot": boot_id(),
        }  # fmt: skip

    def compare_with(self, run_dir: Path | None) -> None:
        """Draw the curves of another run beside this one's; None draws this one alone."""
        self.view = replace(self.view, compared=None)
        self._compared_with.change_to(JournalSource(run_dir) if run_dir is not None else None)
        self.redraw()

    def look_at(self, chart: ChartSettings | None = None, **changes: Any) -> None:
        """Draw with other chart settings; smoothing and scale are kept for the next start."""
        chart = replace(chart or self.view.chart, **changes)
        self.view = replace(self.view, chart=chart)
        self._keep(smooth=chart.smooth, log_scale=chart.log_scale, by_tokens=chart.by_tokens)
        self.redraw()

    def watch_machine(self) -> None:
        """Sample this machine from now on, whether a run is followed or not."""
        if self._samples_machine:
            self.run_worker(
                self._sample_machine, thread=True, exclusive=False, group="machine", name="sampler"
            )

    def _sample_machine(self) -> None:
        from fluxtui.sources.machine import watch

        watch(self._say_machine, self._stop_sampling, self._trainer_pid, self._sampler)

    def _trainer_pid(self) -> int | None:
        hello = self.view.state.hello
        return hello.pid if hello is not None else None

    def _say_machine(self, sample: MachineSample) -> None:
        self.post_message(self.MachineSampled(sample))

    @on(MachineSampled)
    def take_machine(self, message: MachineSampled) -> None:
        """Keep the machine's newest sample and pass it to the screens that show it. It is drawn
        with the next news of the run, which come more often, also while the trainer is silent."""
        self.view = replace(self.view, machine_sample=message.sample, **self._clocks())
        self.machine_signal.publish(message.sample)

    def redraw(self) -> None:
        """Draw the present view on the run's screen in front, also behind a dialog."""
        for screen in reversed(self._screen_stack):
            if isinstance(screen, ActionScreen):
                screen.draw()
                return
            if not screen.is_modal:
                return  # it covers the screen below

    @property
    def place(self) -> str:
        """Return the front screen's name in the table of actions; "" if it has none."""
        return self.screen.place if isinstance(self.screen, ActionScreen) else ""

    @property
    def screen_name(self) -> str:
        """Return the name of the run's screen in front; "" if another screen is in front."""
        return self.place if self.place in RUN_SCREENS else ""

    def show_screen(self, name: str) -> None:
        """Bring a screen to the front in place of another one of the run."""
        if self.screen_name not in ("", name):
            target = self.get_screen(name)
            if isinstance(target, ActionScreen):
                target.come_from()
            self.switch_screen(name)

    def show_something(self) -> None:
        """Show the dashboard after the wizard, if that was the first screen."""
        if len(self.screen_stack) == 1:
            self.push_screen("dashboard")

    def next_theme(self) -> None:
        """Draw in the next theme in the order of names, and say its title."""
        self.turn_setting("theme", 1)
        said = self.theme_files[self._theme_name].title if self.theme_files else ""
        if self.low_bandwidth:
            said = f"{said}, once low bandwidth is off"
        if self.no_color:
            said = f"{said}, once NO_COLOR is not set"
        self.notify(said, title="Theme", timeout=2)

    def choose_theme(self, name: str) -> None:
        """Draw in this theme from now on."""
        self._theme_name = name
        self._keep(theme=name)
        self.use_colours()

    def turn_setting(self, name: str, by: int) -> None:
        """Give a setting its next or previous value, at once and for the next start."""
        value = getattr(self.settings, name)
        if name == "theme":
            value = self._theme_name
        new = CHOICES[name].turned(value, by, sorted(self.theme_files))
        if name == "theme":
            self.choose_theme(new)
            return
        self._keep(**{name: new})
        if name in ("smooth", "log_scale", "by_tokens"):
            self.view = replace(self.view, chart=replace(self.view.chart, **{name: new}))
        if name == "low_bandwidth":
            self._asked_for_low_bandwidth = False  # a choice now overrides the command line
        self.use_colours()

    def _keep(self, **changes: Any) -> None:
        """Remember a choice for the next start."""
        changed = replace(self.settings, **changes)
        file, differs = self._settings_file, changed != self.settings
        self.settings = changed
        if differs and file is not None and not save_settings(changed, file) and self._keeps:
            self._keeps = False  # said once
            self.notify(f"{file} cannot be written", title="Not kept", severity="warning")
