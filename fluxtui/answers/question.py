"""The parts of a question, independent of the screen."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from fluxtui.answers.answers import StepName


@dataclasses.dataclass(frozen=True)
class Option:
    """One line of a list: the value, its name, and what it means."""

    id: str
    title: str
    text: str


@dataclasses.dataclass(frozen=True)
class Field:
    """The further input of a choice: a field of the answers, typed or chosen from a list."""

    name: str
    title: str
    hint: str  # an example, or what an empty list says
    kind: Literal["text", "folder", "file", "list"] = "text"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceQuestion:
    """A question about the source of the model, the data or the run.

    Attributes:
        source: the field of the answers that the list sets.
        fields: by the id of the option that they belong to.
        number: a number that is asked for whatever was chosen.
    """

    step: StepName
    text: str
    source: str
    options: Sequence[Option]
    fields: Mapping[str, Field]
    number: Field | None = None


@dataclasses.dataclass(frozen=True)
class AdapterQuestion:
    """A question about adapters: the field of the answers, and why its default is what it is.

    Attributes:
        action: of the registry, whose key asks it.
        title: of the field, in words.
        default: what is taken when nothing is answered, as it is shown.
        reason: why that is taken, and what another answer gives.
        options: to choose from; none where it is typed.
        packed_alone: asked for weights that are packed, and no others.
    """

    field: str
    action: str
    name: str
    title: str
    default: str
    reason: str
    options: Sequence[str] = ()
    packed_alone: bool = False
