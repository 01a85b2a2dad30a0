"""Hold a run directory for this process: lock, journal, log, control, gauges, and how it ended."""

from __future__ import annotations

import shlex
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fluxtrain.config.schema import RunConfig
from fluxtrain.core.ranks.join import ALONE, Ranks
from fluxtrain.errors import (
    EXIT_BAD_INPUT,
    EXIT_BUG,
    EXIT_DOES_NOT_FIT,
    EXIT_FINISHED,
    DeviceFailed,
    DoesNotFit,
    FluxTrainError,
    Interrupted,
    ReadFailed,
)
from fluxtrain.events.console import JsonConsole, PlainConsole, to_standard_output
from fluxtrain.events.emitter import Announcer, Emitter
from fluxtrain.events.events import CommandAnswered, Done, Event, Failed
from fluxtrain.events.run_folder.control import ControlServer
from fluxtrain.events.run_folder.own_files import refuse_odd_places
from fluxtrain.events.run_folder.run_dir import Holding, RunDir
from fluxtrain.machine.failures import as_told, device_failure
from fluxtrain.train.checkpoint.run_state import RunState
from fluxtrain.train.observe.disk_wait import DiskWait
from fluxtrain.train.observe.gauges import GaugeThread
from fluxtrain.train.observe.host_room import HostRoom
from fluxtrain.train.observe.run_log import RunLog
from fluxtrain.train.observe.timeline import TimelineThread
from fluxtrain.train.observe.tracking import Trackers
from fluxtrain.train.requests import AFTER_STEP, COMMANDS, Requests, Signals


