"""`fluxtrain serve`: the tuning service, and its keys."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fluxtrain.commands import options
from fluxtrain.commands.output import complain, print_json, say
from fluxtrain.errors import BadInput

if TYPE_CHECKING:
    from fluxtrain.serve.settings import ServeSettings
    from fluxtrain.serve.store import Store

serve_app = typer.Typer(invoke_without_command=True, rich_markup_mode=None)
keys_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="API keys of the service.")
serve_app.add_typer(keys_app, name="keys")

ServeFile = Annotated[Path | None, typer.Option("--config", help="the operator's serve.yaml")]
Printed = Literal["dockerfile", "compose", "kubernetes", "grafana", "alerts"]
Folder = Annotated[Path | None, typer.Option("--folder", help="database, files and models")]
Database = Annotated[
    str | None,
    typer.Option(
        "--db", envvar="FLUXTRAIN_DB", help="postgresql://..., for several servers; else SQLite"
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.add_typer(serve_app, name="serve")


@serve_app.callback()
def serve(  # noqa: PLR0913, PLR0917 - typer reads the options from the signature
    context: typer.Context,
    config: ServeFile = None,
    folder: Folder = None,
    db: Database = None,
    cards: Annotated[
        str | None, typer.Option("--cards", help="GPUs for jobs, one each, such as 0,1")
    ] = None,
    inference: Annotated[
        str | None, typer.Option("--inference", help="yield, beside, off or vllm=URL")
    ] = None,
    backend: Annotated[
        Literal["processes", "kubernetes"] | None,
        typer.Option("--backend", help="where jobs train: on this machine, or in a cluster"),
    ] = None,
    host: Annotated[str, typer.Option("--host", help="address to listen at")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: a free one")] = 8199,
    behind_proxy: Annotated[
        bool, typer.Option("--behind-proxy", help="a proxy with TLS stands in front")
    ] = False,
    certificate: Annotated[
        Path | None, typer.Option("--certificate", help="PEM file with certificate and key")
    ] = None,
    printed: Annotated[
        Printed | None,
        typer.Option("--print", help="write a file for running or watching the service, and end"),
    ] = None,
    debug: options.Debug = False,
) -> None:
    """Serve fine-tuning jobs and their models to the openai SDK."""
    if context.invoked_subcommand is not None:
        return
    server = _serving()
    settings = _settings(config, folder, db, cards, inference)
    if backend is not None:
        settings = settings.model_copy(update={"backend": backend})
    if printed is not None:
        from fluxtrain.serve.deployment import document

        say(document(printed, settings))
        return
    if host not in ("127.0.0.1", "::1", "localhost") and not (behind_proxy or certificate):
        raise BadInput(
            f"--host {host} would send keys in the clear: name a --certificate, or say that a "
            "proxy with TLS stands in front with --behind-proxy"
        )
    server.run_server(settings, host, port, certificate, say, complain)


@keys_app.command("add")
def add(
    name: Annotated[str, typer.Argument(help="whose key it is")],
    scope: Annotated[
        str, typer.Option("--scope", help="metrics, read, infer, train or admin")
    ] = "train",
    project: Annotated[str, typer.Option("--project", help="whose files and jobs")] = "default",
    config: ServeFile = None,
    folder: Folder = None,
    db: Database = None,
    debug: options.Debug = False,
) -> None:
    """Make a key and print it once; only its digest is kept."""
    from fluxtrain.serve.keys import add_key

    say(add_key(_store(config, folder, db), name, scope, project))


@keys_app.command("list")
def list_keys(
    config: ServeFile = None,
    folder: Folder = None,
    db: Database = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """List the keys."""
    from fluxtrain.serve.keys import listed

    found = listed(_store(config, folder, db))
    if json:
        print_json(found)
        return
    for key in found:
        state = "revoked" if key["revoked_s"] else key["scope"]
        say(f"{key['id']}  {state:8} {key['project']:16} {key['name']}")


@keys_app.command("revoke")
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="KEY-ID", help="of `keys list`")],
    config: ServeFile = None,
    folder: Folder = None,
    db: Database = None,
    debug: options.Debug = False,
) -> None:
    """End a key at once."""
    from fluxtrain.serve.keys import revoke_key

    revoke_key(_store(config, folder, db), key_id)


def _settings(
    config: Path | None,
    folder: Path | None,
    db: str | None = None,
    cards: str | None = None,
    inference: str | None = None,
) -> ServeSettings:
    from fluxtrain.serve.settings import load_settings, with_inference

    settings = load_settings(config)
    given = {"folder": folder, "db": db or None}
    changed: dict[str, object] = {name: one for name, one in given.items() if one is not None}
    if cards is not None:
        numbers = [part.strip() for part in cards.split(",")]
        if not all(number.isdecimal() for number in numbers):
            raise BadInput(f"--cards is {cards!r}: use numbers with commas, such as 0,1")
        changed["cards"] = tuple(map(int, numbers))
    settings = settings.model_copy(update=changed)
    return settings if inference is None else with_inference(settings, inference)


def _store(config: Path | None, folder: Path | None, db: str | None) -> Store:
    """Open the store while a server may be running."""
    _serving()
    from fluxtrain.serve.store import Store

    settings = _settings(config, folder, db)
    return Store(settings.folder, alone=False, db=settings.db)


def _serving() -> ModuleType:
    """Return what serves. Raises BadInput where the packages of the extra are missing."""
    try:
        from fluxtrain.serve import server
    except ModuleNotFoundError as error:
        raise BadInput(
            f"the service needs {error.name}: install it with `pip install 'fluxtrain[serve]'`"
        ) from error
    return server
