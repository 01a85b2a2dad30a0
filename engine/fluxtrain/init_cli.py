"""The command that begins: `fluxtrain init` writes a starter file."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from fluxtrain.commands import options
from fluxtrain.output import say


def register(app: typer.Typer, epilog: str) -> None:
    """Add the command to the command line."""
    app.command(epilog=epilog)(init)


def init(
    path: Annotated[Path, typer.Argument(metavar="[PATH]", help="the new file")] = Path("run.yaml"),
    model: Annotated[
        str | None, typer.Option("--model", metavar="PATH|ID", help="which model is trained")
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", metavar="PATH", help="what it learns from")
    ] = None,
    debug: options.Debug = False,
) -> None:
    """Write a starter file with the ten settings that matter; asks nothing, overwrites nothing."""
    from fluxtrain.commands.starter import write_starter
    from fluxtrain.telemetry.printable import printable

    write_starter(path, model, data)
    name = printable(shlex.quote(str(path)))
    say(f"wrote {name}; further:")
    say(f"  fluxtrain inspect {name}   shows the data as the model will see it")
    say(f"  fluxtrain plan {name}      says what the run needs, and how long it takes")
    say(f"  fluxtrain train {name}     trains")
