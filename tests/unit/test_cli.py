"""The command itself, without torch: light, documented, and usable by programs."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import fluxtrain
from fluxtrain.commands.output import tell
from fluxtrain.errors import EXIT_BAD_INPUT, EXIT_BUG, EXIT_INTERRUPTED, EXIT_NO_SPACE
from fluxtrain.events.run_folder.run_dir import RunDir

EXIT_CODES = ("0 finished", "1 a bug", "2 bad", "3 does not fit", "4 diverged", "5 no space")

HEAVY = {"torch", "numpy", "transformers", "textual", "pydantic", "msgspec", "psutil", "yaml"}


def command(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fluxtrain", *arguments],
        capture_output=True, text=True, check=False, timeout=200, cwd=folder,
        env={**os.environ, "FLUXTRAIN_RUNS": str(folder / "runs")},
    )  # fmt: skip


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["plan", "--help"]])
def test_the_help_documents_every_exit_code(tmp_path: Path, arguments: list[str]) -> None:
    said = command(*arguments, folder=tmp_path)
    assert said.returncode == 0
    words = " ".join(said.stdout.split())
    for text in (*EXIT_CODES, "130 interrupted", "143 terminated"):
        assert text in words


def test_the_version_is_told_and_no_line_of_the_help_is_cut(tmp_path: Path) -> None:
    told = command("--version", folder=tmp_path)
    assert (told.returncode, told.stdout) == (0, f"fluxtrain {fluxtrain.__version__}\n")
    lines = command("--help", folder=tmp_path).stdout.splitlines()[1:]
    assert {line.split()[0] for line in lines if line.endswith("...")} <= {"init"}


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("trace ", {"last", "one"}),
        ("export o", {"one"}),
        ("train --set data.tok", {"data.token_cache="}),
    ],
)
def test_a_shell_completes_runs_and_settings_without_heavy_modules(
    typed: str, completed: set[str], tmp_path: Path
) -> None:
    for name in ("one", "no-run"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    (tmp_path / "runs" / "one" / "run.json").write_text("{}")
    words = f"fluxtrain {typed}"
    answer = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "fluxtrain"],
        capture_output=True, text=True, check=True, timeout=200, cwd=tmp_path,
        env={
            **os.environ, "FLUXTRAIN_RUNS": str(tmp_path / "runs"),
            "_FLUXTRAIN_COMPLETE": "complete_bash", "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split(" ")) - 1),
        },
    )  # fmt: skip
    assert set(answer.stdout.split()) == completed
    imported = {line.rpartition("|")[2].strip() for line in answer.stderr.splitlines()}
    assert "typer" in imported and imported.isdisjoint(
        HEAVY - {"pydantic"}
    )  # typer reads flags with it


def test_the_script_for_the_shell_is_installed_on_request(tmp_path: Path) -> None:
    shell = shutil.which("bash")
    assert shell is not None
    answer = subprocess.run(
        [shell, "-c", f"{shlex.quote(sys.executable)} -m fluxtrain --install-completion; exit $?"],
        capture_output=True, text=True, check=False, timeout=200, cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path)},
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    assert "_FLUXTRAIN_COMPLETE" in (tmp_path / ".bash_completions" / "fluxtrain.sh").read_text()


PACKAGES = {
    "absent": ("no torch is installed", "torch", "", "pip install 'torch>=2.11'"),
    "old": ("torch 2.4.1 is installed", "torch", "2.4.1", "pip install 'torch>=2.11'"),
    "broken": ("torch 2.13.0 is installed (no such file)", "torch", "2.13.0", "--force-reinstall"),
}


@pytest.mark.parametrize("case", PACKAGES)
def test_a_package_that_is_absent_too_old_or_broken_is_no_bug(
    case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, name, found, cure = PACKAGES[case]
    versions = metadata.version

    def version(asked: str) -> str:
        if asked != name:
            return versions(asked)
        if not found:
            raise metadata.PackageNotFoundError(asked)
        return found

    monkeypatch.setattr(metadata, "version", version)
    error = ImportError("no such file", name="torch.x") if case == "broken" else AttributeError("x")
    assert tell(error, debug=False) == EXIT_BAD_INPUT
    told = capsys.readouterr().err
    assert words in told and cure in told
    monkeypatch.setattr(metadata, "version", versions)
    assert tell(AttributeError("x"), debug=False) == EXIT_BUG


@pytest.mark.parametrize(("bindings", "torn"), [("triton._C.libtriton", False), ("other", True)])
def test_with_triton_the_process_ends_before_its_bindings_report_leaks(
    bindings: str, torn: bool, tmp_path: Path
) -> None:
    code = (
        "import atexit, os, sys\n"
        "class Bindings:\n"
        "    write = os.write\n"
        "    def __del__(self): self.write(1, b'torn down')\n"
        f"sys.modules[{bindings!r}] = sys.kept = Bindings()\n"
        "atexit.register(lambda: print('at exit', flush=True))\n"
        "sys.argv = ['fluxtrain', 'trace', 'no-such-run']\n"
        "from fluxtrain.__main__ import main; main()"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, check=False, cwd=tmp_path, timeout=200,
    )  # fmt: skip
    assert answer.returncode == EXIT_BAD_INPUT and "at exit" in answer.stdout
    assert ("torn down" in answer.stdout) == torn


@pytest.mark.parametrize("name", ["plan", "train", "dry-run"])
def test_a_misspelt_setting_is_told_before_a_configuration_that_is_missing(
    name: str, tmp_path: Path
) -> None:
    told = command(name, "--set", "data.pth=x", folder=tmp_path)
    assert told.returncode == EXIT_BAD_INPUT
    assert told.stderr == "error: --set: unknown key data.pth, did you mean data.path?\n"


def test_the_help_comes_at_once(tmp_path: Path) -> None:
    """It reads few modules, 155 when this was written, and none that takes its time."""
    code = (
        "import sys; from fluxtrain.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: print(*sys.modules, file=sys.stderr)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, check=True, cwd=tmp_path, timeout=200,
    )  # fmt: skip
    modules = answer.stderr.split()
    assert HEAVY.isdisjoint(modules)
    assert "fluxtrain.cli" in modules and len(modules) < 300


def test_neither_the_schema_nor_the_list_of_runs_loads_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from fluxtrain.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules, file=sys.stderr)"
    )
    for name in ("schema", "runs"):
        answer = subprocess.run(
            [sys.executable, "-c", code, name],
            capture_output=True, text=True, check=False, cwd=tmp_path, timeout=200,
        )  # fmt: skip
        assert answer.stderr.split() == ["0", "False"]


def test_runs_are_listed_for_people_and_for_programs(tmp_path: Path) -> None:
    assert "no runs below" in command("runs", folder=tmp_path).stdout
    assert json.loads(command("runs", "--json", folder=tmp_path).stdout) == []
    run = RunDir.create(tmp_path / "runs", "demo")
    run.write_json(run.result, {"exit_code": 0, "message": "finished"})
    run.write_json(run.run, {"config": {}})
    listed = json.loads(command("runs", "--json", folder=tmp_path).stdout)
    assert [(one["run_id"], one["state"]) for one in listed] == [(run.run_id, "finished")]
    assert run.run_id in command("runs", folder=tmp_path).stdout
    run.result.unlink()
    told = {"exit_code": 2, "refused": True, "message": "nothing.txt does not exist"}
    run.write_json(run.error, told)
    said = command("runs", folder=tmp_path).stdout
    assert " refused " in said and said.endswith("nothing.txt does not exist\n")


def test_names_of_folders_cannot_steer_the_terminal_of_who_lists_the_runs(tmp_path: Path) -> None:
    name = "red\x1b[31m\nfinished\u202egnp\udcff"
    run = RunDir(tmp_path / "runs" / name)
    run.path.mkdir(parents=True)
    run.write_json(run.run, {"config": {}})
    said = command("runs", folder=tmp_path)
    assert said.returncode == 0 and said.stderr == ""
    assert said.stdout.startswith("red\ufffd[31m finished\ufffdgnp\ufffd ")
    assert said.stdout.count("\n") == 1 and said.stdout.rstrip("\n").isprintable()
    (listed,) = json.loads(command("runs", "--json", folder=tmp_path).stdout)
    assert listed["run_id"] == name  # programs need the name itself


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    line = f"{sys.executable} -m fluxtrain schema | head -c 10; exit ${{PIPESTATUS[0]}}"
    answer = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, check=False, cwd=tmp_path, timeout=200
    )
    assert answer.returncode == 0
    assert answer.stderr == ""


def test_a_wrong_command_line_is_one_line_and_code_two(tmp_path: Path) -> None:
    for arguments in (
        ["fly"],
        ["train", "--steps", "x", "--demo"],
        ["train"],
        ["train", "--demo", "--run-dir", ""],
        ["plan", "no.yaml"],
    ):
        said = command(*arguments, folder=tmp_path)
        assert said.returncode == 2
        assert said.stdout == ""
        assert said.stderr.startswith("error: ")
        assert said.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_closed_standard_streams_are_no_error_and_no_file_takes_their_numbers(
    tmp_path: Path,
) -> None:
    """As under a daemon: a library that prints must not write into the journal."""
    line = f"{sys.executable} -m fluxtrain schema <&- >&- 2>&-"
    assert subprocess.run(["bash", "-c", line], check=False, cwd=tmp_path).returncode == 0
    program = (
        "from fluxtrain.events.run_folder.standard_streams import open_standard_streams as whole\n"
        "whole()\n"
        "print('to nobody'); import sys; print('nor here', file=sys.stderr)\n"
        "file = open('journal', 'w')\n"
        "file.write(f'{file.fileno()} {sys.stdin.read()!r}')\n"
    )
    line = f'{sys.executable} -c "$PROGRAM" <&- >&- 2>&-'
    ended = subprocess.run(
        ["bash", "-c", line], check=False, cwd=tmp_path, env={**os.environ, "PROGRAM": program}
    )
    assert ended.returncode == 0
    number, read = (tmp_path / "journal").read_text().split(" ", 1)
    assert int(number) > 2 and read == "''"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_an_output_that_is_full_is_said_as_such(tmp_path: Path) -> None:
    line = f"{sys.executable} -m fluxtrain schema > /dev/full"
    ended = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert ended.returncode == EXIT_NO_SPACE
    assert "standard output cannot be written (No space left on device)" in ended.stderr
    assert ended.stderr.count("\n") == 1


INTERRUPTED = """
import os, signal, sys
from fluxtrain.cli import main
import fluxtrain.events.run_folder.run_dir as rundir
rundir.list_runs = lambda: os.kill(os.getpid(), signal.SIGINT)
main(["runs"])
"""


def test_an_interrupt_of_any_command_is_told_and_ends_with_130(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED],
        capture_output=True, text=True, check=False, cwd=tmp_path, timeout=200,
    )  # fmt: skip
    assert ended.returncode == EXIT_INTERRUPTED
    assert (ended.stdout, ended.stderr) == ("", "interrupted before anything was started\n")


def test_signs_that_an_output_does_not_have_become_marks(tmp_path: Path) -> None:
    program = (
        "from fluxtrain.events.run_folder.standard_streams import open_standard_streams as whole\n"
        "whole()\n"
        "import sys; print('f\u00fcr'); print('na\u00efve', file=sys.stderr)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "f?r\n", "na\\xefve\n")
