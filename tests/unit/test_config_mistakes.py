"""Mistakes at the front door: other programs' names, wrong spelling, paths that are not there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fluxtrain.commands.paths import refuse_missing_paths
from fluxtrain.config.aliases import _SAYS, ALIASES, NOT_NEEDED
from fluxtrain.config.errors import unknown_key
from fluxtrain.config.schema import RunConfig, demo_config, settings, validate
from fluxtrain.errors import BadInput
from fluxtrain.models.model_files import is_local

KEYS = [setting.key for setting in settings(RunConfig())]


def refusal(*overrides: str) -> str:
    with pytest.raises(BadInput) as caught:
        demo_config(list(overrides))
    return str(caught.value).removeprefix("the demo: ")


def test_every_name_of_a_peer_leads_to_a_setting_that_is_there_and_hides_none() -> None:
    assert len(ALIASES) > 200
    assert set(ALIASES.values()) <= set(KEYS)
    ours = {key.rpartition(".")[2] for key in KEYS}
    assert not ours & ALIASES.keys() and not ours & NOT_NEEDED.keys()
    assert not ALIASES.keys() & NOT_NEEDED.keys()
    assert _SAYS.keys() <= ALIASES.keys()
    for name, key in ALIASES.items():
        assert f"did you mean {key}?" in unknown_key(name if "." in name else f"zz.{name}", KEYS)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        # TrainingArguments and TRL, LLaMA-Factory, Axolotl, Unsloth, torchtune
        ("train.lr", "train.learning_rate"),
        ("train.num_train_epochs", "train.epochs"),
        ("per_device_train_batch_size", "train.batch_rows"),
        ("model_name_or_path", "model.path"),
        ("cutoff_len", "data.sequence_length"),
        ("finetuning_type", "method.name"),
        ("max-seq-length", "data.sequence_length"),
        ("clip_grad_norm", "train.max_grad_norm"),
        ("warmup_ratio", "train.warmup_steps"),
        ("load_best_model_at_end", "train.final_model"),
        ("report_to", "trackers.report_to"),
        # spelling, and the right name in another section
        ("train.lerning_rate", "train.learning_rate"),
        ("train.gradient_acumulation_steps", "train.accumulation"),
        ("data.held_outt", "data.held_out"),
        ("train.dtype", "model.dtype"),
        ("seed", "train.seed"),
        ("trian", "train"),
    ],
)
def test_a_wrong_name_finds_the_setting(key: str, meant: str) -> None:
    said = refusal(f"{key}=1")
    assert said.startswith(f"unknown key {key}, did you mean {meant}?")
    assert "settings of" not in said and "\n" not in said


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("output_dir", "--run-dir PATH"),
        ("train.gradient_checkpointing", "the plan decides"),
        ("packing", "rows are always packed"),
        ("warmup_ratio", "(in steps, not as a share)"),
        ("load_in_4bit", "(as in method.name=qlora)"),
        ("bf16", "(as in model.dtype=bfloat16)"),
    ],
)
def test_what_the_name_alone_does_not_say_is_said(key: str, words: str) -> None:
    assert words in refusal(f"{key}=1")


def test_what_is_near_nothing_gets_a_short_list_once() -> None:
    said = refusal("train.zzzz=1", "train.qqqq=2", "data.zzzz=3", "xxxx=4", "yyyy=5")
    assert said.count("settings of train:") == said.count("settings of data:") == 1
    assert said.count("sections:") == 1
    assert "and 10 more (all: `fluxtrain schema`)" in said
    assert all(f"unknown key {key}" in said for key in ("train.qqqq", "xxxx", "yyyy"))
    assert len(refusal("train.zzzz=1")) < 250


def test_every_path_that_is_missing_is_named_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("{}")
    (tmp_path / "models" / "llama").mkdir(parents=True)
    raw = {
        "model": {"path": "models/lama"},
        "data": {"path": ["data/trian.jsonl", "data/*.jsonl", "hf://datasets/a/b",
                          {"path": "/nowhere/x.jsonl"}],
                 "held_out_path": "data/train.jsonl"},
        "samples": {"prompts": "asked.txt"},
    }  # fmt: skip
    with pytest.raises(BadInput) as caught:
        refuse_missing_paths(validate(raw))
    told = str(caught.value).split("; ")
    here = f"does not exist in {tmp_path}: check"
    assert told == [
        f"models/lama {here} model.path, or did you mean models/llama?",
        f"data/trian.jsonl {here} data.path, or did you mean data/train.jsonl?",
        "/nowhere/x.jsonl does not exist: check data.path",
        f"asked.txt {here} samples.prompts",
    ]


@pytest.mark.parametrize(
    ("path", "local"),
    [
        ("./llama", True), ("/models/llama", True), ("~/llama", True), ("a/b/c", True),
        ("model.gguf", True), ("owner/model.safetensors", True), ("my model", True),
        ("owner/name", False), ("gpt2", False), ("Qwen/Qwen2.5-0.5B", False),
    ],
)  # fmt: skip
def test_a_hub_is_asked_only_for_what_can_be_on_one(path: str, local: bool) -> None:
    assert is_local(path) == local
    config = validate({"model": {"path": path}})
    if local:
        with pytest.raises(BadInput, match="does not exist"):
            refuse_missing_paths(config)
    else:
        refuse_missing_paths(config)


def test_odd_paths_are_missing_too(tmp_path: Path) -> None:
    for path in ("x" * 5000, "~nobody_of_that_name/x", "a\0b"):
        with pytest.raises(BadInput, match="does not exist"):
            refuse_missing_paths(validate({"data": {"path": path}}))


def test_paths_without_model_or_data_are_said_before_torch_is_there(tmp_path: Path) -> None:
    (tmp_path / "w.gguf").touch()
    (tmp_path / "m" / "config.json").mkdir(parents=True)
    told = {
        "model.path=./nope": "./nope does not exist in ",
        "model.path=.": ". holds GGUF files, which are for inference",
        "model.path=./m": "m/config.json is not a file",
        "model.path=w.gguf": "w.gguf is a file: name the folder that holds config.json",
        "data.path=./nope": "./nope does not exist in ",
        "data.path=./*.csv": "data.path ./*.csv matches no file",
        "data.path=.": ". holds no file that can be read (.gguf)",
    }
    code = (
        "import sys, fluxtrain.cli as cli\n"
        "for setting in sys.argv[1:]:\n"
        "    try: cli._named_config('plan', None, True, [setting])\n"
        "    except cli.FluxTrainError as error: print(error)\n"
        "print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, *told],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    *lines, imported = out.stdout.splitlines()
    assert imported == "False False"
    for line, words in zip(lines, told.values(), strict=True):
        assert line.startswith(words)


@pytest.mark.parametrize(
    ("override", "key", "means"),
    [
        ("trackers.report_to=wandb", "trackers.report_to", ("wandb",)),
        ("trackers.report_to=wandb, mlflow", "trackers.report_to", ("wandb", "mlflow")),
        ("trackers.report_to=none", "trackers.report_to", ()),
        ("method.targets=q_proj", "method.targets", ["q_proj"]),
        ("method.targets=q_proj,v_proj", "method.targets", ["q_proj", "v_proj"]),
        ("method.targets=all-linear", "method.targets", "auto"),
        ("train.no_decay=norms", "train.no_decay", ("norms",)),
        ("data.ignore=license", "data.ignore", ("license",)),
    ],
)
def test_one_name_is_a_list_of_one(override: str, key: str, means: object) -> None:
    values = {setting.key: setting.value for setting in settings(demo_config([override]))}
    assert values[key] == means


def test_no_refusal_says_tuple() -> None:
    assert "trackers.report_to = 'wandbb': must be 'tensorboard', 'wandb'" in refusal(
        "trackers.report_to=wandbb"
    )
    for override in ("trackers.report_to=3", "train.betas=0.9", "data.ignore=3"):
        assert "must be a list" in refusal(override), override


def test_a_section_that_another_program_has_is_read_key_by_key() -> None:
    said = refusal("lora.r=8", "lora.alpha=16", "wandb.project=p")
    assert "lora.r, did you mean method.rank?" in said
    assert "lora.alpha, did you mean method.alpha?" in said
    assert "wandb.project, did you mean trackers.project?" in said
    assert "unknown key training, did you mean train?" in refusal("training.lr=1")
    assert "unknown key lora, did you mean method.name?" in refusal("lora=8")
