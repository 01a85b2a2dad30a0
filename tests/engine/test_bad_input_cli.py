"""Bad input through the command: the documented exit code, one clear line, nothing lost."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from fluxtrain.cli import main
from fluxtrain.events.run_folder.run_dir import RunDir
from tests.engine import forked


@dataclass(frozen=True)
class Answer:
    code: int
    stdout: str
    stderr: str


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Answer]:
    """The command in this process; every refusal here comes before a thread trains."""
    monkeypatch.setenv("FLUXTRAIN_RUNS", str(tmp_path / "runs"))

    def run(*arguments: object) -> Answer:
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return Answer(caught.value.code, said.out, said.err)

    return run


def assert_refused(answer: Answer, code: int, *expected: str) -> None:
    """The code, all the words, one line, no traceback."""
    assert answer.code == code, answer
    for text in expected:
        assert text in answer.stderr
    assert "Traceback" not in answer.stdout + answer.stderr
    lines = [line for line in answer.stderr.splitlines() if line.strip()]
    assert len(lines) == 1
    assert lines[0].startswith("error: ")


Call = Callable[..., Answer]
RunConfig = Callable[..., Path]
ModelFolder = Callable[..., Path]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train"], "nothing to train"),
        (["train", "absent.yaml"], "no such file"),
        (["train", "absent.yaml", "--demo"], "leave one out"),
        (["train", "--demo", "--steps", "0"], "train.steps = 0"),
        (["train", "--demo", "--steps", "many"], "--steps"),
        (["train", "--demo", "--set", "train.lerning_rate=1"], "did you mean train.learning_rate?"),
        (["train", "--demo", "--set", "train.learning_rate=-1"], "greater than or equal to 0"),
        (["train", "--demo", "--resume", "/nowhere"], "no such run directory"),
        (["apply", "last"], "see `fluxtrain apply --help`"),
        (["serve", "keys", "--folder", "x", "list"], "see `fluxtrain serve keys --help`"),
        (["nonsense"], "see `fluxtrain --help`"),
        (["train", "--resume", "auto"], "name a CONFIG.yaml, --run-dir"),
        (["train", "--demo", "--device", "tpu"], "placement.device"),
        (["train", "--demo", "--bogus"], "--bogus"),
        (["plan"], "nothing to plan"),
        (["evaluate", "last"], "set FLUXTRAIN_RUNS to the folder of the runs"),
        (["fly"], "fly"),
    ],
)
def test_a_wrong_command_line_is_refused_before_anything_is_made(
    call: Call, tmp_path: Path, arguments: list[str], expected: str
) -> None:
    assert_refused(call(*arguments), 2, expected)
    assert not (tmp_path / "runs").exists()


def damaged_model(folder: Path, harm: str) -> Path:
    weights = folder / "model.safetensors"
    if harm == "NaN weights":
        tensors = load_file(weights)
        next(iter(tensors.values())).view(-1)[3] = float("nan")
        save_file(tensors, weights, metadata={"format": "pt"})
    elif harm == "remote code":
        config = json.loads((folder / "config.json").read_text())
        config["auto_map"] = {"AutoModelForCausalLM": "modeling.Evil"}
        (folder / "config.json").write_text(json.dumps(config))
    elif harm == "hub kernel":
        config = json.loads((folder / "config.json").read_text())
        config["_attn_implementation"] = "somebody/kernel"
        (folder / "config.json").write_text(json.dumps(config))
    elif harm == "wrong type":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "hidden_size": "big"}))
    return folder


@pytest.mark.parametrize(
    ("harm", "expected"),
    [
        ("NaN weights", "NaN"),
        ("remote code", "trust_remote_code"),
        ("hub kernel", "somebody/kernel"),
        ("wrong type", "hidden_size"),
    ],
)
def test_a_model_that_cannot_be_used_is_refused(
    call: Call, run_config: RunConfig, model_folder: ModelFolder, tmp_path: Path,
    harm: str, expected: str,
) -> None:  # fmt: skip
    folder = damaged_model(model_folder("llama"), harm)
    before = sorted(path.name for path in folder.iterdir())
    run_dir = tmp_path / "run"
    answer = call("train", run_config(model__path=str(folder)), "--run-dir", run_dir)
    assert_refused(answer, 2, expected)
    assert sorted(path.name for path in folder.iterdir()) == before
    error = json.loads((run_dir / "error.json").read_text())
    assert error["exit_code"] == 2
    assert f"error: {error['message']}" == answer.stderr.strip()
    assert "Traceback" in error["traceback"]
    assert "Traceback" in (run_dir / "engine.log").read_text()
    assert RunDir(run_dir).liveness() == "refused"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("short.txt", b"a few words", "tokens"),
        ("chat.jsonl", b'{"messages": [{"content": "hi"}]}\n' * 50, "role"),
        ("half.jsonl", b'{"text": "cut \\ud83d"}\n', "half of a pair"),
        ("digits.jsonl", b'{"text": ' + b"9" * 9999 + b"}\n", "line 1"),
    ],
)
def test_data_that_cannot_be_used_is_refused(
    call: Call, run_config: RunConfig, tmp_path: Path, name: str, content: bytes, expected: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    answer = call("train", run_config(data__path=str(path)), "--run-dir", tmp_path / "run")
    assert_refused(answer, 2, expected)
    assert path.read_bytes() == content
    told = answer.stderr.removeprefix("error: ").strip()
    assert_refused(call("evaluate", tmp_path / "run"), 2, told, "--resume")  # why there is no model


def test_a_run_directory_that_is_used_already_is_refused(
    call: Call, run_config: RunConfig, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    config = run_config()
    assert call("train", config, "--run-dir", run_dir).code == 0
    journal = (run_dir / "events.ndjson").read_bytes()
    assert_refused(call("train", config, "--run-dir", run_dir), 2, "--resume auto")
    with RunDir(run_dir).lock():
        again = call("train", config, "--run-dir", run_dir, "--resume", "auto")
    assert_refused(again, 2, "in use by process")
    assert again.stdout == ""  # nothing to watch: no run of its own was begun
    assert (run_dir / "events.ndjson").read_bytes() == journal
    assert json.loads((run_dir / "result.json").read_text())["exit_code"] == 0
    assert not (run_dir / "error.json").exists()


def test_a_run_directory_that_cannot_be_made_is_refused(
    call: Call, run_config: RunConfig, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    config = run_config()
    assert_refused(call("train", config, "--run-dir", tmp_path / "file"), 2, "is a file")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert_refused(call("train", config, "--run-dir", tmp_path / "link"), 2, "leads nowhere")
    below = tmp_path / "file" / "run"
    assert_refused(call("train", config, "--run-dir", below), 2, "--run-dir")
    read_only = "/proc/fluxtrain-run"  # where not even root can make a folder
    assert_refused(call("train", config, "--run-dir", read_only), 2, "--run-dir")
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_resume_of_what_is_no_run_is_refused(call: Call, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert_refused(call("train", "--resume", tmp_path / "empty"), 2, "there is no run in it")
    assert_refused(
        call("train", "--demo", "--resume", tmp_path / "empty", "--run-dir", tmp_path / "other"),
        2,
        "leave one out",
    )


def test_a_model_that_does_not_fit_says_what_it_needs(
    call: Call, run_config: RunConfig, tmp_path: Path
) -> None:
    config = run_config(placement__budget_gib=0.00001)
    answer = call("train", config, "--run-dir", tmp_path / "run")
    assert_refused(answer, 3, "needs", "device memory")
    assert re.search(r"[\d.]+ (KiB|MiB|GiB) of device memory", answer.stderr)
    assert json.loads((tmp_path / "run" / "error.json").read_text())["exit_code"] == 3
    assert_refused(call("plan", config), 3, "needs")
    assert_refused(call("plan", config, "--set", "placement.budget_gib=1e-300"), 3, "needs")


def test_a_model_that_does_not_fit_is_refused_before_its_weights_are_read(
    call: Call, run_config: RunConfig, model_folder: ModelFolder, tmp_path: Path
) -> None:
    folder = model_folder("llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 1 << 30}))
    answer = call("train", run_config(model__path=str(folder)), "--run-dir", tmp_path / "run")
    assert_refused(answer, 3, "does not fit", "TiB")


def test_a_full_disk_ends_with_five_and_keeps_the_checkpoint_before(
    run_config: RunConfig, fluxtrain: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
) -> None:  # fmt: skip
    """A limit on the size of files refuses as a full disk does, also for root."""
    run_dir = tmp_path / "run"
    config = run_config(train__steps=6, train__checkpoint_every=2)
    assert fluxtrain("train", config, "--run-dir", run_dir, "--steps", "2").returncode == 0
    kept = {p: p.read_bytes() for p in (run_dir / "checkpoints").rglob("*") if p.is_file()}
    shutil.rmtree(run_dir / "model")
    largest = max(len(content) for content in kept.values())
    limited = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({largest - 1}, {largest - 1}));"
        "from fluxtrain.cli import main; main()"
    )
    answer = forked.python("-c", limited, "train", config, "--run-dir", run_dir, "--resume", "auto")
    assert_refused(Answer(answer.returncode, answer.stdout, answer.stderr), 5, "free some space")
    assert {path: path.read_bytes() for path in kept} == kept
    assert [p.name for p in (run_dir / "checkpoints").iterdir()] == ["step-00000002"]
    assert json.loads((run_dir / "error.json").read_text())["exit_code"] == 5


def test_a_debug_run_shows_the_traceback_and_keeps_the_code(
    call: Call, run_config: RunConfig, tmp_path: Path
) -> None:
    config = run_config(data__path=str(tmp_path / "absent.txt"))
    answer = call("train", config, "--run-dir", tmp_path / "run", "--debug")
    assert answer.code == 2
    assert "Traceback" in answer.stderr
    assert answer.stderr.splitlines()[-1].startswith("error: ")


def test_a_bug_of_ours_says_so_and_where_the_story_is(
    call: Call, run_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("slot 7")

    monkeypatch.setattr("fluxtrain.train.inputs.load_inputs", broken)
    answer = call("train", run_config(), "--run-dir", tmp_path / "run")
    assert answer.code == 1
    assert "this is a bug of FluxTrain: KeyError: 'slot 7'" in answer.stderr
    assert str(tmp_path / "run" / "engine.log") in answer.stderr
    assert "Traceback" not in answer.stderr
    error = json.loads((tmp_path / "run" / "error.json").read_text())
    assert (error["exit_code"], error["kind"]) == (1, "KeyError")
    assert "slot 7" in (tmp_path / "run" / "engine.log").read_text()
