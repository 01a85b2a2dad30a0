"""The version of the project, and the project in that version as the one dependency."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
PAGE = """\
# fluxtrain-tui

The app of FluxTrain: `uvx fluxtrain-tui` or `pipx run fluxtrain-tui`. This package holds a name
alone; `pip install fluxtrain` brings the same command.
"""


def dynamic_metadata(settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:
    """Answer scikit-build-core with the fields that follow the project's."""
    version = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["version"]
    return {
        "version": version,
        "dependencies": [f"fluxtrain=={version}"],
        "readme": {"content-type": "text/markdown", "text": PAGE},
    }
