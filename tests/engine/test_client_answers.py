"""What the commands print with `--json` is, field for field, what the client declares."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from fluxtrain.events.answers.answers import Answer, DryRunAnswer, InspectionAnswer
from fluxtrain.events.answers.asking import decoded
from fluxtrain.events.answers.machine import DoctorAnswer, ProbeAnswer
from fluxtrain.events.answers.plan import PlanAnswer


@pytest.mark.parametrize("answer", [PlanAnswer, InspectionAnswer, DryRunAnswer])
def test_the_answer_about_a_run_has_no_field_that_the_client_does_not_know(
    answer: type[Answer],
    fluxtrain: Callable[..., subprocess.CompletedProcess[str]],
    run_config: Callable[..., Path],
) -> None:
    told = fluxtrain(answer.COMMAND, run_config(), "--json")
    assert told.returncode == 0, told.stderr
    assert_declared(answer, told.stdout)


@pytest.mark.parametrize("answer", [ProbeAnswer, DoctorAnswer])
def test_the_answer_about_a_machine_has_no_field_that_the_client_does_not_know(
    answer: type[Answer], fluxtrain: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    told = fluxtrain(answer.COMMAND, "--json")
    assert told.returncode == 0, told.stderr
    assert_declared(answer, told.stdout)


def assert_declared(answer: type[Answer], text: str) -> None:
    """Every field that was printed is one of the struct, with the same value."""
    assert json.loads(msgspec.json.encode(decoded(answer, text))) == json.loads(text)
