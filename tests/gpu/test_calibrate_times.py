"""Block timing agrees with whole steps, and with itself where the edges are on the host.

Other programs falsify times: the tests are skipped beside them.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

import fluxtrain
from fluxtrain.core.wrap.engine import engine_of
from fluxtrain.data.batches import Batch
from fluxtrain.measure.calibrate import calibrate
from fluxtrain.measure.probe.others import BUSY_SHARE, LOOK_S, others_share, read_use
from fluxtrain.methods.objective import BoundBatch
from fluxtrain.methods.text_task import CausalLM
from fluxtrain.plan.calibration import Calibration
from fluxtrain.plan.footprint import Layout
from fluxtrain.plan.rates import Rates, rates_from
from fluxtrain.plan.simulation import step_time
from fluxtrain.plan.states import StateFormat
from fluxtrain.train.placing.placing import model_facts
from tests.gpu.test_calibrate import batch_of

pytestmark = pytest.mark.gpu
PER_S = {"adamw": 1e9, "h2d_pinned": 1e10, "d2h_pinned": 1e10}  # nothing here is at home


@pytest.fixture(autouse=True)
def calm() -> None:
    before = read_use()
    time.sleep(LOOK_S)
    share = others_share(before)
    if share is not None and share >= BUSY_SHARE:
        pytest.skip(f"other programs use {share:.0%} of the processors")


@pytest.mark.parametrize("states", ["fp32", "8bit"])
def test_steps_take_what_block_timing_said(states: StateFormat) -> None:
    """Of a model that lives on the GPU, in a loop that keeps it as busy as a training does."""
    config = Qwen2Config(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=10, num_attention_heads=16,
        num_key_value_heads=2, vocab_size=8192, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).to(torch.bfloat16).train()

    def rows_of(rows: int) -> BoundBatch[Batch]:
        ids = torch.randint(0, 8192, (rows, 1024))
        return BoundBatch(CausalLM(), Batch(
            input_ids=ids, labels=ids, position_ids=torch.arange(1024).expand(rows, 1024),
            predicted=ids.numel(), tokens=ids.numel(), packed=False,
        ))  # fmt: skip

    timed = calibrate(model, rows_of, torch.device("cuda"), (4, 16), states=states)
    facts = model_facts(model, config, 1024, states)
    found = rates_from(PER_S, has_gpu=True, calibration=timed)
    assert isinstance(found, Rates)
    layout = Layout(offload="none", batch_rows=16, chunk_rows=16)
    predicted_s = step_time(facts, layout, found).step_s
    wrapped = fluxtrain.wrap(
        model, device="cuda", offload="none", chunk_rows=16, overlap=True, states=states
    )
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-6)
    given = rows_of(16).batch.inputs()
    inputs = {name: value for name, value in given.items() if name != "use_cache"}
    inputs |= {name: inputs[name].cuda() for name in ("input_ids", "labels")}
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(16)]
    for end in ends:
        wrapped(**inputs).loss.backward()
        engine_of(wrapped).clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        end.record()
    torch.cuda.synchronize()
    steps_s = sorted(a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(ends[5:]))
    measured_s = steps_s[len(steps_s) // 2]
    print(f"{states}: predicted {predicted_s:.4f} s, measured {measured_s:.4f} s")
    assert predicted_s == pytest.approx(measured_s, rel=0.1)


class Fastest:
    """The fastest of several measurements of one thing: nothing makes a GPU faster than it is."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def take(self, timed: Calibration) -> None:
        found = {
            line: getattr(timed, line).at(64) for line in ("forward", "backward", "outside_forward")
        }
        found["update"] = timed.device_update_s
        self.seconds = {what: min(s, self.seconds.get(what, s)) for what, s in found.items()}


def test_with_its_edges_at_home_a_block_takes_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Qwen2Config(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, vocab_size=65536, tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).to(torch.bfloat16).train()
    wrap, homes = fluxtrain.wrap, []

    def of_a_small_card(mini: nn.Module, **wishes: Any) -> nn.Module:
        if wishes["offload"] == "none":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        wrapped = wrap(mini, **wishes)
        homes.append({group.kind: group.placement.weights for group in engine_of(mini).groups})
        return wrapped

    here, at_home = Fastest(), Fastest()
    for _ in range(4):  # in turn: another program may have the GPU for a while
        here.take(calibrate(model, batch_of, torch.device("cuda"), (16, 64)))
        with monkeypatch.context() as small:
            small.setattr(fluxtrain, "wrap", of_a_small_card)
            at_home.take(calibrate(model, batch_of, torch.device("cuda"), (16, 64)))
        assert homes[0] == {"edge": "host", "block": "device"}  # then whole steps may be timed
        homes.clear()
        ratios = {what: at_home.seconds[what] / here.seconds[what] for what in here.seconds}
        update = ratios.pop("update")
        if all(0.7 < ratio < 1.4 for ratio in ratios.values()) and 0.5 < update < 1.5:
            return
    pytest.fail(f"with its edges at home a block takes other times: {ratios}, {update}")
