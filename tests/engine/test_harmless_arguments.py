"""Arguments are repeated in messages without the terminal codes that they hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from fluxtrain.cli import main
from fluxtrain.commands.output import complain, tell
from fluxtui import launch

EVIL = "\x1b]0;title\x07\x1b[31m\x9b2J\u202egnp\r\x08\udcff"
WORDS = (
    (f"--{EVIL}",), (EVIL,), ("train", f"--{EVIL}"), ("train", EVIL), ("train", "--steps", EVIL),
    ("train", "--demo", EVIL, EVIL), ("train", "--demo", "--set", EVIL),
    ("train", "--demo", "--set", f"{EVIL}=1"), ("train", "--demo", "--set", f"train.{EVIL}=1"),
    ("train", "--demo", "--set", f"train.steps={EVIL}"), ("train", "--demo", "--device", EVIL),
    ("train", "--resume", EVIL), ("train", "--demo", "--trace", f"/nowhere/{EVIL}"),
    ("train", "--demo", "--run-dir", f"/proc/{EVIL}"), ("train", "--debug", EVIL),
    ("plan", EVIL), ("inspect", EVIL), ("export", EVIL), ("trace", EVIL),
    ("evaluate", EVIL), ("generate", EVIL), ("apply", EVIL, EVIL), ("undo", EVIL), ("init", EVIL),
    ("runs", EVIL), ("probe", f"--{EVIL}={EVIL}"), ("doctor", f"-{EVIL}"), (f"-{EVIL}",),
)  # fmt: skip
APP = (
    (f"--{EVIL}",), (EVIL, EVIL), ("--attach", EVIL), ("--resume", EVIL), ("--theme", EVIL),
    ("--variant", EVIL), ("--steps", EVIL), ("--batch-rows", EVIL), (EVIL,), ("--set", EVIL),
    (f"--demo={EVIL}",), ("--demo", f"--{EVIL}={EVIL}"), ("--data", EVIL, "--yes"),
)  # fmt: skip


def assert_harmless(said: str) -> None:
    assert said.strip()
    assert [c for c in said if not c.isprintable() and c != "\n"] == []
    said.encode()


@pytest.mark.parametrize("arguments", WORDS, ids=range(len(WORDS)))
def test_fluxtrain_repeats_no_terminal_code(
    arguments: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FLUXTRAIN_RUNS", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert_harmless(said.err + said.out)


@pytest.mark.parametrize("arguments", APP, ids=range(len(APP)))
def test_the_app_repeats_no_terminal_code(
    arguments: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FLUXTRAIN_RUNS", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    try:
        code: object = launch.main([*arguments, "--headless"])
    except SystemExit as ended:
        code = ended.code
    said = capfd.readouterr()
    assert code == 2
    assert_harmless(said.err + said.out)


def test_notes_and_tracebacks_are_harmless_too(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise RuntimeError(EVIL)
    except RuntimeError as error:
        error.add_note(f"the whole story is in {EVIL}")
        assert tell(error, debug=True) == 1
    complain(f"one\ntwo {EVIL}")
    said = capsys.readouterr().err
    assert_harmless(said)
    assert "one\ntwo " in said and "Traceback" in said
