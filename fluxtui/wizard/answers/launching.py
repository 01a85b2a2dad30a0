"""From answers to a running trainer: the `Launch` value, its run directory and its process."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

from fluxtrain.rundir.launch import TrainerProcess, start_trainer
from fluxtrain.rundir.run_dir import RunDir
from fluxtrain.telemetry.storage import write_bytes
from fluxtrain.telemetry.typed import typed_line
from fluxtui.sources.removal import CONFIG_MARK, CONFIG_NAME
from fluxtui.wizard.answers.answers import Answers
from fluxtui.wizard.answers.configuring import set_arguments, yaml_text


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
        """The same run from a shell."""
        arguments = [*self.arguments, "--run-dir", str(self.run_dir)]
        return shlex.join(["fluxtrain", "train", *arguments])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attach:
    """The user wants to watch a run."""

    run_dir: Path


Outcome = Launch | Attach


def engine_arguments(answers: Answers, config: Path) -> list[str]:
    """What follows `fluxtrain train` or `fluxtrain plan`; a demo needs no `config`."""
    source = ["--demo"] if answers.is_demo else [str(config)]
    return [*source, *set_arguments(answers)]


def command_text(answers: Answers) -> str:
    """The run as a command that a person can copy, with its configuration in config.yaml."""
    if answers.start == "resume":
        return typed_line(shlex.join(["fluxtrain", "train", "--resume", answers.resume_run]))
    arguments = engine_arguments(answers, Path(CONFIG_NAME))
    return typed_line(shlex.join(["fluxtrain", "train", *arguments]))


def run_name(answers: Answers) -> str:
    """The readable part of the run's id: the model's own name, or `demo`."""
    if answers.model_source != "demo":
        return Path(answers.model_path).name
    return "demo" if answers.data_source == "demo" else f"demo-{Path(answers.data_file).stem}"


def prepare(answers: Answers, root: Path | None = None) -> Launch:
    """Make a run directory below `root` and write the configuration into it.

    A run that goes on has its directory and its configuration.

    Raises:
        BadInput: the directory cannot be made or written.
        NoSpace: the disk is full.
    """
    if answers.start == "resume":
        path = Path(answers.resume_run)
        return Launch(run_dir=path, arguments=("--resume", str(path)), config_text="")
    run = RunDir.create(root, run_name(answers))
    config = run.path / CONFIG_NAME
    text = yaml_text(answers)
    if not answers.is_demo:
        write_bytes(config, (CONFIG_MARK + text).encode())
    return Launch(
        run_dir=run.path, arguments=tuple(engine_arguments(answers, config)), config_text=text
    )


def begin(launch: Launch) -> TrainerProcess:
    """Start the trainer in a session of its own; it outlives this process."""
    return start_trainer(launch.arguments, launch.run_dir)
