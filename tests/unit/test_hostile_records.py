"""Whatever stands in a machine's file, a file of prompts, or the records of a run: an answer, or
BadInput with words, in time, and never another exception."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fluxtrain.config.schema import demo_config
from fluxtrain.errors import BadInput
from fluxtrain.events.run_folder.own_files import model_files, of_model, others_in
from fluxtrain.events.run_folder.run_dir import RunDir, list_runs
from fluxtrain.events.trace.ring import RingReader, read_ring
from fluxtrain.models.generate.prompts import read_prompts
from fluxtrain.plan.machine_file import read_machine_file
from fluxtrain.train.checkpoint.recovery import resumed_config
from tests.hostile import many
from tests.unit.test_hostile_inputs import timed, values

MACHINE: dict[str, Any] = {
    "machine": {
        "memory_total_bytes": 68719476736,
        "gpus": [{"name": "G", "memory_total_bytes": 25757220864, "compute_capability": "8.0"}],
    },
    "rates": {"gpu_matmul": 1.6e14, "adamw": {"per_s": 1.5e9}, "h2d_pinned": 2.5e10},
    "disk": {"free_bytes": 2000000000000},
}  # fmt: skip


@st.composite
def altered(draw: st.DrawFn, value: Any) -> Any:
    """Replace, drop or add something anywhere in a JSON value."""
    keys = list(value) if isinstance(value, dict) else []
    keys = list(range(len(value))) if isinstance(value, list) else keys
    if not keys or draw(st.integers(0, 5)) == 0:
        return draw(values)
    key = draw(st.sampled_from(keys))
    made = dict(value) if isinstance(value, dict) else list(value)
    if draw(st.integers(0, 4)) == 0:
        del made[key]
    else:
        made[key] = draw(altered(value[key]))
    return made


def taken_or_refused(read: Callable[[], object], told: str = "") -> None:
    began_s = time.monotonic()
    try:
        read()
    except BadInput as error:
        assert told in str(error) and len(str(error)) < 5000
    timed(began_s)


@many
@given(altered(MACHINE).map(lambda value: json.dumps(value).encode()) | st.binary(max_size=40))
@example(b"[" * 100_000)
@example(b'{"machine": {"memory_total_bytes": 1e400, "gpus": [[]]}}')
def test_any_machine_is_planned_for_or_is_refused_in_words(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "machine.json"
    path.write_bytes(text)
    taken_or_refused(lambda: read_machine_file(path), "machine.json")


@many
@given(
    st.lists(
        (values | altered({"messages": [{"role": "user", "content": "a"}]})).map(
            lambda value: json.dumps(value).encode()
        )
        | st.binary(max_size=20),
        max_size=4,
    ),
    st.sampled_from(["a.jsonl", "a.txt"]),
)
@example([b'"' + b"\\ud800" * 3 + b'"', b'{"prompt": "a"}'], "a.jsonl")
def test_any_file_of_prompts_is_read_or_is_refused_in_words(
    tmp_path: Path, lines: list[bytes], name: str
) -> None:
    path = tmp_path / name
    path.write_bytes(b"\n".join(lines))
    taken_or_refused(lambda: [prompt.words for prompt in read_prompts(path)], name)


RECORDS = {
    "run.json": {"config": demo_config().model_dump(mode="json"), "versions": {"torch": "2"}},
    "result.json": {"exit_code": 0, "message": "finished", "step": 4},
    "error.json": {"exit_code": 2, "kind": "BadInput", "refused": True, "message": "no"},
    "model-files.json": {"model_files": {"config.json": 2, "inner/a.json": 3}},
    "pid": {"pid": 1, "start_s": 1.0, "host": "h", "start_ticks": 5, "boot": "b"},
}


@many
@given(
    st.data(),
    st.sampled_from([*RECORDS, "timeline.ring"]),
    st.sampled_from(["json", "json", "json", "bytes"]),
)
def test_any_record_of_a_run_is_listed_and_resumed_or_refused_in_words(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, name: str, kind: str
) -> None:
    root = tmp_path_factory.getbasetemp() / "hostile-records"
    run = RunDir(root / "run")
    run.model.mkdir(parents=True, exist_ok=True)
    (run.model / "config.json").write_bytes(b"{}")
    for other, content in RECORDS.items():
        (run.path / other).write_text(json.dumps(content))
    if kind == "json" and name in RECORDS:
        text = json.dumps(data.draw(altered(RECORDS[name]))).encode()
    else:
        text = data.draw(st.binary(max_size=200))
    (run.path / name).write_bytes(text)
    began_s = time.monotonic()
    [summary] = list_runs(root)
    assert summary.word() and summary.message.isprintable()
    others_in(run.model, of_model(model_files(run)))
    RingReader(run.timeline).poll()
    taken_or_refused(lambda: read_ring(run.timeline))
    taken_or_refused(lambda: resumed_config(run, []))
    timed(began_s)
