"""What is compared on the GPU: FluxTrain, the loop without it, and DeepSpeed where it is installed.

Each takes the same model, gradient clipping at 1.0 (unless it updates in backward or is unclipped),
AdamW and recomputation, and gives the loss of a step as a tensor that is still on the device.
"""

from __future__ import annotations

import os
from typing import Protocol

import torch
from torch import Tensor
from transformers import Qwen2ForCausalLM

from fluxtrain.core.wrap.engine import Engine

MAX_NORM = 1.0


class Loop(Protocol):
    """One way to train a model."""

    def step(self, ids: Tensor) -> Tensor:
        """Train on ids (B, T); the loss."""


class FluxLoop:
    """FluxTrain's engine as its trainer drives it."""

    def __init__(
        self,
        model: Qwen2ForCausalLM,
        engine: Engine,
        rate: float,
        *,
        in_backward: bool,
        passes: int = 1,
    ) -> None:
        self._model, self.engine = model, engine
        self._in_backward, self._passes = in_backward, passes
        trained = [p for p in model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=rate)

    def step(self, ids: Tensor) -> Tensor:
        told = torch.zeros((), device=ids.device)
        for number, rows in enumerate(ids.chunk(self._passes), 1):
            self.engine.exchange.last_pass = number == self._passes
            loss: Tensor = self._model(input_ids=rows, labels=rows).loss / self._passes
            if self._in_backward:
                self.engine.begin_step_in_backward(self._optimizer, loss)
            loss.backward()
            told += loss.detach()
        self.engine.clip_grad_norm(None if self._in_backward else MAX_NORM, [told])
        self._optimizer.step()
        self.engine.forget_gradients()
        return told


class ResidentLoop:
    """Everything on the GPU, torch's fused AdamW on the bf16 weights with bf16 states."""

    def __init__(self, model: Qwen2ForCausalLM, rate: float) -> None:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        self._model = model
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True)

    def step(self, ids: Tensor) -> Tensor:
        loss: Tensor = self._model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), MAX_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()


class MastersLoop:
    """Everything resident, fused AdamW with fp32 states on fp32 masters of the bf16 weights."""

    def __init__(
        self,
        model: Qwen2ForCausalLM,
        rate: float,
        *,
        clipped: bool = True,
        masters_off_by: float = 0.0,
    ) -> None:
        self._clipped = clipped
        model.gradient_checkpointing_enable({"use_reentrant": False})
        self._model = model
        self._weights = list(model.parameters())
        self._masters = [
            off_by(weight.detach().float(), masters_off_by).requires_grad_()
            for weight in self._weights
        ]
        self._optimizer = torch.optim.AdamW(self._masters, lr=rate, fused=True)

    def step(self, ids: Tensor) -> Tensor:
        loss: Tensor = self._model(input_ids=ids, labels=ids).loss
        loss.backward()
        for weight, master in zip(self._weights, self._masters, strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        if self._clipped:
            torch.nn.utils.clip_grad_norm_(self._masters, MAX_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(self._weights, self._masters)
        return loss.detach()


def off_by(masters: Tensor, relative: float) -> Tensor:
    """The same but for a random relative error, of a rounding's size: how far two trainings drift
    apart that differ by nothing else is the least that can be asked of a third one's losses."""
    if relative:
        generator = torch.Generator(masters.device).manual_seed(0)
        noise = torch.empty_like(masters).normal_(0.0, relative, generator=generator)
        masters.mul_(noise.add_(1.0))
    return masters


class DeepSpeedLoop:
    """DeepSpeed's ZeRO with the optimizer (stage 2) or weights too (stage 3) in host memory."""

    def __init__(self, model: Qwen2ForCausalLM, rate: float, stage: int, rows: int) -> None:
        import deepspeed

        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
            os.environ.setdefault(name, value)
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29511")
        model.gradient_checkpointing_enable({"use_reentrant": False})
        home = {"device": "cpu", "pin_memory": True}
        zero = {"stage": stage, "offload_optimizer": home}
        if stage == 3:
            zero["offload_param"] = home
        self._engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            config={
                "train_micro_batch_size_per_gpu": rows,
                "gradient_accumulation_steps": 1,
                "gradient_clipping": MAX_NORM,
                "bf16": {"enabled": True},
                "zero_optimization": zero,
                "optimizer": {"type": "AdamW", "params": {"lr": rate, "weight_decay": 0.01}},
            },
        )

    def step(self, ids: Tensor) -> Tensor:
        loss: Tensor = self._engine(input_ids=ids, labels=ids, use_cache=False).loss
        self._engine.backward(loss)
        self._engine.step()
        return loss.detach()
