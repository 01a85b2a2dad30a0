"""The configuration: every mistake is named with its cure, and nothing is taken in silence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from fluxtrain.config.schema import (
    RunConfig,
    config_of,
    demo_config,
    json_schema,
    load_config,
    overridden,
    settings,
    validate,
)
from fluxtrain.config.text import parse_yaml
from fluxtrain.errors import EXIT_BAD_INPUT, BadInput


def written(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.steps=0", "train.steps = 0: must be greater than or equal to 1 (leave it out"),
        ("train.eps=1e-300", "must be greater than or equal to 1e-30"),
        ("train.eps=0", "must be greater than or equal to 1e-30"),
        ("train.learning_rate=-1", "must be greater than or equal to 0"),
        ("train.learning_rate=.inf", "must be a finite number"),
        ("train.lerning_rate=1", "did you mean train.learning_rate?"),
        ("steps=3", "did you mean train.steps?"),
        ("trian.steps=3", "did you mean train?"),
        ("train=3", "train must be a mapping"),
        ("train.betas=[0.9, 1.0]", "below 1"),
        ("train.betas=[0.9]", "train.betas = [0.9]: must be two numbers (as in [0.9, 0.999])"),
        ("train.betas=[0.1, 0.2, 0.3]", "must be two numbers (as in [0.9, 0.999])"),
        ("train.max_grad_norm=0", "use null"),
        ("train.warmup_steps=4000", "more than train.steps"),
        ("data.zzzz=1", "sequence_length"),
        ("data.held_out=1.0", "must be less than 1"),
        ("placement.offload=some", "'weights' or 'max'"),
        ("train.batch_rows=many", "or 'auto'"),
        ("placement.aggressiveness=quick", "or 'auto', 'fast', 'balanced' or 'fit'"),
        ("train.steps", "write section.key=value"),
        ("train.steps=[", "not a YAML value"),
        ("train.steps=" + "[" * 5000, "not a YAML value"),
        ("train.steps=true", "train.steps = True: must not be true or false"),
        ("train.learning_rate=false", "must not be true or false"),
        (f"train.steps={2**63}", "must be at most"),
        (f"data.seed={2**64}", "data.seed"),
        ("train.epochs=1.0e+300", "must be at most 1e+15"),
        ("placement.budget_gib=1.0e+300", "must be at most 1e+15"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_key_and_cure(override: str, expected: str) -> None:
    with pytest.raises(BadInput) as caught:
        demo_config([override])
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == EXIT_BAD_INPUT


@pytest.mark.parametrize("blank", ["", " ", "  # as before"])
@pytest.mark.parametrize("key", [setting.key for setting in settings(RunConfig())])
def test_a_setting_with_nothing_after_its_equals_sign_is_refused(key: str, blank: str) -> None:
    with pytest.raises(BadInput) as caught:
        demo_config([f"{key}={blank}"])
    assert f"--set {key}={blank}: a value is empty: write one" in str(caught.value)
    assert "`null` says so" in str(caught.value)
    assert caught.value.exit_code == EXIT_BAD_INPUT


@pytest.mark.parametrize("override", ["train={steps: }", "train.betas=[0.9, !!null '']"])
def test_an_empty_value_within_another_is_refused(override: str) -> None:
    with pytest.raises(BadInput, match="a value is empty"):
        demo_config([override])


@pytest.mark.parametrize("null", ["null", "~"])
def test_null_says_none_where_a_setting_may_have_none(null: str) -> None:
    keys = ("model.revision", "train.steps", "train.max_grad_norm", "placement.budget_gib")
    config = demo_config([f"{key}={null}" for key in keys])
    listed = {setting.key: setting.value for setting in settings(config)}
    assert [listed[key] for key in keys] == [None] * len(keys)


@pytest.mark.parametrize("off", ["off", "Off", "no", "false", "'off'"])
def test_a_cache_that_is_off_or_on_is_no_folder_of_that_name(off: str) -> None:
    assert demo_config([f"data.token_cache={off}"]).data.token_cache == "off"
    text = f"data: {{token_cache: {off}}}"
    assert validate(parse_yaml(text, "it"), "it").data.token_cache == "off"
    on = {"off": "on", "Off": "yes", "no": "true"}.get(off, "'on'")
    with pytest.raises(BadInput, match="must be auto, off, or a folder such as ./tokens"):
        demo_config([f"data.token_cache={on}"])


def test_every_mistake_is_named_at_once() -> None:
    with pytest.raises(BadInput) as caught:
        demo_config(["train.steps=0", "data.held_out=2", "modle.path=x"])
    for key in ("train.steps", "data.held_out", "modle"):
        assert key in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is empty"),
        ("# only a comment\n", "is empty"),
        ("- a\n- b\n", "not a mapping of settings but a list"),
        ("model:\n  path: demo\n bad: [\n", "line 3: not valid YAML"),
        (
            "train:\n  steps: 1\n  steps: 2\n",
            "line 3: not valid YAML: the key 'steps' is given twice",
        ),
        ("train: !!python/object:os.system {}\n", "not valid YAML"),
        ("model: " + "{a: " * 5000, "nested too deeply"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_configuration_is_refused(
    tmp_path: Path, text: str, expected: str
) -> None:
    with pytest.raises(BadInput) as caught:
        load_config(written(tmp_path, text))
    assert expected in str(caught.value)
    assert "run.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_aliases_that_grow_without_bound_are_refused_at_once(tmp_path: Path) -> None:
    doubled = "".join(f"a{i + 1}: &a{i + 1} [*a{i}, *a{i}]\n" for i in range(60))
    with pytest.raises(BadInput) as caught:
        load_config(written(tmp_path, f"a0: &a0 [x]\n{doubled}model: {{path: *a60}}\n"))
    assert "model.path = [" in str(caught.value)
    assert len(str(caught.value)) < 10_000


def test_what_is_not_a_text_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such file"):
        load_config(tmp_path / "absent.yaml")
    with pytest.raises(BadInput, match="is a folder"):
        load_config(tmp_path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00model")
    with pytest.raises(BadInput, match="not UTF-8"):
        load_config(binary)
    huge = tmp_path / "huge.yaml"
    huge.write_bytes(b"a" * (1 << 21))
    with pytest.raises(BadInput, match="not a configuration file"):
        load_config(huge)


def test_overrides_win_over_the_file_and_do_not_touch_the_rest(tmp_path: Path) -> None:
    path = written(tmp_path, "train: {steps: 5, learning_rate: 3e-4}\n")
    config = load_config(path, ["train.steps=7", "data.path=a=b.txt"])
    assert config.train.steps == 7
    assert config.train.learning_rate == 3e-4
    assert config.data.path == "a=b.txt"


@pytest.mark.parametrize(
    ("written_options", "overrides", "options"),
    [
        ("compress: int8, config: {block: 128}", ["comm.compress=topk"], {}),
        ("compress: int8, config: {block: 128}", ["comm.compress=int8"], {"block": 128}),
        (
            "compress: int8, config: {block: 128}",
            ["comm.config={ratio: 0.1}", "comm.compress=topk"],
            {"ratio": 0.1},
        ),
        (
            "compress: int8, config: {block: 128}",
            ["comm.compress=topk", "comm.config.ratio=0.1"],
            {"ratio": 0.1},
        ),
        ("config: {block: 128}", ["comm.compress=int8"], {"block": 128}),
        (
            "compress: int8, config: {block: 128}",
            ["comm.config.num_bits=4"],
            {"block": 128, "num_bits": 4},
        ),
    ],
)
def test_options_of_a_compression_do_not_go_over_to_another(
    tmp_path: Path, written_options: str, overrides: list[str], options: dict[str, object]
) -> None:
    path = written(tmp_path, f"comm: {{{written_options}}}\nparallel: {{mode: fsdp}}\n")
    assert load_config(path, overrides).comm.config == options


@given(
    steps=st.none() | st.integers(1, 10**9),
    rate=st.just("auto") | st.floats(0, 10, allow_nan=False),
    rows=st.just("auto") | st.integers(1, 10**6),
    held_out=st.floats(0, 0.999),
)
def test_any_valid_configuration_round_trips(
    steps: int | None, rate: float | str, rows: int | str, held_out: float
) -> None:
    raw = {
        "train": {"steps": steps, "learning_rate": rate, "batch_rows": rows},
        "data": {"held_out": held_out},
    }
    config = validate(raw)
    assert validate(yaml.safe_load(yaml.safe_dump(config.model_dump(mode="json")))) == config
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


def test_every_setting_is_explained_and_its_default_is_valid() -> None:
    listed = list(settings(RunConfig()))
    assert len(listed) >= 30
    for setting in listed:
        assert len(setting.description) > 10, setting.key
        assert not setting.changed
    changed = {setting.key for setting in settings(demo_config()) if setting.changed}
    assert "train.steps" in changed
    assert "train.seed" not in changed


def test_the_schema_describes_every_setting() -> None:
    text = json.dumps(json_schema())
    for setting in settings(RunConfig()):
        assert f'"{setting.key.rpartition(".")[2]}"' in text
    assert json_schema()["additionalProperties"] is False


def test_the_configuration_needs_no_torch() -> None:
    code = "import fluxtrain.config.schema, sys; print('torch' in sys.modules)"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=200
    )
    assert answer.stdout.strip() == "False"


def test_model_and_data_make_a_run_without_a_file() -> None:
    config = config_of(["model.path=o/n", "data.path=[a.txt, {path: b.txt, weight: 2}]"])
    assert config is not None and config.model.path == "o/n"
    assert len(config.data.path) == 2


@pytest.mark.parametrize("sets", [[], ["model.path=o/n"], ["data.path=d"], ["model=3", "data=4"]])
def test_one_of_them_alone_makes_none(sets: list[str]) -> None:
    assert config_of(sets) is None


def test_a_mistake_in_one_is_told_with_its_key() -> None:
    with pytest.raises(BadInput, match="learning_rate"):
        config_of(["model.path=m", "data.path=d", "train.learning_rate=fast"])


@pytest.mark.parametrize("written_as", ["fsdp", "trainer.fsdp"])
@pytest.mark.parametrize("set_as", ["fsdp", "trainer.fsdp"])
@pytest.mark.parametrize("content", [{}, {"enabled": True, "cpu_offload": False}])
def test_settings_of_a_trainer_are_those_of_fsdp(
    content: dict[str, Any], set_as: str, written_as: str
) -> None:
    raw = {"trainer": {"fsdp": content}} if written_as == "trainer.fsdp" else {"fsdp": content}
    words = ["fsdp.enabled=true", f"{set_as}.cpu_offload=true"]
    settings = overridden(raw if content else {}, words, "run.yaml").fsdp
    assert settings.enabled and settings.cpu_offload


@pytest.mark.parametrize(
    ("asked", "cure"),
    [
        (["comm.profile_steps=2"], ["comm.profile_steps=0"]),
        (["comm.compress=int8", "comm.gather=fp8"], ["comm.compress=none", "comm.gather=none"]),
    ],
)
def test_what_is_of_sharded_models_is_refused_without_them(
    asked: list[str], cure: list[str]
) -> None:
    with pytest.raises(BadInput, match=f"parallel.mode=fsdp, or {' '.join(cure)}"):
        demo_config(asked)
    for cured in (cure, ["parallel.mode=fsdp"]):
        demo_config([*asked, *cured])
