"""Image editing on a GPU: encoded there, streamed, and sampled between steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fluxtrain.events import events as ev
from tests.engine.images import Images
from tests.engine.runs import losses, of, run

pytest.importorskip("diffusers")
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Images:
    return Images(tmp_path_factory.mktemp("images"))


@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
def test_streamed_and_resident_runs_of_images_have_the_same_losses(
    images: Images, tmp_path: Path, method: str
) -> None:
    made: dict[str, Any] = {
        "method__name": method, "model__dtype": "bfloat16", "placement__device": "cuda",
        "image__samples": 1, "image__sample_steps": 2, "samples__every": 3,
    }  # fmt: skip
    config = images.config(tmp_path, **made)
    resident = run(config, tmp_path / "resident", "placement.offload=none")
    streamed = run(config, tmp_path / "streamed", "placement.offload=max")
    assert losses(streamed) == losses(resident) != []
    assert of(ev.Planned, resident)[0].timing != "assumed"  # blocks of both lists were timed
    assert not any(step.left_out for step in of(ev.StepFinished, resident))
    assert len(of(ev.SampleGenerated, streamed)) == 3
