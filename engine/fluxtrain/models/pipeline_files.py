"""Checks the folder of an image pipeline by its files, before anything is loaded. Standard library
only, so that the wizard judges a folder as the trainer does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fluxtrain.errors import BadInput
from fluxtrain.files.atomic import read_json
from fluxtrain.files.opening import open_plain
from fluxtrain.models.model_files import PIPELINE_INDEX

PARTS = (
    "transformer", "vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "scheduler",
)  # fmt: skip
_CARD_BYTES = 4096  # the front matter of a model card comes first
_KINDS = ("FluxKontextPipeline", "FluxPipeline")


@dataclass(frozen=True, slots=True)
class PipelineFolder:
    """A whole pipeline on this disk."""

    folder: Path

    @property
    def weights(self) -> tuple[Path, ...]:
        """Return the files of the transformer's weights."""
        return weights_of(self.folder / "transformer")


def check_pipeline(folder: Path) -> PipelineFolder:
    """Check the parts of a pipeline. Raises BadInput naming what is missing, with the cure."""
    missing = [name for name in PARTS if not (folder / name).is_dir()]
    if not (folder / PIPELINE_INDEX).is_file() or missing:
        lacks = ", ".join([*missing] or [PIPELINE_INDEX])
        raise BadInput(
            f"{folder} is a part of an image pipeline: it lacks {lacks}, which encode the images "
            "and prompts; name the folder of the whole pipeline, as `hf download` makes it"
        )
    kind = (read_json(folder / PIPELINE_INDEX, follow=True) or {}).get("_class_name")
    if kind not in _KINDS:
        raise BadInput(
            f"{folder} is a {kind}, and image editing is trained with {_KINDS[0]} (FLUX.1 Kontext)"
        )
    return PipelineFolder(folder)


def weights_of(folder: Path) -> tuple[Path, ...]:
    """List the weight files of a part. Raises BadInput where there are none in safetensors, or an
    index names one that is missing."""
    files = tuple(sorted(folder.glob("*.safetensors")))
    index = next(iter(folder.glob("*.safetensors.index.json")), None)
    named = set(
        ((read_json(index, follow=True) or {}) if index else {}).get("weight_map", {}).values()
    )
    absent = sorted(named - {file.name for file in files})
    if absent or not files:
        lacks = ", ".join(absent[:3]) or "weights (*.safetensors)"
        raise BadInput(f"{folder} lacks {lacks}: download it again")
    return tuple(file for file in files if not named or file.name in named)


def stated_license(folder: Path) -> str | None:
    """Return the license that the front matter of a model's card names."""
    try:
        with open_plain(folder / "README.md", follow=True) as card:
            head = card.read(_CARD_BYTES).decode("utf-8", "replace")
    except OSError:
        return None
    front = head.removeprefix("---").partition("\n---")[0] if head.startswith("---") else ""
    values = dict(line.split(":", 1) for line in front.splitlines() if ":" in line)
    for key in ("license_name", "license"):  # `license: other` comes with the name beside it
        if name := values.get(key, "").strip().strip("'\""):
            return name
    return None
