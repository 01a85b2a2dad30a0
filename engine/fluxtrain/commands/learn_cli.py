"""`fluxtrain learn`: tasks with their texts, starter files and checks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from fluxtrain.commands import options
from fluxtrain.commands.learn.tasks import STAGES, TASKS
from fluxtrain.commands.output import say
from fluxtrain.errors import BadInput


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(learn)


def learn(
    number: Annotated[
        int | None, typer.Argument(metavar="[N]", min=1, max=len(TASKS), help="a task")
    ] = None,
    start: Annotated[
        Path | None, typer.Option("--start", help="write the file to begin with")
    ] = None,
    check: Annotated[Path | None, typer.Option("--check", help="say what is wrong in it")] = None,
    language: Annotated[
        Literal["en", "zh"] | None, typer.Option("--language", help="of the texts")
    ] = None,
    debug: options.Debug = False,
) -> None:
    """Learn tuning and its service: eight tasks with checks.

    Each is checked in a minute on two cores.
    """
    from fluxtrain.commands.learn.checking import check_file
    from fluxtrain.files.atomic import storage_error

    chosen = language or ("zh" if os.environ.get("LANG", "").startswith("zh") else "en")
    if number is None:
        if start or check:
            raise BadInput("--start and --check are of one task: `fluxtrain learn 1 --check FILE`")
        for at, stage in enumerate(STAGES[chosen]):
            say(stage)
            for task in (one for one in TASKS if one.stage == at):
                say(f"  {task.number}  {task.title(chosen)}")
        return
    task = TASKS[number - 1]
    if check is not None:
        say(f"right: {check_file(task, check)}")
    elif start is not None:
        try:
            with start.open("x", encoding="utf-8") as file:
                file.write(task.starter())
        except FileExistsError as error:
            raise BadInput(f"{start} exists already: name another file") from error
        except OSError as error:
            raise storage_error(start, error, option="--start") from error
        say(f"{start} is yours; then `fluxtrain learn {number} --check {start}`")
    else:
        say(task.text(chosen))
