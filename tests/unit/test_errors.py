"""Errors carry the documented exit codes and can be caught as what Python users expect."""

from __future__ import annotations

import pytest

from fluxtrain import errors

DOCUMENTED = {
    errors.FluxTrainError: 1,
    errors.BadInput: 2,
    errors.UnsupportedModel: 2,
    errors.MisusedModel: 2,
    errors.DoesNotFit: 3,
    errors.Diverged: 4,
    errors.NoSpace: 5,
    errors.Disagrees: 6,
    errors.DeviceFailed: 7,
    errors.ReadFailed: 8,
    errors.Interrupted: 130,
}


@pytest.mark.parametrize(("kind", "code"), DOCUMENTED.items())
def test_each_error_leads_to_its_documented_exit_code(
    kind: type[errors.FluxTrainError], code: int
) -> None:
    assert kind("why").exit_code == code
    assert str(kind("why")) == "why"


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.BadInput, ValueError),
        (errors.DoesNotFit, MemoryError),
        (errors.Diverged, ArithmeticError),
        (errors.NoSpace, OSError),
        (errors.MisusedModel, RuntimeError),
    ],
)
def test_an_error_is_also_the_builtin_a_caller_would_catch(
    kind: type[errors.FluxTrainError], builtin: type[Exception]
) -> None:
    with pytest.raises(builtin):
        raise kind("why")


def test_a_run_ended_by_sigterm_says_143() -> None:
    ended = errors.Interrupted("checkpoint written", errors.EXIT_TERMINATED)
    assert (ended.exit_code, str(ended)) == (143, "checkpoint written")
    assert errors.Interrupted("again").exit_code == 130, "one instance must not change the class"
