"""The base of every group of settings."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from fluxtrain.plan.request import refuse_boolean, refuse_uncountable


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
