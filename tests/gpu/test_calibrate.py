"""One block is tried on a GPU: every constant is there, and its memory is given back."""

from __future__ import annotations

import itertools
import os
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen2Config, Qwen2ForCausalLM

import fluxtrain
from fluxtrain.data.batches import Batch
from fluxtrain.hardware.adamw_rate import adamw_rate
from fluxtrain.hardware.busy_bus import HostBytes, busy_bus
from fluxtrain.methods.demo_model import demo_model
from fluxtrain.plan.calibration import Calibration
from fluxtrain.plan.cost import cost
from fluxtrain.plan.footprint import Layout
from fluxtrain.plan.rates import Rates, rates_from
from fluxtrain.plan.states import StateFormat
from fluxtrain.stream.engine import engine_of
from fluxtrain.train.calibrate import calibrate
from fluxtrain.train.placing import model_facts

pytestmark = pytest.mark.gpu
PER_S = {"adamw": 1e9, "h2d_pinned": 1e10, "d2h_pinned": 1e10}  # nothing here is at home


def batch_of(rows: int) -> Batch:
    ids = torch.randint(0, 256, (rows, 128))
    count = rows * 127
    return Batch(
        input_ids=ids, labels=ids, position_ids=torch.arange(128).expand(rows, 128),
        predicted=count, step_predicted=count, tokens=ids.numel(),
    )  # fmt: skip


def test_a_block_is_tried_on_the_gpu_and_leaves_nothing_there() -> None:
    model = demo_model(256, dtype=torch.bfloat16)
    calibrate(model, batch_of, torch.device("cuda"), (2, 8))  # what libraries keep is there now
    before = torch.cuda.memory_allocated()
    tried = calibrate(model, batch_of, torch.device("cuda"), (2, 8))
    assert torch.cuda.memory_allocated() == before
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    for line in (tried.forward, tried.backward, tried.outside_forward):
        assert line.at(8) > 0
    assert tried.activation_bytes > 0
    assert tried.device_update_s > 0
    assert 0 < tried.host_forward_s < tried.host_block_s
    assert tried.host is not None  # whole steps were made with blocks at home
    assert 0 < tried.host.forward_s < 2 * tried.host.forward_beside_s
    assert tried.host.home_update_s > 0 and tried.host.device_update_s > 0
    for rate in ("adamw_per_s", "adamw_weights_per_s", "adamw_moments_per_s"):
        assert getattr(tried, rate)
    assert tried.edge_bytes > 0
    assert tried.kept_backward is not None
    assert 0 < tried.kept_backward.at(8) < tried.backward.at(8)
    assert tried.kept_bytes is not None
    assert 0 < tried.kept_bytes <= 1.2 * tried.activation_bytes


def test_without_host_memory_for_whole_steps_the_trial_says_so_and_keeps_its_own_times() -> None:
    model = demo_model(256, dtype=torch.bfloat16)
    tried = calibrate(model, batch_of, torch.device("cuda"), (2, 8), host_available_bytes=1 << 20)
    assert tried.host is None
    assert 0 < tried.host_forward_s < tried.host_block_s
    assert tried.not_rehearsed is not None
    assert "of the 1.00 MiB of host memory" in tried.not_rehearsed.why


@pytest.mark.parametrize("states", ["fp32", "8bit"])
def test_steps_take_what_the_trial_of_their_block_said(states: StateFormat) -> None:
    """Of a model that lives on the GPU, in a loop that keeps it as busy as a training does."""
    config = Qwen2Config(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=10, num_attention_heads=16,
        num_key_value_heads=2, vocab_size=8192, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).to(torch.bfloat16).train()

    def rows_of(rows: int) -> Batch:
        ids = torch.randint(0, 8192, (rows, 1024))
        return Batch(
            input_ids=ids, labels=ids, position_ids=torch.arange(1024).expand(rows, 1024),
            predicted=ids.numel(), step_predicted=ids.numel(), tokens=ids.numel(), packed=False,
        )  # fmt: skip

    tried = calibrate(model, rows_of, torch.device("cuda"), (4, 16), states=states)
    facts = model_facts(model, config, 1024, states)
    found = rates_from(PER_S, has_gpu=True, calibration=tried)
    assert isinstance(found, Rates)
    layout = Layout(offload="none", batch_rows=16, chunk_rows=16)
    predicted_s = cost(facts, layout, found).step_s
    wrapped = fluxtrain.wrap(
        model, device="cuda", offload="none", chunk_rows=16, overlap=True, states=states
    )
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-6)
    inputs = {name: value for name, value in rows_of(16).inputs().items() if name != "use_cache"}
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

    def take(self, tried: Calibration) -> None:
        found = {
            line: getattr(tried, line).at(64) for line in ("forward", "backward", "outside_forward")
        }
        found["update"] = tried.device_update_s
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
        homes.append({group.kind: group.home for group in engine_of(mini).groups})
        return wrapped

    here, at_home = Fastest(), Fastest()
    for _ in range(4):  # in turn: another program may have the GPU for a while
        here.take(calibrate(model, batch_of, torch.device("cuda"), (16, 64)))
        with monkeypatch.context() as small:
            small.setattr(fluxtrain, "wrap", of_a_small_card)
            at_home.take(calibrate(model, batch_of, torch.device("cuda"), (16, 64)))
        assert homes[0] == {"edge": "host", "block": "device"}  # then it may be rehearsed
        homes.clear()
        ratios = {what: at_home.seconds[what] / here.seconds[what] for what in here.seconds}
        update = ratios.pop("update")
        if all(0.7 < ratio < 1.4 for ratio in ratios.values()) and 0.5 < update < 1.5:
            return
    pytest.fail(f"with its edges at home a block takes other times: {ratios}, {update}")


def test_what_is_updated_is_copied_both_ways_and_is_unlocked_afterwards() -> None:
    sent = torch.arange(32 << 20, dtype=torch.int32)  # 128 MiB
    received = torch.ones(48 << 20, dtype=torch.uint8)
    up, down = (HostBytes(host.data_ptr(), host.nbytes) for host in (sent, received))
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        with busy_bus(up=up, down=down) as begins:
            assert all(host.is_pinned() for host in (sent, received))
            begins()
            time.sleep(0.3)
            begins()
            time.sleep(0.3)
        torch.cuda.synchronize()
    copies = [event.name for event in seen.events() if "Memcpy" in event.name]
    assert sum("HtoD" in name and "Pinned" in name for name in copies) == 2 * 2  # of 64 MiB at most
    assert sum("DtoH" in name and "Pinned" in name for name in copies) == 2 * 1
    assert torch.equal(sent, torch.arange(32 << 20, dtype=torch.int32))
    assert not received.any()  # what came is the zeros of the device
    assert not sent.is_pinned()
    assert not any(thread.name == "busy-bus" for thread in threading.enumerate())


def test_copies_of_what_is_updated_take_of_the_updates_rate() -> None:
    """On a host whose AdamW memory binds; one that binds elsewhere loses nothing."""
    cores = len(os.sched_getaffinity(0))  # one alone is bound by its arithmetic
    alone, beside = (
        adamw_rate(sustained=True, threads=cores, sends=busy, receives=busy)
        for busy in (False, True)
    )
    assert alone.per_s is not None
    assert beside.per_s is not None
    print(f"{alone.per_s / 1e9:.2f} G parameters a second alone, {beside.per_s / 1e9:.2f} beside")
    assert 0.5 * alone.per_s < beside.per_s < 1.02 * alone.per_s
