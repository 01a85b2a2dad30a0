"""The tiny pipeline of the image demo, some of its pairs, and configurations of runs over them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from fluxtrain.models.demo_pipeline import draw_pairs, write_demo_pipeline

PAIRS = 12


class Images:
    """A folder with a pipeline and pairs, which tests may copy but not change."""

    def __init__(self, folder: Path) -> None:
        self.pipeline, self.data = folder / "pipeline", folder / "data"
        write_demo_pipeline(self.pipeline)
        draw_pairs(self.data, PAIRS)

    def config(self, folder: Path, **changes: Any) -> Path:
        """Write the configuration of a short run; `train__steps=3` changes a setting."""
        made: dict[str, Any] = {
            "model": {"path": str(self.pipeline)},
            "data": {"path": str(self.data / "pairs.jsonl"), "held_out": 0.1},
            "method": {"name": "lora", "rank": 4, "alpha": 8},
            "image": {"size": 64, "caption_tokens": 16, "samples": 0},
            "train": {"steps": 6, "batch_rows": 3, "learning_rate": 1e-2, "evaluate_every": "end"},
        }
        for name, value in changes.items():
            section, _, key = name.partition("__")
            made.setdefault(section, {})[key] = value
        path = folder / "kontext.yaml"
        path.write_text(yaml.safe_dump(made))
        return path
