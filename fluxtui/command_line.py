"""The options of `fluxtrain-tui`, and the wizard's answers that they give."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable
from typing import Any

from fluxtrain.errors import BadInput
from fluxtrain.events.printable import printable_lines
from fluxtrain.events.run_folder.run_dir import LAST, find_run
from fluxtui.answers.answers import DIAL, Answers, with_data, with_model, with_settings
from fluxtui.answers.configuring import answers_from_file
from fluxtui.answers.rows import BY_KEY, ROWS, SettingRow, declared, read

_DEFAULT = object()  # a setting that was given at its default, in place of a file's
MOST_COLUMNS, MOST_ROWS = 1000, 500  # of a screen: several times what is sold

_EPILOG = """\
Leaving the app never stops a training; --attach shows it again. Exit codes are those of
`fluxtrain train`: 0 finished, 2 bad input, 3 does not fit, 4 diverged, 5 no space left,
130 and 143 stopped after a checkpoint, 1 a bug."""


class _Parser(argparse.ArgumentParser):
    """Escapes terminal codes in error messages, and loads the help texts of settings only when
    needed: the configuration's schema takes a sixth of a second."""

    def format_help(self) -> str:
        for action in self._actions:
            if action.dest in BY_KEY:
                known = declared(BY_KEY[action.dest])
                action.help = known.help.replace("%", "%%")
                action.metavar = "|".join(known.choices) or action.metavar
        return super().format_help()

    def _print_message(self, message: str, file: Any = None) -> None:
        super()._print_message(printable_lines(message), file)


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command's options."""
    parser = _Parser(
        prog="fluxtrain-tui",
        description="Set up a training, start it, and watch it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", nargs="?", metavar="CONFIG.yaml", help="open it in the wizard")
    add = parser.add_argument
    attach = "watch a run: its id, its folder, or `last`: the newest that trains (the default)"
    add("--attach", metavar="RUN", nargs="?", const=LAST, help=attach)
    add("--resume", metavar="RUN", help="go on with a run that ended early, named like that")
    add("--demo", action="store_true", help="start the demo at once")
    add("--yes", "-y", action="store_true", help="start at once with every default")
    add("--headless", action="store_true", help="train here without the app, printing lines")
    answers = parser.add_argument_group("answers of the wizard")
    add = answers.add_argument
    add("--model", metavar="M", help="demo, a folder, or a hub id")
    add("--data", metavar="D", help="demo, a file, a folder, or hf://datasets/owner/name")
    add("--aggressiveness", choices=DIAL, help="from as fast as possible to what fits easily")
    for row in ROWS:
        metavar = "PATH" if row.is_folder else "X"
        add(row.flag, dest=row.key, type=_reader(row), metavar=metavar, help="a setting")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="any other setting")
    look = parser.add_argument_group("the screen")
    look.add_argument("--theme", metavar="NAME", help="a theme of themes/")
    look.add_argument("--read-only", action="store_true", help="watch, change nothing")
    slow = "draw once a second and in plain colours"
    look.add_argument("--low-bandwidth", action="store_true", help=slow)
    return parser


def answers_of(options: argparse.Namespace) -> Answers | None:
    """Return the answers in the command line and a configuration file; None without any.

    Raises:
        BadInput: the file or a setting cannot be used.
    """
    if options.demo and options.config:
        raise BadInput(f"--demo and {options.config} were both given: leave one out")
    overrides = tuple(options.set)
    answers = answers_from_file(options.config, overrides) if options.config else Answers()
    answers = dataclasses.replace(answers, overrides=overrides)
    if options.model is not None:
        answers = with_model(answers, options.model)
    if options.resume is not None:
        run = str(find_run(options.resume))
        answers = dataclasses.replace(answers, start="resume", resume_run=run, step="launch")
    if options.data is not None:
        answers = with_data(answers, options.data)
    given = {row.key: getattr(options, row.key) for row in ROWS}
    answers = with_settings(
        answers, {key: None if value is _DEFAULT else value for key, value in given.items()
                  if value is not None}
    )  # fmt: skip
    if given["train.epochs"] is not None and given["train.steps"] is None:
        answers = with_settings(answers, {"train.steps": None})  # which a file may set
    if options.aggressiveness is not None:
        answers = dataclasses.replace(answers, dial=options.aggressiveness)
    return None if answers == Answers() else answers


def _reader(row: SettingRow) -> Callable[[str], object]:
    """Return the function that reads a setting's option."""

    def read_option(text: str) -> object:
        try:
            value = read(row, text)
        except BadInput as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return _DEFAULT if value is None else value

    return read_option


def forget_odd_sizes() -> None:
    """Remove LINES and COLUMNS from the environment where no terminal has such a size, so that the
    real size is used."""
    for name, most in (("LINES", MOST_ROWS), ("COLUMNS", MOST_COLUMNS)):
        told = os.environ.get(name, "")
        if told and not (told.isascii() and told.isdecimal() and 0 < int(told[:9]) <= most):
            del os.environ[name]
