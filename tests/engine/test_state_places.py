"""Whose moments are whose: where groups change, and where a state is made anew by its type."""

from __future__ import annotations

import pytest
import torch

import fluxtrain
from tests.engine.plain_models import adamw, net, train, trained


@pytest.mark.parametrize("change", ["reorder", "drop"])
def test_moments_follow_their_parameters_where_groups_change_after_unwrapping(change: str) -> None:
    plain, wrapped = net(), fluxtrain.wrap(net(), device="cpu")
    both = [(model, adamw(model)) for model in (plain, wrapped)]
    for model, optimizer in both:
        train(model, optimizer, 0, 5)
    fluxtrain.unwrap(wrapped)
    for _, optimizer in both:
        (group,) = optimizer.param_groups
        if change == "reorder":
            group["params"][0], group["params"][4] = group["params"][4], group["params"][0]
        else:
            del group["params"][0]
    losses = [train(model, optimizer, 5, 8) for model, optimizer in both]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    for mine, other in zip(wrapped.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    assert "fluxtrain" not in both[1][1].state


def test_a_state_rebuilt_by_its_type_is_taken_in() -> None:
    """accelerate makes mappings anew so, to move what is in them, when it prepares an optimizer."""
    reference, changed = trained(), trained()
    model, optimizer = changed
    given = optimizer.state_dict()
    held = given["state"]["fluxtrain"]
    rebuilt = type(held)({index: dict(entry) for index, entry in held.items()})
    optimizer.load_state_dict({**given, "state": {**given["state"], "fluxtrain": rebuilt}})
    assert train(model, optimizer, 20, 23) == train(*reference, 20, 23)
    fluxtrain.unwrap(model)
    assert "exp_avg" in optimizer.state_dict()["state"][0]
