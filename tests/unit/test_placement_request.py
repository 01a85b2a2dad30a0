"""A knob of the placement is declared once: for a configuration and for `wrap`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from fluxtrain.config.schema import RunConfig, settings, validate
from fluxtrain.errors import BadInput
from fluxtrain.plan.request import PlacementRequest, RunRequest, check


def test_the_configurations_section_is_the_request_itself() -> None:
    config = validate({"placement": {"head": "chunks", "budget_gib": 4, "prefetch": 2}})
    assert config.placement == PlacementRequest(head="chunks", budget_gib=4, prefetch=2)
    keys = [one.key for one in settings(RunConfig()) if one.key.startswith("placement.")]
    assert keys == [f"placement.{knob.name}" for knob in fields(PlacementRequest)]
    assert all(one.description for one in settings(RunConfig()))


VALUES: list[dict[str, Any]] = [
    {"offload": "everything"}, {"chunk_rows": 0}, {"chunk_rows": 1.5}, {"chunk_rows": True},
    {"device_groups": -1}, {"budget_gib": 0}, {"budget_gib": "much"}, {"aggressiveness": 2},
    {"aggressiveness": "quick"}, {"head": "slices"}, {"prefetch": 0}, {"activations": None},
    {"budget_gib": float("inf")}, {"budget_gib": 1e300}, {"aggressiveness": float("nan")},
    {"prefetch": 2**63},
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_what_a_configuration_refuses_is_refused_in_python_too(value: dict[str, Any]) -> None:
    (name,) = value
    with pytest.raises(BadInput, match=f"placement.{name}"):
        validate({"placement": value})
    with pytest.raises(BadInput, match=f"{name} is .*use "):
        check(PlacementRequest(**value))


@pytest.mark.parametrize(
    "value",
    [{"aggressiveness": 0.5}, {"aggressiveness": "fit"}, {"budget_gib": 1}, {"device_groups": 0}],
    ids=str,
)
def test_what_a_configuration_takes_is_taken_in_python_too(value: dict[str, Any]) -> None:
    validate({"placement": value})
    check(PlacementRequest(**value))


def test_a_request_for_a_run_has_all_that_the_user_asked() -> None:
    asked = PlacementRequest(offload="max", prefetch=3, budget_gib=1.5)
    run = RunRequest.of(asked, batch_rows=4, passes=2)
    assert all(getattr(run, k.name) == getattr(asked, k.name) for k in fields(PlacementRequest))
    assert (run.batch_rows, run.passes, run.slots, run.budget_bytes) == (4, 2, 4, 3 << 29)
