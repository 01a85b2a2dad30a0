"""The `fluxtrain` command. Heavy modules are imported by the command that needs them."""

from __future__ import annotations

import contextlib
import faulthandler
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.main import get_command

import fluxtrain
from fluxtrain.commands import init_cli, learn_cli, options, result_cli, serve_cli
from fluxtrain.commands.completion import completes
from fluxtrain.commands.importing import Importing
from fluxtrain.commands.options import (
    Config,
    Debug,
    Demo,
    Device,
    Json,
    Named,
    Progress,
    Sets,
    Steps,
    Whole,
    chosen_config,
    folder_of,
    nothing_named,
    overrides_of,
)
from fluxtrain.commands.output import (
    answer,
    complain,
    hush_libraries,
    leave,
    print_json,
    say,
    silent,
    tell,
)
from fluxtrain.errors import EXIT_FINISHED, BadInput, FluxTrainError, NoSpace
from fluxtrain.events.run_folder.standard_streams import open_standard_streams
from fluxtrain.machine import before_torch
from fluxtrain.units import loss_text

if TYPE_CHECKING:
    from fluxtrain.config.schema import RunConfig

EXIT_CODES = (
    "Exit codes: 0 finished; 1 a bug of FluxTrain; 2 bad configuration or input; 3 does not fit in "
    "memory or on the disk; 4 diverged; 5 no space left on disk; 6 an exported model is not what "
    "was trained; 7 a GPU or another process of the run failed; 8 a file cannot be read; "
    "130 interrupted, 143 terminated, both with a checkpoint."
)

app = typer.Typer(
    name="fluxtrain",
    help="Train models larger than the GPU, on one card or several, with no configuration.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(asked: bool) -> None:
    if asked:
        say(f"fluxtrain {fluxtrain.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_show_version, help="tell it and end"),
    ] = False,
) -> None:
    pass


@app.command(epilog=EXIT_CODES)
def train(  # noqa: PLR0913, PLR0917 - typer reads the options from the signature
    config: Config = None,
    demo: Demo = False,
    sets: Sets = None,
    run_dir: Annotated[
        Path | None,
        typer.Option("--run-dir", parser=folder_of, metavar="PATH", help="where the run lives"),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume", metavar="auto|RUN|PATH", help="a run, `last`, its folder or a checkpoint"
        ),
    ] = None,
    steps: Steps = None,
    device: Device = None,
    json: Json = False,
    debug: Debug = False,
    trace: options.TraceFile = None,
    disk_wait: options.DiskWaitMinutes = 10.0,
    comm_compress: options.CommCompress = None,
    comm_config: options.CommConfig = None,
    profile: options.ProfileSteps = None,
    live_fd: Annotated[int | None, typer.Option("--live-fd", hidden=True)] = None,
) -> None:
    """Train a model. Its run directory holds the journal, the checkpoints and the result."""
    from fluxtrain.commands import processes
    from fluxtrain.events.trace.export import check_trace_path
    from fluxtrain.models.model_files import read_ahead
    from fluxtrain.train.checkpoint.recovery import find, new_run, resumed_config

    if trace is not None:
        check_trace_path(trace)
    overrides = overrides_of(sets, steps, device)
    overrides += options.comm_overrides(comm_compress, comm_config, profile)
    chosen = chosen_config(config, demo, overrides)
    if chosen is None and resume is None and run_dir is None:
        raise nothing_named("train", overrides)
    found = None if chosen and processes.is_follower() else find(resume, run_dir, chosen)
    if chosen is None:
        assert found is not None, "either the configuration or the run is named"
        if not found.resumes:
            raise BadInput(f"{found.run_dir.path} holds no run: name a CONFIG.yaml, or use --demo")
        chosen = resumed_config(found.run_dir, overrides)
    chosen, overrides = processes.with_planned_mode(chosen, config, demo, overrides, found)
    if chosen.parallel.processes > 1 and not processes.launched():
        words = processes.words_of(config, demo, overrides, json, debug, trace, disk_wait)
        processes.train_in_processes(chosen, found or new_run(chosen), words)
    if chosen.method.name != "qlora":  # whose packed weights may be kept
        read_ahead(chosen.model.path)
    how: dict[str, Any] = {"live_fd": live_fd, "json": json, "disk_wait_s": 60.0 * disk_wait}
    how["opened"] = (lambda _: None) if json or live_fd is not None else _tell_of_run
    if processes.launched():
        with Importing():
            from fluxtrain.train.ranks import train_as_rank

        train_as_rank(
            chosen, lambda: found or new_run(chosen), partial(processes.kept, trace=trace), **how
        )
        return
    with Importing():
        from fluxtrain.train.run import train as train_run

        if chosen.is_sharded:
            from fluxtrain.train.sharded_run import ShardedRun

            how["kind"] = ShardedRun
    target = found or new_run(chosen)  # not before: while packages are read nothing tidies up
    with processes.kept(target, trace=trace):
        train_run(chosen, target, **how)