class Session:
    """Opens before anything is loaded, and records at its close how the process ended."""

    def __init__(
        self,
        run_dir: RunDir,
        *,
        live_fd: int | None = None,
        json: bool = False,
        host_limit_bytes: int | None = None,
        disk_wait_s: float = 0.0,
        ranks: Ranks = ALONE,
    ) -> None:
        self.run_dir = run_dir
        self.ranks = ranks  # the processes of the run
        self.trusts_code = False  # the user has said that the model's own code may run
        self._started_s = time.monotonic()
        refuse_odd_places(run_dir)
        with ExitStack() as taken:  # released where a later one fails
            self.holding = Holding(run_dir)
            taken.callback(self.holding.release)
            self._had_trained = run_dir.has_trained
            if not self._had_trained:
                run_dir.result.unlink(missing_ok=True)
                run_dir.error.unlink(missing_ok=True)
            self._log = RunLog(run_dir.log)
            taken.callback(self._log.close)
            self._emitter = Emitter(run_dir.journal, live_fd)
            taken.pop_all()
        show = JsonConsole(to_standard_output) if json else PlainConsole(self._print())
        self.announcer = Announcer(self._emitter, show)
        self._log.tell(self.announcer.warn)
        self.requests = Requests()
        self.disk = DiskWait(
            disk_wait_s, self.announcer, lambda: self.requests.stop_code is not None
        )
        self.signals = Signals(self.requests, self._at_once)
        if ranks.world > 1:  # all stop together: torchrun would start again after one's failure
            self.signals.deferred = True
            self.signals.promise = "stopping once all processes have loaded"
        self._control = ControlServer(run_dir.socket, self._answer)
        self.gauges = GaugeThread(
            self.announcer,
            live=live_fd is not None,
            host_limit_bytes=host_limit_bytes,
            look=HostRoom(
                self.announcer.warn, self.requests.end_for_lack, self.requests.free_host
            ).look,
        )
        self.timeline = TimelineThread(run_dir.timeline, self.announcer.warn)
        self.state = RunState()
        self._trackers: Trackers | None = None
        self.model_path: str | None = None
        self.model_step: int | None = None  # whose weights are saved
        self.measured: dict[str, Any] = {}
        self._afterwards, self._began = self.signals.words, False
        self.holding.followed_by(self._moved)
        self.configured()

    def __enter__(self) -> Session:
        self.signals.__enter__()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.signals.deferred = True  # no signal interrupts the record
        try:
            self._say(self.gauges.close)
            self._say(self.timeline.close)
            if self._trackers is not None:
                stopped = error is None or isinstance(as_told(error), Interrupted)
                self._say(partial(self._trackers.close, failed=not stopped))
            self._record_end(error)
        finally:
            self._control.close()
            self._emitter.close()
            self.signals.__exit__()
            self._log.close()
            self.holding.release()

    @contextmanager
    def naming_the_way_on(self) -> Iterator[None]:
        """Add the last checkpoint and the command that goes on to what is raised inside where a GPU
        has failed (DeviceFailed), a file cannot be read, or memory ran out (DoesNotFit)."""
        try:
            yield
        except ReadFailed as error:
            raise ReadFailed(f"{error}; {self._newest_text}: {self.resume_command}") from error
        except FluxTrainError:
            raise
        except (RuntimeError, MemoryError, OSError) as error:
            failed = device_failure(error) if isinstance(error, RuntimeError) else None
            if failed is not None:
                told = f"{failed}; {self._newest_text}: {self.resume_command}"
                raise DeviceFailed(told) from error
            refused = as_told(error)
            if not isinstance(refused, DoesNotFit):
                raise
            told = f"{refused}; {self._newest_text}: {self.resume_command}"
            raise DoesNotFit(told) from error

    def listen(self) -> None:
        """Start to answer commands and to report gauges; called after the first event."""
        self._control.start()
        self.gauges.start()

    def track(self, config: RunConfig) -> None:
        """Report the run to the trackers of its configuration from now on."""
        if config.trackers.report_to:
            self._trackers = Trackers(
                config, self.run_dir.path, self.state.step, self.announcer.warn
            )
            self.announcer.also_tell(self._trackers.put)

    def _moved(self, old: Path, new: Path) -> None:
        """Go on in the folder's new place."""
        self._control.path, self.timeline.path = self.run_dir.socket, self.run_dir.timeline
        self.model_path = self.model_path and str(self.run_dir.model)
        self.announcer.warn(f"{old} was renamed: the run goes on in {new}")

    def configured(self) -> None:
        """Note what the run directory holds, for the message of a stop before the first step.

        Called again when it holds more.
        """
        self.holding.look()
        held = "its log alone"
        if self.run_dir.checkpoints.exists():
            held = "what it held before"
        elif self.run_dir.run.exists():
            held = "its configuration and its log alone"
        self.signals.words = f"stopped before a step was made: {self.run_dir.path} holds {held}"

    def stop_together(self) -> None:
        """Raise Interrupted on all of several ranks where one was told to stop as it loaded."""
        self.requests.agree(self.ranks)
        if self.ranks.world > 1 and (code := self.requests.stop_code):
            raise Interrupted(self.signals.words, code)

    def begin_training(self) -> None:
        """Let a signal end the run after a step with a checkpoint, and drop the record of how an
        earlier process ended."""
        self.holding.look()
        self.signals.deferred, self.signals.words = True, self._afterwards
        self.signals.promise = AFTER_STEP
        self._forget_earlier_end()
        self._began = True

    @property
    def seconds(self) -> float:
        """Return the seconds since this process took the run."""
        return time.monotonic() - self._started_s

    @property
    def resume_command(self) -> str:
        """Return the command that continues this run."""
        trust = " --set model.trust_remote_code=true" if self.trusts_code else ""
        return f"fluxtrain train --resume {shlex.quote(str(self.run_dir.path))}{trust}"

    def _at_once(self) -> str:
        """Remove the socket and name the newest checkpoint, as the process ends at once."""
        self._control.abandon()
        return self._newest_text

    @property
    def _newest_text(self) -> str:
        names = [path.name for path in self.run_dir.checkpoints.glob("step-*")]
        return f"checkpoint {max(names)} stands" if names else "no checkpoint was written yet"

    def _print(self) -> Callable[[str], None]:
        def write(text: str) -> None:
            self._log.printed(text)
            to_standard_output(text)

        return write

    def _answer(self, command: str, arguments: dict[str, Any]) -> tuple[bool, str]:
        ok, message = self.requests.handle(command, arguments)
        if command in COMMANDS:
            told = arguments if ok else {}  # arguments of refused commands are not checked
            self.announcer.emit(
                CommandAnswered(command=command, ok=ok, message=message, arguments=told)
            )
        return ok, message

    def _forget_earlier_end(self) -> None:
        for path in (self.run_dir.result, self.run_dir.error):
            path.unlink(missing_ok=True)

    @property
    def _is_the_runs_end(self) -> bool:
        """Return whether the end of this process is the end of the run.

        A process that resumed a run and made no step changes only its journal and its log.
        """
        return self._began or not self._had_trained

    def _record_end(self, error: BaseException | None) -> None:
        told = as_told(error) if error is not None else None
        if error is not None and not isinstance(told, Interrupted):
            self._record_failure(error, told)
            return
        try:
            self._record_orderly_end(told)
        except FluxTrainError as lost:
            self._record_failure(lost, lost)
            raise

    def _record_orderly_end(self, interrupted: FluxTrainError | None) -> None:
        """Write result.json. Raises where it cannot be written, unless the run was interrupted."""
        code = interrupted.exit_code if interrupted else EXIT_FINISHED
        when = f"stopped after step {self.state.step}: " if self.state.step else ""
        result = {
            "exit_code": code,
            "message": f"{when}{interrupted}" if interrupted else "finished",
            "step": self.state.step,
            "seconds": self.seconds,
            "trained_s": self.state.trained_s,
            "total_tokens": self.state.total_tokens,
            "first_loss": self.state.first_loss,
            "loss": self.state.last_loss,
            "evaluation_loss": self.state.evaluation_loss,
            "best_evaluation_loss": self.state.best_loss,
            "best_step": self.state.best_step,
            "model": self.model_path,
            "model_step": self.model_step,
            **self.measured,
        }
        if not interrupted:
            self._say(self.announcer.phase, "finished")
        if self._is_the_runs_end and interrupted:
            self._say(self._write_result, result)
        elif self._is_the_runs_end:
            self.disk.until_written(partial(self._write_result, result))
        self._say(self.announcer.emit, self._done(code))

    def _write_result(self, result: dict[str, Any]) -> None:
        self.holding.look()
        result["model"] = self.model_path  # where the folder is now
        self.run_dir.write_json(self.run_dir.result, result)

    def _record_failure(self, error: BaseException, told: FluxTrainError | None) -> None:
        code = told.exit_code if told else EXIT_BUG
        kind = type(told or error).__name__
        refused = code in (EXIT_BAD_INPUT, EXIT_DOES_NOT_FIT) and not self._began
        refused = refused and not self._had_trained
        message = str(told) if told else f"{kind}: {error}"
        self._log.traceback(error)
        if is_held := self.holding.is_held:
            error.add_note(f"the whole story is in {self.run_dir.log}")
        self._say(self.announcer.phase, "failed")
        content = {
            "exit_code": code,
            "kind": kind,
            "refused": refused,
            "message": message,
            "step": self.state.step,
            "traceback": "".join(traceback.format_exception(error)),
        }
        if is_held and self._is_the_runs_end:
            self._say(self.run_dir.write_json, self.run_dir.error, content)
        last = Failed(exit_code=code, kind=kind, message=message, refused=refused)
        self._say(self.announcer.emit, last)

    def _done(self, code: int) -> Event:
        return Done(
            exit_code=code,
            step=self.state.step,
            seconds=self.seconds,
            loss=self.state.last_loss,
            evaluation_loss=self.state.evaluation_loss,
            model_path=self.model_path,
            model_step=self.model_step,
            best_step=self.state.best_step,
            best_loss=self.state.best_loss,
            resume_with=self.resume_command if code and self.run_dir.run.exists() else None,
        )

    def _say(self, write: Callable[..., object], *arguments: object) -> None:
        """Write one part of the record; a full disk must not prevent the other parts."""
        try:
            write(*arguments)
        except FluxTrainError as error:
            self._log.traceback(error)
