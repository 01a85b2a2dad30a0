"""`fluxtrain verify-resume`: equal here, or what differs first, and nothing is left."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file, save

from fluxtrain.cli import main
from fluxtrain.commands import verify_resume as verifying
from fluxtrain.commands.output import silent
from fluxtrain.config.schema import load_config
from fluxtrain.errors import BadInput, FluxTrainError
from tests.engine import forked

MakeConfig = Callable[..., Path]


def listed_again(path: Path, name: str, content: bytes) -> None:
    """Put other content into a file, its hash into the manifest, and the manifest's own."""
    (path / name).write_bytes(content)
    manifest = json.loads((path / "manifest.json").read_text())
    facts = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    sealed = {key: value for key, value in manifest.items() if key != "sha256"}
    sealed["files"][name] = facts
    text = json.dumps(sealed, sort_keys=True, separators=(",", ":"))
    sealed["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(sealed))


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLUXTRAIN_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


def trained(arguments: Sequence[str]) -> int:
    """`fluxtrain train ARGUMENTS` in a forked process."""
    return forked.exit_code(main, ["train", *arguments])


def altering(harm: Callable[[Path], None]) -> Callable[[Sequence[str]], int]:
    """As `trained`; what the second process finds is harmed before it starts."""

    def start(arguments: Sequence[str]) -> int:
        if arguments[0] == "--resume":
            harm(Path(arguments[1]))
        return trained(arguments)

    return start


def test_a_resume_is_equal_in_every_value_and_leaves_nothing(
    run_config: MakeConfig, runs: Path
) -> None:
    config = load_config(run_config(train__steps=500, train__warmup_steps=100))
    said: list[str] = []
    found = verifying.verify_resume(config, 4, said.append, trained)
    assert found.equal and (found.steps, found.saved_step) == (4, 2)
    assert found.values > 3 * 10_000, "weights, m and v"
    assert len(said) == 3
    page = verifying.page(found)
    assert page.startswith("equal: ") and f"{found.values:,} values" in page
    assert list(runs.iterdir()) == []


def test_a_weight_that_a_resume_changes_is_found_with_the_first_step(
    run_config: MakeConfig, runs: Path
) -> None:
    def harm(middle: Path) -> None:
        file = sorted(middle.glob("shard-*"))[0]
        tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
        name = next(name for name in sorted(tensors) if name.endswith("weight_bits"))
        tensors[name].mul_(1.5)
        listed_again(middle, file.name, save(tensors))

    config = load_config(run_config())
    found = verifying.verify_resume(config, 4, silent, altering(harm))
    assert not found.equal
    assert found.first_step == 3
    assert found.first_tensor is not None and "loss of step 3 was" in verifying.page(found)
    assert list(runs.iterdir()) == []


def test_a_moment_that_changes_no_loss_yet_is_found_by_name(run_config: MakeConfig) -> None:
    def harm(middle: Path) -> None:
        for file in sorted(middle.glob("shard-*")):
            tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
            for name, tensor in tensors.items():
                if name.endswith(".v"):
                    tensor.view(-1)[0] += 1.0
                    listed_again(middle, file.name, save(tensors))
                    return

    config = load_config(run_config())
    found = verifying.verify_resume(config, 2, silent, altering(harm))
    assert found.first_step is None and found.first_tensor is not None
    assert found.difference is not None and "though all losses are the same" in found.difference


def test_the_command_ends_with_6_and_names_the_difference(
    run_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = verifying.ResumeAnswer(
        steps=4, saved_step=2, tensors=1, values=9, first_step=3, difference="the loss of step 3"
    )
    monkeypatch.setattr(verifying, "verify_resume", lambda *_: answer)
    with pytest.raises(SystemExit) as ended:
        main(["verify-resume", str(run_config()), "--json"])
    assert ended.value.code == 6
    told = capsys.readouterr()
    assert json.loads(told.out)["first_step"] == 3
    assert "not equal: the loss of step 3" in told.err


def test_what_cannot_be_verified_says_why(run_config: MakeConfig, runs: Path) -> None:
    config = load_config(run_config())
    with pytest.raises(BadInput, match="no middle"):
        verifying.verify_resume(config, 1, silent, trained)
    with pytest.raises(FluxTrainError, match="ended with 3") as raised:
        verifying.verify_resume(config, 2, silent, lambda _: 3)
    assert raised.value.exit_code == 3
    assert not runs.exists() or list(runs.iterdir()) == []
