"""The table of all actions, from which key map, footer, help and palette are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Group = Literal[
    "Screens", "Run", "Runs", "Chart", "View", "App", "Lists", "Chat", "Wizard"
]  # fmt: skip
GROUPS: tuple[Group, ...] = (
    "Screens", "Run", "Runs", "Chart", "View", "App", "Lists", "Chat", "Wizard",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Action:
    """`keys` as Textual names them, the first one shown; `do` is the action's string."""

    id: str
    keys: str
    label: str  # for the footer: one word
    about: str  # for help and palette: a sentence
    group: Group
    do: str
    screens: tuple[str, ...] = ()  # screens where it works; empty is everywhere
    rank: int = 0  # in the footer, higher stays longer when room is short; 0 is not in the footer
    changes_run: bool = False  # asks the trainer for something: off when viewing read-only
    name: str = ""  # for the palette: a few words

    @property
    def key_text(self) -> str:
        """Return the first key as a person reads it."""
        key = self.keys.split(",")[0]
        return KEY_TEXTS.get(key, key.replace("ctrl+", "^"))

    @property
    def all_keys_text(self) -> str:
        """Return all its keys."""
        return " ".join(
            KEY_TEXTS.get(key, key.replace("ctrl+", "^")) for key in self.keys.split(",")
        )

    @property
    def in_lists(self) -> bool:
        """Return whether the action belongs to the focused list; the palette then leaves it out."""
        return self.group == "Lists"

    @property
    def in_wizard(self) -> bool:
        """Return whether the action belongs to a page of the wizard."""
        return self.group == "Wizard"

    @property
    def where(self) -> frozenset[str]:
        """Return the screens and the wizard's pages where the action works."""
        if self.screens:
            return frozenset(self.screens)
        return frozenset(RUN_SCREENS + ((*PAGES, "chat") if self.id in IN_WIZARD_TOO else ()))

    def works_on(self, screen: str) -> bool:
        """Return whether the action works on this screen, or without a screen on any."""
        return (screen in self.where) if screen else not self.screens


KEY_TEXTS = {
    "question_mark": "?", "slash": "/", "left_square_bracket": "[", "right_square_bracket": "]",
    "colon": ":", "comma": ",", "full_stop": ".", "ctrl+p": "^p", "ctrl+r": "^r", "enter": "enter",
    "left": "←", "right": "→", "shift+left": "⇧←", "shift+right": "⇧→", "escape": "esc",
    "up": "↑", "down": "↓", "pageup": "pgup", "pagedown": "pgdn",
    "backspace": "bksp",
}  # fmt: skip
RUN_SCREENS = ("dashboard", "memory", "transfer", "loss", "log", "plan", "runs", "settings")
PAGES = tuple(
    f"wizard.{page}"
    for page in (
        "start", "model", "data", "method", "training", "strategy", "launch",
    )
)  # fmt: skip
EVERYWHERE = ("suspend",)  # before dialogs and fields too
IN_WIZARD_TOO = ("help", "palette", *EVERYWHERE)
LISTS = ("log", "plan", "runs", "settings")
STRATEGY = ("wizard.strategy",)
METHOD = ("wizard.method",)
TRAINING = ("wizard.training",)
WITH_PATHS = ("wizard.start", "wizard.model", "wizard.data", *TRAINING)
AT_THE_END = ("wizard.launch",)
CHARTS = ("dashboard", "loss")
PANEL_SCREENS = ("dashboard", "memory", "transfer", "loss")