def _tell_of_run(run_dir: Path) -> None:
    from fluxtrain.events.printable import printable
    from fluxtrain.events.typed import typed

    with contextlib.suppress(NoSpace):  # for what is printed: the run has its own disk
        say(f"run: {printable(str(run_dir))}")
        attach = printable(shlex.quote(str(run_dir)))
        say(f"watch it with: {typed('fluxtrain-tui')} --attach {attach}")


@app.command(epilog=EXIT_CODES)
def plan(  # noqa: PLR0913, PLR0917 - typer reads the options from the signature
    config: Config = None,
    demo: Demo = False,
    sets: Sets = None,
    steps: Steps = None,
    device: Device = None,
    machine: Annotated[
        Path | None,
        typer.Option(
            "--machine",
            help="plan for another machine: a file that `fluxtrain probe --json` wrote there",
        ),
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="the run folder, to check its disk for room")
    ] = None,
    whole: Annotated[
        bool, typer.Option("--all", help="show every choice with its reason, and every setting")
    ] = False,
    json: Json = False,
    progress: Progress = False,
    debug: Debug = False,
) -> None:
    """Show what a run would do and need, and how long it takes."""
    chosen = _named_config("plan", config, demo, overrides_of(sets, steps, device))
    with Importing():
        from fluxtrain.commands.preview import preview, table
        from fluxtrain.plan.machine_file import read_machine_file

    elsewhere = None if machine is None else read_machine_file(machine)
    report = complain if progress or sys.stderr.isatty() else None
    found = preview(chosen, elsewhere, report, run_dir)
    answer(found, partial(table, whole=whole), json=json)


