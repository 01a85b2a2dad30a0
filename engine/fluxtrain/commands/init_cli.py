"""The commands before a long run: `fluxtrain init` and `fluxtrain verify-resume`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from fluxtrain.commands import options
from fluxtrain.commands.importing import Importing
from fluxtrain.commands.output import complain, print_json, say, silent
from fluxtrain.errors import BadInput, Disagrees


def register(app: typer.Typer, epilog: str) -> None:
    """Add the commands to the command line."""
    app.command(epilog=epilog)(init)
    app.command("verify-resume", epilog=epilog)(verify_resume)


def init(
    path: Annotated[Path, typer.Argument(metavar="[PATH]", help="the new file")] = Path("run.yaml"),
    model: Annotated[
        str | None, typer.Option("--model", metavar="PATH|ID", help="which model is trained")
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", metavar="PATH", help="what it learns from")
    ] = None,
    sets: options.Sets = None,
    debug: options.Debug = False,
) -> None:
    """Write a starter file with the ten settings that matter, for a model and data that it reads.

    Asks nothing, overwrites nothing, fetches nothing. What a run could not use is refused.
    """
    with Importing():
        from fluxtrain.commands.starter import write_starter
        from fluxtrain.events.printable import printable

    write_starter(path, model, data, sets or ())
    name = printable(shlex.quote(str(path)))
    say(f"wrote {name}; further:")
    say(f"  fluxtrain inspect {name}   shows the data as the model will see it")
    say(f"  fluxtrain plan {name}      says what the run needs, and how long it takes")
    say(f"  fluxtrain train {name}     trains")


def verify_resume(
    config: options.Config = None,
    demo: options.Demo = False,
    sets: options.Sets = None,
    steps: Annotated[int, typer.Option("--steps", help="how many, saved in the middle")] = 8,
    device: options.Device = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Prove that a resumed run is the same here, bit for bit.

    Nothing is kept. Ends with exit code 0 when losses, weights and optimizer states are equal,
    with 6 when not.
    """
    chosen = options.chosen_config(config, demo, options.overrides_of(sets, None, device))
    if chosen is None:
        raise BadInput("nothing to verify: name a CONFIG.yaml, or use --demo")
    with Importing():
        from fluxtrain.commands.verify_resume import page
        from fluxtrain.commands.verify_resume import verify_resume as verify

    found = verify(chosen, steps, silent if json else complain)
    if json:
        print_json(found)
    if not found.equal:
        raise Disagrees(f"{page(found)}; the resume of this run is not exact here: please report")
    if not json:
        say(page(found))