ACTIONS: tuple[Action, ...] = (
    Action("show_dashboard", "1", "Dash", "The whole run at a glance", "Screens",
           "show('dashboard')", rank=90, name="Dashboard"),
    Action("show_memory", "2", "Mem", "Memory over time, by category and by block", "Screens",
           "show('memory')", rank=84, name="Memory"),
    Action("show_transfer", "3", "I/O", "Transfers over time, stalls, the last steps", "Screens",
           "show('transfer')", rank=83, name="Transfers"),
    Action("show_loss", "4", "Loss", "The loss chart in full", "Screens", "show('loss')", rank=89,
           name="Loss"),
    Action("show_log", "5", "Log", "Everything that happened, with filter", "Screens",
           "show('log')", rank=88, name="Log"),
    Action("show_plan", "6", "Plan", "Every choice with its reason, and advice", "Screens",
           "show('plan')", rank=87, name="Plan and advice"),
    Action("show_runs", "7", "Runs", "All runs of this folder; attach to one", "Screens",
           "show('runs')", rank=86, name="Runs"),
    Action("settings", "S", "settings", "Theme, refresh rate, low bandwidth, keys", "Screens",
           "show('settings')", rank=12, name="Settings"),
    Action("pause", "p", "pause", "Pause the run, or go on with it", "Run", "pause",
           rank=70, changes_run=True, name="Pause or go on"),
    Action("checkpoint", "c", "checkpoint", "Write a checkpoint after this step", "Run",
           "command('checkpoint')", rank=60, changes_run=True, name="Write a checkpoint"),
    Action("stop", "Q", "stop", "Stop the run after a checkpoint (asks first)", "Run",
           "stop", rank=65, changes_run=True, name="Stop"),
    Action("apply_advice", "a", "apply", "Apply the best, on the plan screen the selected advice",
           "Run", "apply_advice", ("dashboard", "plan"), rank=59, changes_run=True,
           name="Apply the advice"),
    Action("undo_change", "u", "undo", "Take back the newest change of the running training", "Run",
           "undo_change", ("dashboard", "plan"), rank=32, changes_run=True, name="Undo the change"),
    Action("previous_advice", "left,h", "advice", "The previous advice, with a larger gain", "Run",
           "select_advice(-1)", ("plan",), rank=57, name="Advice before"),
    Action("next_advice", "right,l", "advice", "The next piece of advice", "Run",
           "select_advice(1)", ("plan",), name="Next advice"),
    Action("new_run", "n", "new", "Set up a new run with the wizard", "Run", "new_run", rank=20,
           name="New run"),
    Action("chat", "C", "chat", "Talk with a run's model, or its checkpoint's", "Run",
           "use_model('chat')", rank=13, name="Chat with the model"),
    Action("evaluate", "V", "evaluate", "Compute the loss of a run's model on held-out data", "Run",
           "use_model('evaluate')", name="Evaluate the model"),
    Action("export_model", "m", "export", "Export a run's adapter, or merge it into its base",
           "Run", "use_model('export')", rank=11, name="Export or merge"),
    Action("smooth", "e", "ema", "Show or hide the moving average", "Chart", "smooth", CHARTS,
           rank=35, name="Moving average"),
    Action("log_scale", "y", "log", "Logarithmic or linear loss axis", "Chart", "log_scale",
           CHARTS, rank=34, name="Logarithmic axis"),
    Action("zoom_in", "right_square_bracket", "zoom", "Show fewer, newer steps", "Chart",
           "zoom(0.5)", CHARTS, rank=33, name="Zoom in"),
    Action("zoom_out", "left_square_bracket", "wider", "Show more steps", "Chart", "zoom(2.0)",
           CHARTS, name="Zoom out"),
    Action("crosshair_back", "left,h", "crosshair", "Crosshair to earlier steps (shift: further)",
           "Chart", "crosshair(-1)", ("loss",), rank=74, name="Crosshair back"),
    Action("crosshair_on", "right,l", "crosshair", "Crosshair to later steps (shift: further)",
           "Chart", "crosshair(1)", ("loss",), name="Crosshair on"),
    Action("crosshair_far_back", "shift+left,H", "crosshair", "Crosshair a tenth back", "Chart",
           "crosshair(-10)", ("loss",), name="Crosshair far back"),
    Action("crosshair_far_on", "shift+right,L", "crosshair", "Crosshair a tenth on", "Chart",
           "crosshair(10)", ("loss",), name="Crosshair far on"),
    Action("crosshair_off", "escape", "hide", "Hide the crosshair", "Chart", "crosshair(0)",
           ("loss",), name="Hide the crosshair"),
    Action("block_before", "left,h", "block", "The block before (shift: eight further)", "Chart",
           "block(-1)", ("memory",), rank=74, name="Block before"),
    Action("block_after", "right,l", "block", "The next block", "Chart", "block(1)", ("memory",),
           name="Next block"),
    Action("block_far_before", "shift+left,H", "block", "Eight blocks back", "Chart", "block(-8)",
           ("memory",), name="Eight blocks back"),
    Action("block_far_after", "shift+right,L", "block", "Eight blocks on", "Chart", "block(8)",
           ("memory",), name="Eight blocks on"),
    Action("by_tokens", "b", "tokens", "Steps or trained tokens on the x axis", "Chart",
           "by_tokens", ("loss",), rank=58, name="Steps or tokens"),
    Action("compare", "v", "compare", "Compare with another run, or with none", "Chart",
           "compare", ("loss",), rank=73, name="Compare"),
    Action("resume_run", "r", "resume", "Go on with the selected run (asks first)", "Runs",
           "resume_run", ("runs",), rank=75, changes_run=True, name="Resume"),
    Action("compare_run", "v", "compare", "Draw the selected run beside the one on screen", "Runs",
           "compare_run", ("runs",), rank=74, name="Compare with it"),
    Action("clone_run", "e", "clone", "The wizard, filled with the selected run's settings", "Runs",
           "clone_run", ("runs",), rank=73, name="Clone"),
    Action("delete_run", "D,delete", "delete", "Delete the selected run (asks, with its size)",
           "Runs", "delete_run", ("runs",), rank=71, name="Delete"),
    Action("filter_runs", "slash", "filter", "Show runs with these words; !word leaves out",
           "Runs", "filter_runs", ("runs",), rank=72, name="Filter"),
    Action("sort_name", "N", "sort", "Sort by name; again: the other way round", "Runs",
           "sort('run')", ("runs",), name="Sort by name"),
    Action("sort_state", "U", "sort", "Sort by state", "Runs", "sort('state')", ("runs",),
           name="Sort by state"),
    Action("sort_step", "P", "sort", "Sort by progress: the step", "Runs", "sort('step')",
           ("runs",), name="Sort by step"),
    Action("sort_loss", "L", "sort", "Sort by loss", "Runs", "sort('loss')", ("runs",),
           name="Sort by loss"),
    Action("sort_left", "E", "sort", "Sort by the estimated time left", "Runs", "sort('left')",
           ("runs",), name="Sort by time left"),
    Action("sort_age", "A", "sort", "Sort by age", "Runs", "sort('age')", ("runs",),
           name="Sort by age"),
    Action("sort_model", "M", "sort", "Sort by model", "Runs", "sort('model')", ("runs",),
           name="Sort by model"),
    Action("sort_newest", "O", "sort", "In the order of their starts, the newest first", "Runs",
           "sort('')", ("runs",), name="Newest first"),
    Action("older_step", "left,h", "older", "The step before, among the last 256", "Chart",
           "look(-1)", ("transfer",), rank=74, name="Step before"),
    Action("newer_step", "right,l", "newer", "The step after; at the end it follows the run",
           "Chart", "look(1)", ("transfer",), rank=73, name="Next step"),
    Action("older", "comma", "older 10", "Ten steps back among the last 256", "Chart", "look(-10)",
           ("transfer",), rank=12, name="Ten steps back"),
    Action("newer", "full_stop", "newer 10", "Ten steps on; at the end it follows the run",
           "Chart", "look(10)", ("transfer",), rank=12, name="Ten steps on"),
    Action("maximise", "f", "full", "Give the focused panel the whole screen, or back", "View",
           "maximise", PANEL_SCREENS, rank=40, name="Whole screen"),
    Action("filter", "slash", "filter", "Search: only lines with these words; esc shows all",
           "View", "filter", ("log",), rank=75, name="Search"),
    Action("log_level", "l", "level", "Only lines from a higher level up, then all again", "View",
           "log_level", ("log",), rank=73, name="Level"),
    Action("log_kind", "o", "only", "Show one kind of line; the next kind; all",
           "View", "log_kind", ("log",), rank=72, name="Kind"),
    Action("follow", "s", "follow", "Follow the newest line, or stop following", "View", "follow",
           ("log",), rank=71, name="Follow"),
    Action("theme", "t", "theme", "The next colour theme", "View", "next_theme", rank=30,
           name="Next theme"),
    Action("export", "x", "picture", "Save the focused panel, else the screen, as SVG", "View",
           "export", rank=15, name="Save as SVG"),
    Action("table", "X", "csv", "Save the focused panel's numbers, else the screen's, as CSV",
           "View", "table", name="Save as CSV"),
    Action("copy", "Y", "copy", "Copy: the log's newest line, else how to attach this run", "View",
           "copy", name="Copy"),
    Action("palette", "ctrl+p,colon", "cmds", "Find and run any of these by name", "App",
           "command_palette", rank=50, name="Commands"),
    Action("help", "question_mark,f1", "help", "Keys and what they do", "App", "help", rank=95,
           name="Help"),
    Action("detach", "d,q", "detach", "Leave; the training goes on", "App", "detach", rank=100,
           name="Leave"),
    Action("suspend", "ctrl+z", "shell", "To the shell; `fg` comes back, the training goes on",
           "App", "suspend", name="To the shell"),
    Action("list_up", "up,k", "up", "A line up; in the wizard the choice before", "Lists",
           "move(-1)", LISTS + PAGES),
    Action("list_down", "down,j", "down", "A line down; in the wizard the next choice", "Lists",
           "move(1)", LISTS + PAGES),
    Action("list_page_up", "pageup,ctrl+b", "page", "A page up", "Lists", "page(-1)", LISTS),
    Action("list_page_down", "pagedown,space,ctrl+f", "page", "A page down", "Lists", "page(1)",
           LISTS),
    Action("list_first", "home,g", "first", "The first line", "Lists", "edge(0)", LISTS),
    Action("list_last", "end,G", "last", "The last line", "Lists", "edge(1)", LISTS),
    Action("list_choose", "enter", "choose", "Choose the line, as a second click does", "Lists",
           "choose", LISTS),
    Action("setting_before", "left,h", "before", "The value before", "Lists", "turn(-1)",
           ("settings",)),
    Action("setting_after", "right,l", "after", "The next value", "Lists", "turn(1)",
           ("settings",)),
    Action("chat_send", "enter", "ask", "Ask what was typed", "Chat", "send", ("chat",),
           name="Ask"),
    Action("chat_stop", "escape", "stop", "Stop the answer; without one leave, press it twice",
           "Chat", "stop_answer", ("chat",), name="Stop or leave"),
    Action("chat_cooler", "f2", "colder", "A lower temperature: likelier words", "Chat",
           "temperature(-1)", ("chat",), name="Lower temperature"),
    Action("chat_warmer", "f3", "warmer", "A higher temperature: bolder words", "Chat",
           "temperature(1)", ("chat",), name="Higher temperature"),
    Action("chat_narrower", "f4", "top-p -", "A lower top-p: fewer of the likeliest words", "Chat",
           "top_p(-1)", ("chat",), name="Lower top-p"),
    Action("chat_wider", "f5", "top-p +", "A higher top-p: more words to draw from", "Chat",
           "top_p(1)", ("chat",), name="Higher top-p"),
    Action("chat_new", "ctrl+n", "new", "Forget what was said", "Chat", "anew", ("chat",),
           name="New conversation"),
    Action("chat_up", "pageup", "back", "Look at what was said before", "Chat", "scroll_said(-1)",
           ("chat",), name="Scroll back"),
    Action("chat_down", "pagedown", "on", "Look at what was said after", "Chat", "scroll_said(1)",
           ("chat",), name="Scroll on"),
    Action("wizard_next", "enter", "next", "Accept the answer and go on; at the end, start it",
           "Wizard", "next", PAGES, name="Next"),
    Action("wizard_back", "escape", "back", "The step before; nothing is lost", "Wizard", "back",
           PAGES, name="Back"),
    Action("wizard_read_as", "ctrl+r", "format", "Read the data in the next format", "Wizard",
           "read_as(1)", PAGES[2:3], name="Next format of the data"),
    Action("wizard_read_before", "ctrl+o", "format", "Read the data in the format before", "Wizard",
           "read_as(-1)", PAGES[2:3], name="Format before"),
    Action("wizard_again", "r", "again", "Plan the same answers once more", "Wizard",
           "again", (*METHOD, *STRATEGY, *AT_THE_END), name="Plan again"),
    Action("wizard_measure", "m", "measure", "Measure this machine once more", "Wizard",
           "measure", STRATEGY, name="Measure the machine"),
    Action("wizard_method_before", "left,h", "method", "The method to the left", "Wizard",
           "method(-1)", METHOD, name="Method before"),
    Action("wizard_method_after", "right,l", "method", "The method to the right", "Wizard",
           "method(1)", METHOD, name="Next method"),
    Action("wizard_rank", "n", "rank", "Set the rank of the adapters", "Wizard",
           "ask('method.rank')", METHOD, name="Rank"),
    Action("wizard_alpha", "a", "alpha", "Set the alpha of the adapters", "Wizard",
           "ask('method.alpha')", METHOD, name="Alpha"),
    Action("wizard_targets", "t", "targets", "Set which layers get adapters", "Wizard",
           "ask('method.targets')", METHOD, name="Layers"),
    Action("wizard_variant", "v", "variant", "The next kind of adapters", "Wizard",
           "ask('method.variant')", METHOD, name="Kind of adapters"),
    Action("wizard_base", "b", "base", "The next packing of the frozen weights", "Wizard",
           "ask('method.base')", METHOD, name="Packing"),
    Action("wizard_value_before", "left,h", "change", "The usual value before", "Wizard",
           "turn_value(-1)", TRAINING, name="Value before"),
    Action("wizard_value_after", "right,l", "change", "The next usual value", "Wizard",
           "turn_value(1)", TRAINING, name="Next value"),
    Action("wizard_edit", "e,space", "type", "Type the value; a digit begins it too", "Wizard",
           "edit", TRAINING, name="Type a value"),
    Action("wizard_default", "backspace,delete", "default", "Leave the value to the trainer again",
           "Wizard", "default", TRAINING, name="Default"),
    Action("wizard_complete", "tab", "complete", "Complete the path; again: the next name",
           "Wizard", "complete", WITH_PATHS, name="Complete the path"),
    Action("wizard_faster", "left,h", "dial", "A plan that is faster and takes more", "Wizard",
           "dial(-1)", STRATEGY, name="Faster"),
    Action("wizard_smaller", "right,l", "dial", "A plan that takes less", "Wizard", "dial(1)",
           STRATEGY, name="Smaller"),
    Action("wizard_batch", "b", "batch", "Set the rows of a batch", "Wizard",
           "ask('train.batch_rows')", STRATEGY, name="Batch"),
    Action("wizard_chunk", "c", "chunk", "Set the rows that a block computes at once", "Wizard",
           "ask('placement.chunk_rows')", STRATEGY, name="Chunk"),
    Action("wizard_steps", "s", "steps", "Set the number of steps", "Wizard",
           "ask('train.steps')", STRATEGY, name="Steps"),
    Action("wizard_offload", "o", "offload", "The next offload setting", "Wizard",
           "ask('placement.offload')", STRATEGY, name="Offload"),
    Action("wizard_why", "w", "why", "All reasons, or that of the selected choice", "Wizard",
           "why", STRATEGY, name="Why?"),
    Action("wizard_try", "t", "dry run", "Try three steps of it", "Wizard", "wish('try')",
           AT_THE_END, name="Dry run"),
    Action("wizard_yaml", "y", "YAML", "Copy the configuration file", "Wizard",
           "wish('copy yaml')", AT_THE_END, name="Copy the YAML"),
    Action("wizard_command", "m", "command", "Copy the command that does the same", "Wizard",
           "wish('copy command')", AT_THE_END, name="Copy the command"),
)  # fmt: skip


def footer_actions(
    screen: str, actions: Sequence[Action] = ACTIONS, commands: bool = True
) -> list[Action]:
    """Return the actions of a screen's footer, in the order of the table.

    commands: whether the trainer of the run on screen can be asked for anything.
    """
    return [
        action
        for action in actions
        if action.rank
        and action.works_on(screen)
        and (commands or not action.changes_run or action.group != "Run")
    ]


def find(action_id: str) -> Action:
    """Return the action with this id; KeyError without one."""
    return next(action for action in ACTIONS if action.id == action_id)
