"""Plan, inspection and journal count the same samples that are cut, divided and left out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fluxtrain.commands import inspection
from fluxtrain.commands.preview import preview
from fluxtrain.config.schema import load_config
from fluxtrain.events.events import LogWritten, Planned, SampleFit
from fluxtrain.events.journal import read_events
from fluxtrain.train.checkpoint.recovery import locate
from fluxtrain.train.run import train

MakeConfig = Callable[..., Path]


def talk(question: str, answer: str) -> dict[str, Any]:
    said = {"user": question, "assistant": answer}
    return {"messages": [{"role": role, "content": words} for role, words in said.items()]}


TALKS = [talk(f"{i}?", "four") for i in range(30)]
TALKS += [talk("cut?", "word " * 60), talk("why " * 80, "left out"), talk("how " * 80, "too")]
TEXTS = [{"text": f"the mill {i}"} for i in range(30)] + [{"text": "word " * 60}] * 2


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        (TALKS, SampleFit(samples=33, longer=3, cut=1, divided=0, left_out=2)),
        (TEXTS, SampleFit(samples=32, longer=2, cut=0, divided=2, left_out=0)),
    ],
    ids=["talks", "texts"],
)
def test_all_count_the_samples_alike(
    records: list[dict[str, Any]], expected: SampleFit, run_config: MakeConfig, tmp_path: Path
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    config = load_config(
        run_config(
            data__path=str(data), data__held_out=0.0, data__sequence_length=64, train__steps=1
        )
    )
    run_dir = tmp_path / "run"
    train(config, locate(None, run_dir, config))
    events = list(read_events(run_dir / "events.ndjson"))
    [planned] = [event for event in events if isinstance(event, Planned)]
    looked, asked = inspection.inspect(config), preview(config)
    assert planned.samples == looked.samples_fit == asked.samples == expected
    assert (looked.cut_samples, looked.left_out_samples) == (expected.cut, expected.left_out)
    said = [event.text for event in events if isinstance(event, LogWritten)]
    for words in ("1 sample of 33 longer", "2 samples of 33 are left out"):
        if expected.left_out:
            for told in ("\n".join(said), str(asked.notes), str(looked.notes)):
                assert words in told
