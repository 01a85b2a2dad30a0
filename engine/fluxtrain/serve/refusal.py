"""Requests: the base of their bodies, and what they are refused with."""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from fluxtrain.errors import FluxTrainError

_FOLDERS = re.compile(r"(?<![\w./:])/(?:[\w.+@-]+/)+")


class Body(BaseModel):
    """The base of request bodies; unknown fields are refused by name."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_left_out(cls, given: Any) -> Any:
        """Drop fields that are null, which many clients send for all that was not set."""
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}

    @model_validator(mode="before")
    @classmethod
    def _can_be_written(cls, given: Any) -> Any:
        """Refuse what no file and no database holds: a surrogate without the other."""
        try:
            json.dumps(given, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError:
            raise ValueError(
                "has a text that ends in half of a character: cut it elsewhere"
            ) from None
        return given


class Refusal(FluxTrainError):
    """A refused request, with the reason and the cure."""

    exit_code = 2

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.retry_after_s = retry_after_s


def without_folders(text: str) -> str:
    """Return a message without the folders of the server's paths, which are no user's business."""
    return _FOLDERS.sub("", text)


def not_found(what: str, name: str) -> Refusal:
    """Return the refusal of a thing that does not exist, or belongs to another project."""
    return Refusal(f"there is no {what} {name!r}", status=404, code=f"{what}_not_found")
