"""The `fluxtrain-tui` command: it decides between the wizard, a run at once, a look at a run, and
plain lines where there is no terminal. Starts fast: Textual only where it is shown, torch never.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import select
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fluxtrain.errors import EXIT_BUG, EXIT_FINISHED, EXIT_INTERRUPTED, BadInput, FluxTrainError
from fluxtrain.events.printable import printable, printable_lines
from fluxtrain.events.run_folder.run_dir import LAST, RunDir, find_run, newest_training, runs_root
from fluxtrain.events.run_folder.standard_streams import open_standard_streams
from fluxtrain.events.typed import typed
from fluxtui.answers.answers import Answers
from fluxtui.command_line import answers_of, forget_odd_sizes, make_parser

if TYPE_CHECKING:
    from textual.screen import Screen

    from fluxtrain.events.run_folder.launch import TrainerProcess
    from fluxtui.app import FluxApp

LEAVING_S = 2.0  # threads that read files get so long to end
ENDING_S = 2.0  # and engines that were killed
HANG_UP_PERIOD_S = 1.0  # some hang-ups wake nobody who waits for nothing else
STARTED_S = 1.0  # by then the first screens are drawn


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code; users' mistakes are one line on standard error."""
    open_standard_streams()
    forget_odd_sizes()
    options = make_parser().parse_args(arguments)
    if not draws_utf8() and sys.stderr.isatty():
        print(
            f"fluxtrain-tui: lines instead of the app, as this terminal's character set is "
            f"{sys.stderr.encoding}; where it can do UTF-8, set LC_ALL=C.UTF-8",
            file=sys.stderr,
        )
    try:
        if options.theme is not None:
            _check_theme(options.theme)
        if options.attach is not None:
            return _attach(options)
        return _new_run(options)
    except FluxTrainError as error:
        print(f"fluxtrain-tui: {printable_lines(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:  # before the app, or its replacement, handled signals
        print("fluxtrain-tui: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


# --- a new run ------------------------------------------------------------------------------------


def _new_run(options: argparse.Namespace) -> int:
    from fluxtui.answers.launching import begin, prepare
    from fluxtui.wizard.engine.plan_preview import with_settings_of_the_dial

    answers = answers_of(options)
    if not options.headless and wants_lines():
        return _line_by_line(answers, at_once=options.demo or options.yes)
    if options.headless or not has_terminal():
        if not options.headless:
            if answers is None and not (options.demo or options.yes):
                raise BadInput(
                    "no terminal here for the app: run it in one"
                    f"{ssh_hint('fluxtrain-tui')}, or name what to train without it: a "
                    "CONFIG.yaml, or --demo"
                )
            print(
                "no terminal here: training without the app; run `fluxtrain-tui` in a terminal "
                f"to see it{ssh_hint('fluxtrain-tui')}",
                file=sys.stderr,
            )
        return _train_headless(answers or Answers())
    if not (options.demo or options.yes):
        return show(lambda: _app(options, answers=answers))
    trainer = begin(prepare(with_settings_of_the_dial(answers or Answers())))
    try:
        return show(lambda: _app(options, trainer.run_dir.path, trainer))
    except KeyboardInterrupt:  # before there was an app; the trainer is another process
        print(printable_lines(farewell(trainer.run_dir.path)), file=sys.stderr)
        return EXIT_INTERRUPTED


def _train_headless(answers: Answers) -> int:
    from fluxtui.answers.launching import prepare
    from fluxtui.headless import train_in_foreground
    from fluxtui.wizard.engine.plan_preview import with_settings_of_the_dial

    launch = prepare(with_settings_of_the_dial(answers))
    return train_in_foreground([*launch.arguments, "--run-dir", str(launch.run_dir)])


def _line_by_line(answers: Answers | None, at_once: bool) -> int:
    """Ask the wizard's questions without a screen; then print the run's progress in lines."""
    from fluxtui.answers.launching import Attach, begin, prepare
    from fluxtui.headless import follow_lines
    from fluxtui.wizard.engine.plan_preview import with_settings_of_the_dial
    from fluxtui.wizard.linear import LinearWizard

    signal_hang_up(descriptor=1)
    if at_once:
        outcome: Any = prepare(with_settings_of_the_dial(answers or Answers()))
    else:
        outcome = LinearWizard(answers).run()
    if outcome is None:
        return EXIT_FINISHED
    if isinstance(outcome, Attach):
        return follow_lines(outcome.run_dir)
    trainer = begin(outcome)
    print(f"run: {printable(str(trainer.run_dir.path))}; Ctrl-C leaves it running", flush=True)
    return follow_lines(trainer.run_dir.path, trainer.exit_code)


# --- a run that is there --------------------------------------------------------------------------


def _attach(options: argparse.Namespace) -> int:
    run_dir, said = find_run(options.attach), ""
    if options.attach == LAST:
        run_dir, said = newest_training()
    if not has_terminal() or wants_lines():
        from fluxtui.headless import follow_lines

        if not wants_lines():
            hint = ssh_hint("fluxtrain-tui --attach")
            print(f"no terminal here: lines instead of the app{hint}", file=sys.stderr, flush=True)
        if said:
            print(printable(said), file=sys.stderr, flush=True)
        signal_hang_up(descriptor=1)
        return follow_lines(run_dir)
    return show(lambda: _app(options, run_dir, said=said))


# --- the app --------------------------------------------------------------------------------------


def has_terminal(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether all three standard streams are a terminal that can draw: the app reads one and
    draws on the other two."""
    capable = environment.get("TERM", "") not in ("", "dumb") and draws_utf8()
    return capable and all(end.isatty() for end in (sys.stdin, sys.stdout, sys.stderr))


def ssh_hint(command: str, environment: Mapping[str, str] = os.environ) -> str:
    """Say how to get a terminal over ssh, which allocates none for a command; else ""."""
    return f" (over ssh: `ssh -t HOST {command}`)" if "SSH_CONNECTION" in environment else ""


def wants_lines(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether to ask in plain lines: a user is there, but the terminal cannot draw, or
    `ACCESSIBLE` is set."""
    somebody = sys.stdin.isatty() and sys.stdout.isatty()
    asked_for = environment.get("ACCESSIBLE", "").lower() not in ("", "0", "no", "false")
    dumb = environment.get("TERM", "") in ("", "dumb") or not draws_utf8()
    return somebody and (asked_for or dumb)


def draws_utf8() -> bool:
    """Return whether the terminal's character set has lines and dots; Python takes the C locale's
    for UTF-8."""
    encoding = str(getattr(sys.stderr, "encoding", "") or "utf-8")
    return encoding.lower().replace("-", "").replace("_", "") in ("utf8", "utf8sig")


def _app(
    options: argparse.Namespace,
    run_dir: Path | None = None,
    trainer: TrainerProcess | None = None,
    answers: Answers | None = None,
    said: str = "",
) -> FluxApp:
    """Make the app on a run, with the trainer's own pipe if we started it; without a run on the
    wizard. `said` is shown first."""
    from fluxtui.app import FluxApp
    from fluxtui.settings import settings_path
    from fluxtui.sources.journal import JournalSource

    def make_wizard() -> Screen[Any]:
        from fluxtui.wizard.screen import WizardScreen

        return WizardScreen(answers)

    source = JournalSource(run_dir, trainer.reader if trainer else None) if run_dir else None
    app = FluxApp(
        source,
        start_screen="dashboard" if source else "wizard",
        read_only=options.read_only,
        low_bandwidth=options.low_bandwidth,
        theme_name=options.theme,
        settings_file=settings_path(),
        make_wizard=make_wizard,
    )
    app.trainer, app.told_first = trainer, said
    return app


def show(make: Callable[[], FluxApp]) -> int:
    """Make and run the app; afterwards say how to see its run again.

    Almost no object of a start is garbage: collecting it meanwhile would take a tenth of the
    start.
    """
    gc.disable()
    signal_hang_up(descriptor=0)
    try:
        app = make()
    except BaseException:
        gc.enable()
        raise
    others = set(threading.enumerate())
    code = EXIT_BUG
    try:
        _run(app)
        code = EXIT_BUG if app.return_code else EXIT_FINISHED
    finally:
        gc.enable()
        run_dir = app.run_dir
        if run_dir is not None:
            said = _in_time(lambda: farewell(run_dir)) or f"{run_dir} does not answer"
            words = printable_lines(said)
            if not _in_time(lambda: _said(words)):  # the terminal takes nothing, or has hung up
                os._exit(code)
        _leave_behind(set(threading.enumerate()) - others, code)
    return code


def _run(app: FluxApp) -> None:
    """Run like `asyncio.run`, but wait for no thread: one may hang in a file system for ever."""
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(_until_left(app))
    finally:
        loop.run_until_complete(_end_tasks())
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def _end_tasks() -> None:
    """Cancel running tasks, and wait until the engines that they end are gone: a loop closed
    earlier prints an error for each."""
    from fluxtrain.events.answers.asking import wait_for_engines

    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=ENDING_S)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(wait_for_engines(), ENDING_S)


def _in_time(what: Callable[[], str]) -> str | None:
    """Return the result of a call; None if it takes too long."""
    said: list[str] = []
    thread = threading.Thread(target=lambda: said.append(what()), daemon=True)
    thread.start()
    thread.join(LEAVING_S)
    return said[0] if said else None


def _said(words: str) -> str:
    """Print the words; return them once the terminal has taken them."""
    try:
        print(words, flush=True)
    except OSError:
        return ""
    return words


def _leave_behind(threads: Iterable[threading.Thread], code: int) -> None:
    """End the process at once where a thread still hangs; the terminal is restored already."""
    until_s = time.monotonic() + LEAVING_S
    for thread in threads:
        thread.join(max(0.0, until_s - time.monotonic()))
        if thread.is_alive() and not thread.daemon:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


async def _until_left(app: FluxApp) -> None:
    """Run the app so that a terminating signal restores the terminal too."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        loop.add_signal_handler(number, app.exit)
    loop.call_later(STARTED_S, _collect_again)
    await app.run_async()


def _collect_again() -> None:
    """Turn garbage collection on again, without looking at the objects of the start."""
    gc.freeze()
    gc.enable()


def farewell(run_dir: Path) -> str:
    """Return the words about a run for when the app is closed."""
    run = RunDir(run_dir).summary()
    name = run.run_id if Path(run.path).parent == runs_root() else run.path
    attach = printable(f"{typed('fluxtrain-tui')} --attach {shlex.quote(name)}")
    if run.state in ("running", "waiting"):
        return f"{printable(run.run_id)} goes on without the app. See it again:\n  {attach}"
    step = f" after step {run.step}" if run.step else ""
    reason = f": {run.message}" if run.message not in ("", run.state) else ""
    ended = run.message if step and step in run.message else f"{run.state}{step}{reason}"
    return f"{printable(f'{run.run_id}: {ended}')}. Look at it:\n  {attach}"


def _check_theme(name: str) -> None:
    """Raise BadInput for an unknown theme, also if nothing will be drawn."""
    from fluxtui.themes import load_themes

    themes, _ = load_themes()
    if name not in themes:
        raise BadInput(f"there is no theme {name!r}: {', '.join(themes)}")


def signal_hang_up(descriptor: int) -> None:
    """Let a thread send this process SIGHUP when the terminal on `descriptor` hangs up.

    The kernel signals only the session's first program, and after its end the job in the
    foreground. The first may still run: make does, in a terminal opened for `make run`. Each read
    then returns at once, with nothing. A file that is no terminal is not watched.
    """
    if os.isatty(descriptor):
        threading.Thread(
            target=_await_hang_up, args=(descriptor,), daemon=True, name="hang-up"
        ).start()


def _await_hang_up(descriptor: int) -> None:
    terminal = select.poll()
    terminal.register(descriptor, 0)  # no event is asked for: a hang-up is always told
    while not terminal.poll(HANG_UP_PERIOD_S * 1000):
        continue
    os.kill(os.getpid(), signal.SIGHUP)
