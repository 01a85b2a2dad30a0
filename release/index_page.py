"""The page of the package index, made of README.md when a package is built.

Pictures and links of README.md are paths of the repository, and the index has no such files. They
lead to the address that [project.urls] or FLUXTRAIN_REPOSITORY names, at the tag of the version;
where neither does, pictures are left out and links are their words.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

README = Path(__file__).parents[1] / "README.md"
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)]+)\)")


def dynamic_metadata(settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:
    """Answer scikit-build-core with the field `readme`."""
    repository = project.get("urls", {}).get("Repository") or os.environ.get("FLUXTRAIN_REPOSITORY")
    text = page(README.read_text(encoding="utf-8"), repository or "", project["version"])
    return {"readme": {"content-type": "text/markdown", "text": text}}


def page(readme: str, repository: str, version: str) -> str:
    """Return README.md with links that lead somewhere from anywhere."""

    def led(found: re.Match[str]) -> str:
        mark, words, path = found.groups()
        if not repository:
            return "" if mark else words
        place = f"{repository.rstrip('/')}/{'raw' if mark else 'blob'}/v{version}"
        return f"{mark}[{words}]({place}/{path})"

    return _LINK.sub(led, readme)
