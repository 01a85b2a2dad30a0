"""One run, one directory, one user of it, and a state that anybody can read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fluxtrain.errors import EXIT_BAD_INPUT, EXIT_NO_SPACE, BadInput
from fluxtrain.events.emitter import Emitter
from fluxtrain.events.events import Done, Failed
from fluxtrain.events.run_folder.process import ProcessMark
from fluxtrain.events.run_folder.run_dir import RunDir, runs_root

Make = Callable[..., Any]

LOCK_AND_WAIT = """
import sys
from fluxtrain.events.run_folder.run_dir import RunDir
lock = RunDir(sys.argv[1]).lock()
print("locked", flush=True)
sys.stdin.read()
"""

# A root user may write anywhere, so the program gives that up first; prints the error and its code.
WRITE_AS_NOBODY = """
import json, os, sys
from fluxtrain.errors import FluxTrainError
from fluxtrain.events.run_folder.run_dir import RunDir
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
answers = []
for attempt in (
    lambda: RunDir.create(sys.argv[1], "demo"),
    lambda: RunDir(sys.argv[1]).lock(),
    lambda: RunDir(sys.argv[1]).write_json(RunDir(sys.argv[1]).result, {}),
):
    try:
        attempt()
        answers.append(None)
    except FluxTrainError as error:
        answers.append([error.exit_code, str(error)])
print(json.dumps(answers))
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "runs", "demo")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users reach, which pytest's own is not."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def child(program: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


def done(**fields: Any) -> Done:
    values = {"exit_code": 0, "step": 9, "seconds": 1.0, "loss": 2.0, "evaluation_loss": None}
    return Done(**(values | {"model_path": None} | fields))


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("Qwen/Qwen2.5-3B", "qwen-qwen2.5-3b"),
        ("../../etc", "etc"),
        ("", "run"),
        ("ü ü", "run"),
        ("x" * 300, "x" * 40),
    ],
)
def test_a_run_id_is_a_plain_name_whatever_the_model_is_called(
    tmp_path: Path, name: str, label: str
) -> None:
    run = RunDir.create(tmp_path, name)
    assert run.path.parent == tmp_path
    assert run.run_id.split("-", 2)[2] == label


def test_the_root_comes_from_the_environment_or_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLUXTRAIN_RUNS", str(tmp_path / "mine"))
    assert runs_root() == tmp_path / "mine"
    assert RunDir.create(name="x").path.parent == tmp_path / "mine"
    monkeypatch.delenv("FLUXTRAIN_RUNS")
    monkeypatch.chdir(tmp_path)
    assert runs_root() == tmp_path / "runs"


def test_a_directory_used_by_another_process_is_refused_with_its_pid_until_it_ends(
    run: RunDir,
) -> None:
    holder = child(LOCK_AND_WAIT, run.path)
    assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
    try:
        with pytest.raises(
            BadInput, match=rf"in use by process {holder.pid} .*--attach"
        ) as refused:
            run.lock()
        assert refused.value.exit_code == EXIT_BAD_INPUT
        assert run.user() is not None and run.user().pid == holder.pid
    finally:
        holder.kill()
        holder.communicate()
    with run.lock():
        assert run.user() == ProcessMark.mine()


