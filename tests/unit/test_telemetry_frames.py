"""One event, one line, at most 4096 bytes, and back."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxtrain.errors import EXIT_BAD_INPUT
from fluxtrain.events.events import (
    FRAME_LIMIT_BYTES,
    ChoiceMade,
    LogWritten,
    Move,
    MovesMade,
    Planned,
    StepFinished,
)
from fluxtrain.events.frames import (
    SchemaTooNew,
    Skipped,
    classify_line,
    decode_line,
    encode_frame,
)

Make = Callable[..., Any]


def planned(reasons: list[str]) -> Planned:
    return Planned(
        offload="weights",
        batch_rows=8,
        chunk_rows=2,
        accumulation=1,
        sequence_length=256,
        resident_blocks=3,
        slots=2,
        device_bytes=1,
        device_budget_bytes=None,
        host_bytes=2,
        choices=tuple(
            ChoiceMade(name=f"choice {n}", value="8", because=text)
            for n, text in enumerate(reasons)
        ),
    )


def moves(count: int, block: str = "model.layers.7") -> MovesMade:
    made = [
        Move(
            step=3,
            block=block,
            what="weights",
            bytes=n,
            direction="C>G",
            duration_s=0.01,
            cause="prefetch",
        )
        for n in range(count)
    ]
    return MovesMade(moves=tuple(made), total=count)


def test_an_event_comes_back_as_it_was(
    make_step: Make, make_memory: Make, make_hello: Make
) -> None:
    for event in (make_step(7), make_memory(), make_hello(), planned(["fits in 3 GiB"]), moves(3)):
        frame = encode_frame(event)
        assert frame.endswith(b"\n") and frame.count(b"\n") == 1
        assert decode_line(frame) == event


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_floats_that_json_cannot_say_come_back_as_floats(make_step: Make, value: float) -> None:
    event = make_step(loss=value, grad_norm=value, phases_s={"forward": value})
    back = decode_line(encode_frame(event))
    assert isinstance(back, StepFinished)
    for number in (back.loss, back.grad_norm, back.phases_s["forward"]):
        assert isinstance(number, float)
        assert number == value or (math.isnan(value) and math.isnan(number))
    assert back.eta_s is None  # "not measured" stays apart from "not a number"


@given(text=st.text(st.characters(codec=None), max_size=6000), count=st.integers(0, 400))
def test_every_frame_fits_and_decodes_whatever_it_carries(text: str, count: int) -> None:
    for event in (
        LogWritten(level="info", text=text),
        planned([text] * (count // 10)),
        moves(count, block=text[:200]),
    ):
        frame = encode_frame(event)
        assert len(frame) <= FRAME_LIMIT_BYTES
        assert type(decode_line(frame)) is type(event)


def test_a_plan_with_long_reasons_keeps_all_its_choices_and_marks_the_cuts() -> None:
    back = decode_line(encode_frame(planned(["x" * 900] * 12)))
    assert isinstance(back, Planned)
    assert len(back.choices) == 12
    assert all(choice.because.endswith("…") for choice in back.choices)


@given(st.binary(max_size=300))
def test_no_bytes_make_the_decoder_fail(line: bytes) -> None:
    assert decode_line(line) is None or b"event" in line


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"event":"rebalanced","blocks":3}', Skipped.UNKNOWN),
        (b'{"event":"step","step":"many"}', Skipped.GARBAGE),
        (b'{"event":"step","st', Skipped.GARBAGE),
        (b"[1,2]", Skipped.GARBAGE),
        (b"{}", Skipped.GARBAGE),
        (b"", Skipped.GARBAGE),
        (b"\xff\xfe\x00", Skipped.GARBAGE),
        (b"[" * 100_000, Skipped.GARBAGE),
    ],
)
def test_a_line_that_is_no_event_says_why(line: bytes, reason: Skipped) -> None:
    assert classify_line(line) is reason


@pytest.mark.parametrize("sign", ["", "-"])
@pytest.mark.parametrize("name", ["step", "t_s", "total_steps"])
def test_an_integer_that_no_float_holds_is_garbage(name: str, sign: str) -> None:
    """Whoever divides by it would end."""
    fields = {"event": '"heartbeat"', "seq": "1", "t_s": "1.0", "wall_s": "1.0", "dropped": "0"}
    fields |= {"phase": '"training"', "step": "1", name: sign + "9" * 400}
    line = ("{" + ",".join(f'"{key}":{value}' for key, value in fields.items()) + "}").encode()
    assert classify_line(line) is Skipped.GARBAGE
    assert not isinstance(classify_line(line.replace(b"9" * 400, b"9" * 20)), Skipped)


def test_fields_of_a_newer_minor_version_are_ignored(make_hello: Make) -> None:
    tree = msgspec.to_builtins(make_hello()) | {"schema": "1.9", "gpu_clock": {"mhz": 1}}
    back = decode_line(msgspec.json.encode(tree))
    assert back == make_hello(schema="1.9")


@pytest.mark.parametrize(
    "fields", [{"schema": "2.0"}, {"schema": "2.0", "pid": "a new kind"}, {"schema": "17"}]
)
def test_another_major_version_is_refused_with_the_cure(
    make_hello: Make, fields: dict[str, object]
) -> None:
    line = msgspec.json.encode(msgspec.to_builtins(make_hello()) | fields)
    cure = r"format (2\.0|17), and this one reads 1\.\* at most: .*pip install 'fluxtrain>=0\.1\.0'"
    with pytest.raises(SchemaTooNew, match=cure) as e:
        decode_line(line)
    assert e.value.exit_code == EXIT_BAD_INPUT
