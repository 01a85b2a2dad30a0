"""From answers to a running trainer: the `Launch` value, its run directory and its process."""

from __future__ import annotations

import dataclasses
import os
import shlex
from pathlib import Path

from fluxtrain.errors import BadInput
from fluxtrain.events.run_folder.launch import TrainerProcess, start_trainer
from fluxtrain.events.run_folder.removal import CONFIG_MARK, CONFIG_NAME
from fluxtrain.events.run_folder.run_dir import RunDir
from fluxtrain.events.typed import typed_line
from fluxtrain.files.atomic import storage_error, write_bytes
from fluxtui.answers.answers import Answers
from fluxtui.answers.configuring import (
    as_arguments,
    assignments,
    flat_configuration,
    set_arguments,
    yaml_text,
)
from fluxtui.home import expanded
from fluxtui.sources.trust import TRUST, trusts_code


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """A run that is ready to start: its directory is there and holds its configuration.

    Attributes:
        run_dir: the run's directory.
        arguments: what follows `fluxtrain train`, without the run directory.
        config_text: the configuration as YAML, for people.
    """

    run_dir: Path
    arguments: tuple[str, ...]
    config_text: str

    @property
    def command(self) -> str:
        """Return the shell command that starts this run."""
        arguments = [*self.arguments, "--run-dir", str(self.run_dir)]
        return shlex.join(["fluxtrain", "train", *arguments])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attach:
    """The user wants to watch a run."""

    run_dir: Path


Outcome = Launch | Attach


def engine_arguments(answers: Answers, config: Path) -> list[str]:
    """Return the arguments of `fluxtrain train` or `plan`; a demo needs no `config`."""
    source = demo_arguments(answers) if answers.is_demo else [str(config)]
    return [*source, *set_arguments(answers)]


def demo_arguments(answers: Answers) -> list[str]:
    """Return what names the demo, of text or of images."""
    return ["--demo", *(["image-edit"] if answers.of_images else [])]


def command_text(answers: Answers) -> str:
    """Return the run as a shell command that works when pasted: it needs only the files that the
    answers name."""
    return typed_line(shlex.join(["fluxtrain", "train", *_shown_arguments(answers)]))


def _shown_arguments(answers: Answers) -> list[str]:
    if answers.start == "resume":
        return ["--resume", answers.resume_run]
    where = ["--run-dir", expanded(answers.run_folder)] if answers.run_folder else []
    if answers.is_demo:
        return [*demo_arguments(answers), *set_arguments(answers), *where]
    settings = assignments(flat_configuration(answers))
    return [*as_arguments([*settings, *answers.overrides]), *where]


def run_name(answers: Answers) -> str:
    """Return the readable part of the run's id: the model's own name, or `demo`."""
    if answers.model_source != "demo":  # of the demo of images it is a name, too
        return Path(answers.model_path).name
    return "demo" if answers.data_source == "demo" else f"demo-{Path(answers.data_file).stem}"


def prepare(answers: Answers, root: Path | None = None, *, was_shown: bool = False) -> Launch:
    """Make a run directory below `root` and write the configuration into it.

    A run that goes on has its directory and its configuration. If the last page `was_shown`, which
    says so, the user trusts its model's own code too.

    Raises:
        BadInput: the directory cannot be made or written.
        NoSpace: the disk is full.
    """
    if answers.start == "resume":
        path = Path(answers.resume_run)
        trust = TRUST if was_shown and trusts_code(path) else ()
        return Launch(run_dir=path, arguments=("--resume", str(path), *trust), config_text="")
    run = _made(answers, root)
    config = run.path / CONFIG_NAME
    text = yaml_text(answers)
    if not answers.is_demo:
        write_bytes(config, (CONFIG_MARK + text).encode())
    return Launch(
        run_dir=run.path, arguments=tuple(engine_arguments(answers, config)), config_text=text
    )


def run_folder_problem(typed: str) -> str:
    """Say why a typed folder cannot hold a new run; "" if it can, or if none was typed."""
    folder = Path(expanded(typed)) if typed.strip() else None
    if folder is None or not os.path.lexists(folder):
        return ""
    if not folder.is_dir():
        return f"{folder} is a file: name a folder that is new or empty"
    if any(folder.iterdir()):
        return f"{folder} is not empty: name a folder that is new or empty, as a run fills its own"
    return ""


def place_of(answers: Answers, root: Path) -> Path:
    """Return the folder of the run: the requested one, or the folder of the runs."""
    return Path(expanded(answers.run_folder)) if answers.run_folder else root


def _made(answers: Answers, root: Path | None) -> RunDir:
    """Make the run's directory: the requested one, or a new one below `root`."""
    if not answers.run_folder:
        return RunDir.create(root, run_name(answers))
    folder = Path(expanded(answers.run_folder))
    try:
        problem = run_folder_problem(answers.run_folder)
        if problem:
            raise BadInput(problem)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error(folder, error) from error
    return RunDir(folder)


def begin(launch: Launch) -> TrainerProcess:
    """Start the trainer in a session of its own; it outlives this process."""
    return start_trainer(launch.arguments, launch.run_dir)
