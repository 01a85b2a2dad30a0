"""Whatever stands in journals, control frames, configurations and headers: an answer, or BadInput
with words, in time, and never another exception."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from fluxtrain.config.schema import demo_config, validate
from fluxtrain.config.text import apply_overrides, parse_yaml
from fluxtrain.errors import BadInput
from fluxtrain.events.reader import JournalFollower, SchemaTooNew
from fluxtrain.events.run_folder.control import CommandAnswer, ControlServer
from fluxtrain.events.run_folder.run_dir import RunDir
from fluxtrain.models.generate.prompts import read_prompts
from fluxtrain.models.model_files import safetensors_header
from fluxtrain.train.requests import COMMANDS, Requests
from fluxtui.sources.replay import ReplaySource
from fluxtui.state.run import FoldedRun
from fluxtui.state.view import View
from tests.hostile import many

LIMIT_S = 20.0
RECORDED = Path(__file__).parents[1] / "tui" / "recorded" / "resumed" / "events.ndjson"
LINES = RECORDED.read_bytes().splitlines(keepends=True)[:80]

numbers = st.one_of(
    st.integers(), st.floats(), st.sampled_from([2**63, -(2**63) - 1, 1e308, -1e308, 10**40, -0.0])
)
leaves = st.none() | st.booleans() | numbers | st.text(max_size=12)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


def timed(began_s: float) -> None:
    assert time.monotonic() - began_s < LIMIT_S


# -- journals --------------------------------------------------------------------------------------


@st.composite
def changed_lines(draw: st.DrawFn) -> bytes:
    """A line of a recorded journal with one field of any value, or cut, or bytes of any kind."""
    line = draw(st.sampled_from(LINES))
    kind = draw(st.sampled_from(["field", "field", "cut", "bytes", "same"]))
    if kind == "bytes":
        return draw(st.binary(max_size=40)) + draw(st.sampled_from([b"\n", b""]))
    if kind == "cut":
        return line[: draw(st.integers(0, len(line)))] + draw(st.sampled_from([b"\n", b""]))
    if kind == "field":
        event = json.loads(line)
        event[draw(st.sampled_from(sorted(event)))] = draw(values)
        return json.dumps(event, default=str).encode() + b"\n"
    return line


@many
@given(st.lists(changed_lines(), max_size=12), st.booleans())
def test_any_journal_is_listed_followed_and_played(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], begun: bool
) -> None:
    run = RunDir(tmp_path_factory.getbasetemp() / "hostile-journal")
    run.path.mkdir(exist_ok=True)
    run.journal.write_bytes((LINES[0] if begun else b"") + b"".join(lines))
    began_s = time.monotonic()
    run.summary()
    try:
        events = JournalFollower(run.journal).read_all()
    except SchemaTooNew:
        return
    state = FoldedRun().after_all(events)
    view = View(state=state, wall_s=1e9, monotonic_s=1e6, boot="x")
    assert view.status.word
    replay = ReplaySource(run.journal, speed=None)
    while not replay.over:
        replay.poll()
    timed(began_s)


# -- control ---------------------------------------------------------------------------------------


requests = st.fixed_dictionaries(
    {"command": st.sampled_from([*COMMANDS, "nope"]) | st.text(max_size=5) | values},
    optional={"arguments": values | st.dictionaries(st.text(max_size=8), values, max_size=3)},
)


@many
@given(st.binary(max_size=60) | requests.map(lambda asked: json.dumps(asked).encode()))
@example(b"[" * 60_000)
@example(b'{"command":"' + b"x" * 60_000 + b'"}')
def test_any_frame_is_answered_in_a_few_words(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], line: bytes
) -> None:
    asked = Requests()
    asked.changes_go_to(lambda command, arguments: (False, "no"))
    began_s = time.monotonic()
    answer = ControlServer(tmp_path / "ctl.sock", asked.handle).answer(line)
    assert isinstance(answer, CommandAnswer) and len(answer.message) < 1000
    assert "a bug of FluxTrain" not in answer.message
    assert capfd.readouterr().err == ""
    timed(began_s)


# -- configurations --------------------------------------------------------------------------------


SECTIONS = st.sampled_from(["model", "data", "train", "method", "placement", "samples", "x"])
KEYS = st.sampled_from(
    ["path", "steps", "learning_rate", "seed", "dtype", "prompts", "every", "sequence_length",
     "report_to", "rank", "max_bad_rows", "temperature", "final_model", "held_out"]
)  # fmt: skip
SCALARS = st.sampled_from(
    ["2024-13-45", "2024-01-01 25:61:61", "12:30:45", "9" * 5000, "0x" + "f" * 9999, ".nan",
     "-.inf", "1e400", "!!int 'x'", "!!float 'x'", "!!bool 'x'", "!!timestamp x", "!!binary '*'",
     "!!python/name:os.system ''", "~", "&a [*a]", "*a", "? {a: 1}", "0777", "1_000", "'\\0'",
     '"\\ud800"', "[", "{", "|", ">", "%", "@", "`", ":".join(["59"] * 999), "!!set {a}", "<<: 5"]
)  # fmt: skip


@many
@given(
    st.text(max_size=60)
    | st.dictionaries(SECTIONS, st.dictionaries(KEYS, values, max_size=3) | values, max_size=4).map(
        lambda tree: yaml.safe_dump(tree, allow_unicode=True)
    )
    | st.tuples(SECTIONS, KEYS, SCALARS).map(lambda one: f"{one[0]}: {{{one[1]}: {one[2]}}}")
)
@example("[" * 5000)
@example("a: " + "{a: " * 3000)
def test_any_text_is_a_configuration_or_is_refused_in_words(text: str) -> None:
    began_s = time.monotonic()
    try:
        validate(parse_yaml(text, "it"), "it")
    except BadInput as error:
        assert len(str(error)) < 5000
    timed(began_s)


@many
@given(SECTIONS, KEYS, SCALARS | st.text(max_size=30) | values.map(str))
def test_any_setting_is_taken_or_is_refused_in_words(section: str, key: str, value: str) -> None:
    try:
        demo_config([f"{section}.{key}={value}"])
    except BadInput as error:
        assert len(str(error)) < 5000
    with contextlib.suppress(BadInput):
        apply_overrides({}, [value])


@pytest.mark.parametrize(
    "value", ["!!timestamp 2024-13-45", "9" * 5000, "0x" + "f" * 9999, "!!int 'x'", "!!timestamp x"]
)
def test_a_value_that_cannot_be_is_shown_with_its_line_and_the_cure(value: str) -> None:
    with pytest.raises(BadInput, match="it line 2: .* is no value .*quote it") as refused:
        parse_yaml(f"train:\n  steps: {value}\n", "it")
    assert len(str(refused.value)) < 300


# -- headers of weights ----------------------------------------------------------------------------


HEADER: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [16, 24]},
}


def written(path: Path, header: bytes, length: int | None = None) -> Path:
    size = len(header) if length is None else length
    path.write_bytes(struct.pack("<Q", size) + header + bytes(24))
    return path


@many
@given(
    name=st.sampled_from(["__metadata__", "a", "b"]),
    key=st.sampled_from(["dtype", "shape", "data_offsets", None]),
    value=values | st.lists(numbers | st.booleans(), min_size=2, max_size=2),
    length=st.none() | st.integers(0, 2**64 - 1),
)
def test_any_header_of_weights_is_read_or_is_refused_in_words(
    tmp_path: Path, name: str, key: str | None, value: Any, length: int | None
) -> None:
    header = json.loads(json.dumps(HEADER))
    if key is None:
        header[name] = value
    else:
        header[name][key] = value
    began_s = time.monotonic()
    try:
        safetensors_header(written(tmp_path / "w", json.dumps(header).encode(), length))
    except BadInput as error:
        assert "again" in str(error)
    timed(began_s)


@pytest.mark.parametrize(
    "offsets",
    [[0.0, 16.0], [False, 16], ["0", "16"], [0, 16, 16], [-16, 0], [16, 0], [0, float("inf")],
     [float("nan")] * 2, [0, 10**30], None, 5],
)  # fmt: skip
def test_odd_offsets_are_refused_before_anything_is_loaded(tmp_path: Path, offsets: Any) -> None:
    header = {**HEADER, "a": {**HEADER["a"], "data_offsets": offsets}}
    with pytest.raises(BadInput, match="header is damaged: download it again"):
        safetensors_header(written(tmp_path / "w", json.dumps(header).encode()))


# -- files without an end --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["device", "pipe"])
def test_prompts_without_an_end_are_refused_and_nothing_waits_for_them(
    tmp_path: Path, kind: str
) -> None:
    path = Path("/dev/zero")
    if kind == "pipe":
        path = tmp_path / "pipe"
        os.mkfifo(path)
    with pytest.raises(BadInput, match="is a pipe or a device: --prompts takes a text file"):
        read_prompts(path)


def test_prompts_of_any_size_are_refused_by_their_size(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(BadInput, match="has 1.00 TiB, and --prompts takes at most 64.0 MiB"):
        read_prompts(path)


def test_a_line_of_json_ends_at_its_line_feed_alone(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('"a\u2028b\u0085c"\n"d"\n')
    assert [one.text for one in read_prompts(path)] == ["a\u2028b\u0085c", "d"]
