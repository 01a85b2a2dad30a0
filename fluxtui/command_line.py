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
from fluxtui.answers.answers import (
    BASES,
    DATA_FORMATS,
    DIAL,
    METHODS,
    OFFLOADS,
    VARIANTS,
    Answers,
    with_data,
    with_model,
)
from fluxtui.answers.configuring import ADAPTERS, SETTINGS, answers_from_file
from fluxtui.answers.training import (
    TRAINING_QUESTIONS,
    TrainingQuestion,
    Value,
    read_answer,
)

MOST_COLUMNS, MOST_ROWS = 1000, 500  # of a screen: several times what is sold

_EPILOG = """\
Leaving the app never stops a training; --attach shows it again. Exit codes are those of
`fluxtrain train`: 0 finished, 2 bad input, 3 does not fit, 4 diverged, 5 no space left,
130 and 143 stopped after a checkpoint, 1 a bug."""


class _Parser(argparse.ArgumentParser):
    """Prints arguments that are wrong without the terminal codes in them."""

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
    add("--method", choices=METHODS, help="what is trained of the model")
    add("--rank", type=_positive, metavar="N", help="of the adapters of lora and qlora")
    add("--alpha", type=_positive, metavar="N", help="what adapters add is scaled by alpha / rank")
    add("--targets", metavar="A,B", help="layers that get adapters, such as q_proj,v_proj")
    add("--variant", choices=VARIANTS, help="kind of the adapters")
    base = "how qlora packs the frozen weights"
    add("--base", choices=BASES, dest="base_format", help=base)
    add("--aggressiveness", choices=DIAL, help="from as fast as possible to what fits easily")
    add("--offload", choices=OFFLOADS, help="what lives in host memory")
    add("--batch-rows", type=_positive, metavar="N", help="rows of one backward pass")
    add("--chunk-rows", type=_positive, metavar="N", help="rows computed at once in a block")
    add("--data-format", choices=DATA_FORMATS, help="the shape of the data, where auto errs")
    for one in TRAINING_QUESTIONS:
        about = f"{one.name}; without it {one.default}"
        metavar = "PATH" if one.kind == "folder" else "X"
        add(one.flag, dest=one.field, type=_reader(one), metavar=metavar, help=about)
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
    given = tuple(options.set)
    answers = answers_from_file(options.config, given) if options.config else Answers()
    answers = dataclasses.replace(answers, overrides=given)
    if options.model is not None:
        answers = with_model(answers, options.model)
    if options.resume is not None:
        run = str(find_run(options.resume))
        answers = dataclasses.replace(answers, start="resume", resume_run=run, step="launch")
    if options.data is not None:
        answers = with_data(answers, options.data)
    settings = {field: getattr(options, field) for field in (*SETTINGS, *ADAPTERS, "method")}
    settings |= {"dial": options.aggressiveness, "run_folder": options.run_folder}
    answers = dataclasses.replace(
        answers, **{field: value for field, value in settings.items() if value is not None}
    )
    if options.epochs is not None and options.steps is None:
        answers = dataclasses.replace(answers, steps=None)  # which a file may set
    return None if answers == Answers() else answers


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a whole number from 1 up")
    return number


def _reader(question: TrainingQuestion) -> Callable[[str], Value]:
    """Return what reads an option that answers a question about the training."""

    def read(text: str) -> Value:
        try:
            return read_answer(question, text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def forget_odd_sizes() -> None:
    """Drop LINES and COLUMNS of a size that no terminal has, by which a screen would be made: the
    terminal is asked for its own."""
    for name, most in (("LINES", MOST_ROWS), ("COLUMNS", MOST_COLUMNS)):
        told = os.environ.get(name, "")
        if told and not (told.isascii() and told.isdecimal() and 0 < int(told[:9]) <= most):
            del os.environ[name]