@app.command(epilog=EXIT_CODES)
def inspect(
    config: Config = None,
    demo: Demo = False,
    sets: Sets = None,
    whole: Whole = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show the data as the model will see it.

    Samples, which tokens are trained on, and lengths.
    """
    chosen = _named_config("inspect", config, demo, overrides_of(sets, None, None))
    with Importing():
        from fluxtrain.commands import inspection, pairs_inspection
        from fluxtrain.models.model_files import is_pipeline

    if is_pipeline(chosen.model.path):
        pairs = pairs_inspection.inspect_pairs(chosen, whole)
        answer(pairs, pairs_inspection.page, json=json)
        return
    answer(inspection.inspect(chosen, whole), inspection.page, json=json)


@app.command("dry-run", epilog=EXIT_CODES)
def dry_run(
    config: Config = None,
    demo: Demo = False,
    steps: options.DrySteps = options.DRY_STEPS,
    sets: Sets = None,
    device: Device = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a few real steps and leave nothing behind.

    Shows predicted and measured values side by side.
    """
    from fluxtrain.commands import processes

    overrides = overrides_of(sets, None, device)
    chosen = _named_config("try", config, demo, overrides)
    chosen, overrides = processes.with_planned_mode(chosen, config, demo, overrides, None)
    if chosen.parallel.processes > 1 and not processes.launched():
        words = processes.named(config, demo=demo, overrides=overrides)
        processes.try_in_processes(chosen, words, steps, json=json)
    with Importing():
        from fluxtrain.commands import dry_run as trial

    found = trial.dry_run(chosen, steps)
    if found is not None:  # else another rank tells
        answer(found, trial.table, json=json)


@app.command(epilog=EXIT_CODES)
def export(  # noqa: PLR0913, PLR0917 - typer reads the options from the signature
    named: options.Adapter,
    to: options.To = None,
    step: options.Step = None,
    merge: options.Merge = False,
    gguf: options.Gguf = None,
    onto: options.Onto = "dequantised",
    dtype: options.Dtype = "auto",
    base: options.Base = None,
    other_base: options.OtherBase = False,
    packed: options.Packed = None,
    check: options.Check = True,
    data: options.CheckedData = None,
    rows: options.CheckedRows = 4,
    device: Device = None,
    trust: options.Trust = False,
    json: Json = False,
    progress: Progress = False,
    debug: Debug = False,
) -> None:
    """Export an adapter, a merged model, a checkpoint or GGUF.

    Nothing is written if a check fails.
    """
    with Importing():
        from fluxtrain.commands.pages import export_page
        from fluxtrain.results.adapter.chosen_base import ExportRequest

        if gguf is None:
            from fluxtrain.results.export.adapter_export import export as exported
        else:
            from fluxtrain.results.gguf.gguf_export import export_gguf as exported

    request = ExportRequest(
        named=named, to=to, step=step, merge=merge, gguf=gguf, onto=onto, dtype=dtype,
        base=base, other_base=other_base, packed=packed, check=check, data=data,
        rows=rows, device=device, trust_remote_code=trust,
    )  # fmt: skip
    found = exported(request, silent if json and not progress else complain)
    answer(found, export_page, json=json)


init_cli.register(app, EXIT_CODES)
result_cli.register(app, EXIT_CODES)
serve_cli.register(app)
learn_cli.register(app)


@app.command()
def probe(
    fresh: Annotated[bool, typer.Option("--fresh", help="measure again")] = False,
    json: Json = False,
    progress: Progress = False,
    debug: Debug = False,
) -> None:
    """Measure this machine and the disk of the runs."""
    from fluxtrain.events.run_folder.run_dir import runs_root
    from fluxtrain.measure.probe.probe import probe as measure
    from fluxtrain.measure.probe.table import probe_text

    found = measure(runs_root(), fresh=fresh, report=None if json and not progress else complain)
    answer(found, probe_text, json=json)


@app.command()
def doctor(
    fresh: Annotated[bool, typer.Option("--fresh", help="measure again")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Tell what is slow here, and test the engine.

    Lists what to change and all versions as well. Ends with exit code 0 when all self-tests pass,
    with 1 when one fails.
    """
    with Importing():
        from fluxtrain.commands.doctor.examine import examine
        from fluxtrain.commands.doctor.screen import screen
    from fluxtrain.events.run_folder.run_dir import runs_root

    report = examine(runs_root(), fresh=fresh, say=silent if json else complain)
    answer(report, screen, json=json)
    if report.failed:
        names = ", ".join(test.name for test in report.failed)
        raise FluxTrainError(f"self-tests failed: {names}: please report what stands above")


@app.command()
def trace(
    run: Named,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="default: RUN/trace.json.gz"),
    ] = None,
    summary: Annotated[bool, typer.Option("--summary", help="say what limited the steps")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a Perfetto trace of a run's last 256 steps.

    Or say where their time went. Works while the run trains, and after whatever ended it.
    """
    from fluxtrain.events.trace.export import exported, summarised

    text, facts = summarised(run) if summary else exported(run, output)
    if json:
        print_json(facts)
    else:
        say(text)


@app.command()
def schema() -> None:
    """Print the JSON schema of the configuration."""
    from fluxtrain.config.schema import json_schema

    print_json(json_schema())


@app.command()
def runs(json: Json = False, debug: Debug = False) -> None:
    """List the runs, newest first ($FLUXTRAIN_RUNS, or ./runs)."""
    from fluxtrain.events.printable import printable
    from fluxtrain.events.run_folder.run_dir import list_runs, runs_root

    if runs_root().is_file():
        raise BadInput(f"{runs_root()} is a file: set FLUXTRAIN_RUNS to the folder of the runs")
    found = list_runs()
    if json:
        print_json(found)
        return
    if not found:
        say(f"no runs below {printable(str(runs_root()))}")
    for run in found:
        loss = loss_text(run.loss)
        progress = f"{run.step or 0}/{run.total_steps or '?'}"
        name = printable(run.run_id)
        why = f": {run.message}" if run.state == "refused" else ""
        say(f"{name:40} {run.word():12} step {progress:14} loss {loss:8} {run.model or '-'}{why}")


@app.command(epilog=EXIT_CODES)
def apply(
    run: Named,
    change: Annotated[
        str,
        typer.Argument(
            metavar="NAME=N",
            help="prefetch, resident_blocks, device_groups, blocks_without_recompute, chunk_rows; "
            "or advice=ID",
        ),
    ],
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Change a running training between two steps.

    What it is worth is measured and told.
    """
    name, _, value = change.partition("=")
    if not name or not value:
        raise BadInput(f"{change!r} is no change: write it as in chunk_rows=8")
    _command(run, "apply", {name: int(value) if value.isdecimal() else value}, json=json)


@app.command(epilog=EXIT_CODES)
def undo(run: Named, json: Json = False, debug: Debug = False) -> None:
    """Take back the newest change of a running training."""
    _command(run, "undo", {}, json=json)


def _command(run: str, command: str, arguments: dict[str, Any], *, json: bool) -> None:
    """Send a command to a running trainer; raise its refusal as an error of the user."""
    from fluxtrain.events.run_folder.control import send_command
    from fluxtrain.events.run_folder.run_dir import RunDir, find_run

    answered = send_command(RunDir(find_run(run)).socket, command, arguments)
    if json:
        print_json({"ok": answered.ok, "message": answered.message})
    if not answered.ok:
        raise BadInput(answered.message)
    if not json:
        say(answered.message)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command; the one place where exceptions become exit codes."""
    open_standard_streams()
    if sys.__stderr__ is not None:  # a crash in native code leaves its place in engine.log
        faulthandler.enable(sys.__stderr__)
    hush_libraries()
    if "torch" not in sys.modules:  # else a program calls this, and torch has read them already
        before_torch.share_cores()
        before_torch.let_segments_grow()
        before_torch.keep_compiled()
    given = sys.argv[1:] if arguments is None else arguments
    try:
        ended = get_command(app)(
            given, prog_name="fluxtrain", standalone_mode=False
        )  # app() replaces sys.excepthook too
        code = EXIT_FINISHED if ended is None else tell(typer.Exit(ended), debug=False)
    except BaseException as error:  # noqa: BLE001 - every ending becomes a documented exit code
        if isinstance(error, SystemExit) and completes(given):
            code = int(error.code or EXIT_FINISHED)
        else:
            code = tell(error, debug="--debug" in given)
    leave(code)


def _named_config(verb: str, path: Path | None, demo: bool, overrides: list[str]) -> RunConfig:
    """Return `chosen_config`; raise BadInput if nothing was named."""
    chosen = chosen_config(path, demo, overrides)
    if chosen is None:
        raise nothing_named(verb, overrides)
    return chosen