def test_without_file_locks_the_recorded_process_decides(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    run.pid.write_bytes(msgspec.json.encode(ProcessMark.mine()))
    with pytest.raises(BadInput, match=f"process {os.getpid()}"):
        run.lock()
    gone = ProcessMark(pid=os.getpid(), start_s=1.0, host=os.uname().nodename)
    run.pid.write_bytes(msgspec.json.encode(gone))
    run.lock().release()


def test_a_read_only_directory_is_bad_input_that_names_it(open_folder: Path) -> None:
    (open_folder / "runs").mkdir(mode=0o555)
    writer = child(WRITE_AS_NOBODY, open_folder / "runs")
    output, errors = writer.communicate(timeout=200)
    assert writer.returncode == 0, errors
    for answer in json.loads(output):
        assert answer is not None
        assert answer[0] == EXIT_BAD_INPUT
        assert str(open_folder / "runs") in answer[1]
        assert "Permission denied" in answer[1] and "--run-dir" in answer[1]


def test_a_full_file_system_is_no_space_with_path_and_bytes(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    program = f"""
import json
from fluxtrain.errors import NoSpace
from fluxtrain.events.run_folder.run_dir import RunDir
from fluxtrain.files.atomic import write_bytes
run = RunDir({str(folder / "run")!r})
run.path.mkdir()
answers = []
for attempt in (
    run.lock,
    lambda: RunDir.create({str(folder)!r}, "demo"),
    lambda: write_bytes(run.result, b"x" * 500_000),
):
    try:
        attempt()
    except NoSpace as error:
        answers.append([error.exit_code, str(error)])
print(json.dumps([answers, sorted(path.name for path in run.path.iterdir())]))
"""
    done = subprocess.run(
        [
            *("unshare", "-Urm", "sh", "-c"),
            'mount -t tmpfs -o size=128k none "$0" && exec "$1" -c "$2"',
            *(str(folder), sys.executable, program),
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    if "mount" in done.stderr or "unshare" in done.stderr:
        pytest.skip(f"no mounts here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    answers, left = json.loads(done.stdout)
    assert [code for code, _ in answers] == [EXIT_NO_SPACE] * 3
    for _, message in answers:
        assert str(folder) in message and "free" in message and "KiB" in message
    assert left == ["pid"]  # the half-written file is gone


def test_the_state_follows_the_run(run: RunDir, make_step: Make) -> None:
    assert run.liveness() == "waiting"
    with run.lock():
        emitter = Emitter(run.journal)
        emitter.emit(make_step(1))
        assert run.liveness() == "running"
        run.write_json(run.result, {"exit_code": 143})
        assert run.liveness() == "stopped"
    assert run.liveness() == "stopped"
    with run.lock():  # resumed: the old result is not this process's
        assert run.liveness() == "running"
        run.write_json(run.result, {"exit_code": 0})
    assert run.liveness() == "finished"
    emitter.close()


def test_a_failure_is_known_from_its_error_file_or_from_the_journal(
    run: RunDir, make_step: Make
) -> None:
    emitter = Emitter(run.journal)
    emitter.emit(make_step(1))
    assert run.liveness() == "dead"
    emitter.emit(Failed(exit_code=4, kind="Diverged", message="the loss is nan at step 2"))
    emitter.emit(done(exit_code=4))
    assert run.liveness() == "failed"
    assert run.summary().exit_code == 4
    assert run.summary().message == "the loss is nan at step 2"
    emitter.emit(make_step(2))  # resumed, then killed
    assert run.liveness() == "dead"
    run.write_json(run.error, {"exit_code": 5, "kind": "NoSpace", "message": "disk full"})
    assert (run.liveness(), run.summary().message) == ("failed", "disk full")
    emitter.close()


def test_a_killed_run_that_was_resumed_once_is_dead_and_not_what_it_was_before(run: RunDir) -> None:
    run.write_json(run.result, {"exit_code": 143})
    os.utime(run.result, (time.time() - 100, time.time() - 100))
    holder = child(LOCK_AND_WAIT, run.path)
    assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
    assert run.liveness() == "running"
    holder.kill()
    holder.communicate()
    run.journal.write_bytes(b"")
    assert run.liveness() == "dead"


def test_a_run_on_another_host_is_judged_by_its_journal(run: RunDir) -> None:
    mark = ProcessMark(pid=1, start_s=1.0, host="elsewhere.example")
    run.pid.write_bytes(msgspec.json.encode(mark))
    assert run.liveness() == "dead"
    run.journal.write_bytes(b"")
    assert run.liveness() == "running"
    os.utime(run.journal, (time.time() - 300, time.time() - 300))
    assert run.liveness() == "dead"
