"""The base of every group of settings."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationInfo, field_validator

from fluxtrain.plan.request import refuse_boolean, refuse_uncountable


def _several(value: Any) -> Any:
    """Read `a` as a list of one, and `a, b` of two, as a command line gives them."""
    if not isinstance(value, str):
        return value
    return [name.strip() for name in value.split(",") if name.strip()]


Several = BeforeValidator(_several)  # of a list of names that has no comma in any of them


class Section(BaseModel):
    """A group of settings; unknown keys and values out of bounds are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields[info.field_name or ""]
        return value if field.annotation is bool else refuse_boolean(value)

    @field_validator("*")
    @classmethod
    def _within_what_can_be_counted(cls, value: Any) -> Any:
        return refuse_uncountable(value)
