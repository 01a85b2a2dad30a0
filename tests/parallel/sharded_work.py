"""What ranks do with sharded models of transformers; each function runs on every rank."""

from __future__ import annotations

import gc
import os
import weakref
from typing import Any
from unittest.mock import patch

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, distributed
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from fluxtrain.config.parallel_settings import CommSettings, FsdpSettings
from fluxtrain.methods.optimizer import parameter_groups
from fluxtrain.parallel.engine import ShardedAdamW, ShardedEngine
from fluxtrain.parallel.sharding import _send_from_first, shard

ROWS, LENGTH, WORDS = 4, 16, 64


def llama(
    dtype: str = "float32", *, tied: bool = False, seed: int = 1, width: int = 64
) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=width, intermediate_size=width, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(getattr(torch, dtype))


def with_adapters(model: LlamaForCausalLM) -> Any:
    torch.manual_seed(2)
    adapters = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(model, adapters)


def model_of(kind: str, dtype: str = "float32") -> Any:
    """Return a model of a kind; that of qlora has weights that are large enough to be packed."""
    model = llama(dtype, tied=kind == "tied", width=256 if kind == "qlora" else 64)
    return with_adapters(model) if kind in ("lora", "qlora") else model


def step_rows(step: int) -> Tensor:
    """Return all rows of a step, (ROWS, LENGTH)."""
    draws = torch.Generator().manual_seed(step)
    return torch.randint(WORDS, (ROWS, LENGTH), generator=draws)


def sharded(model: Any, **settings: Any) -> tuple[ShardedEngine, ShardedAdamW]:
    comm = CommSettings(**settings.pop("comm", {}))
    frozen, fused = settings.pop("frozen", "plain"), settings.pop("fused", None)
    chosen = FsdpSettings(**settings)
    engine = shard(model, torch.device("cpu"), chosen, comm, None, frozen=frozen)  # type: ignore[arg-type]
    groups = parameter_groups(model, learning_rate=1e-2, weight_decay=0.1, no_decay=("norms",))
    return engine, ShardedAdamW(engine, groups, lr=1e-2, fused=fused)


def steps(engine: Any, optimizer: Any, first: int, last: int, ranks: int, rank: int) -> list[float]:
    """Make steps `first` to before `last` with this rank's rows; return the losses."""
    losses = []
    for number in range(first, last):
        rows = step_rows(number).chunk(ranks)[rank]
        logits = engine.model(input_ids=rows, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), rows[:, 1:].flatten(), reduction="sum"
        ) / (ROWS * (LENGTH - 1))
        loss.backward()
        norm = engine.clip_grad_norm(1.0, [loss])
        norm.skips = True
        optimizer.step()
        engine.forget_gradients()
        losses.append(sum(norm.losses()))
    return losses


def train(
    kind: str,
    count: int,
    settings: dict[str, Any],
    dtype: str = "float32",
    first: int = 0,
    state: dict[str, dict[str, Tensor]] | None = None,
) -> tuple[list[float], dict[str, dict[str, Tensor]]]:
    """Train a sharded model of a kind, from a state; return losses and the whole state."""
    model = model_of(kind, dtype)
    chosen = dict(settings)
    if kind == "qlora":
        chosen["frozen"] = "nf4-double"
    local = {"LOCAL_WORLD_SIZE": str(chosen.pop("local", distributed.get_world_size()))}
    with patch.dict(os.environ, local):
        engine, optimizer = sharded(model, **chosen)
    for name, tensors in (state or {}).items():
        engine.load_state_shard(name, tensors)
    ranks, rank = distributed.get_world_size(), distributed.get_rank()
    losses = steps(engine, optimizer, first, first + count, ranks, rank)
    shards = dict(engine.state_shards())
    engine.close()
    return losses, shards


def effects(settings: dict[str, Any]) -> dict[str, Any]:
    """Make one pass, and see what a setting does."""
    model: Any = llama(seed=1 + distributed.get_rank())  # not the same weights on each rank
    engine, _ = sharded(model, **settings)
    units = {n: m for n, m in model.named_modules() if isinstance(m, FSDPModule)}
    order: list[str] = []
    calls = [0]
    for name, module in model.named_modules():
        if name.endswith("up_proj"):
            module.register_forward_pre_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    for unit_name, unit in units.items():
        group = unit._get_fsdp_state()._fsdp_param_group
        for what in ("unshard", "post_backward"):
            original = getattr(group, what)

            def noted(
                *a: Any, _call: Any = original, _name: str = f"{what} {unit_name}", **k: Any
            ) -> Any:
                order.append(_name)
                return _call(*a, **k)

            setattr(group, what, noted)
    rows = step_rows(0)
    loss = model(input_ids=rows, labels=rows, use_cache=False).loss
    gathered = [n for n, u in units.items() if u._get_fsdp_state()._fsdp_param_group.is_unsharded]
    loss.backward()
    of_first = llama(seed=1)(input_ids=rows, labels=rows, use_cache=False).loss
    by = engine.memory()
    engine.close()
    return {
        "units": [*[n for n in units if n], ""],
        "shard_bytes": by.host_arena_bytes - by.device_by["gradients"],
        "gathered_after_forward": [*[n for n in gathered if n], *([""] if "" in gathered else [])],
        "forwards": calls[0],
        "order": order,
        "equal": abs(float(loss.detach()) - float(of_first.detach())) < 1e-5,
    }


class _Writes(TorchDispatchMode):
    """Counts the operations that write to tensors of a model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._places = {t.data_ptr() for t in (*model.parameters(), *model.buffers())}
        self.count = 0

    def __torch_dispatch__(
        self, function: Any, _: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        if function._schema.is_mutable:
            first = arguments[0][0] if isinstance(arguments[0], list) else arguments[0]
            self.count += first.data_ptr() in self._places
        return function(*arguments, **(named or {}))


def written_to_get_the_first_ones(alike: bool) -> int:
    """Return how often weights are written to when rank 0 sends its own."""
    model = llama(seed=1 if alike else 1 + distributed.get_rank())
    with _Writes(model) as writes:
        _send_from_first(model, torch.device("cpu"))
    return writes.count


class _NoOperation(TorchDispatchMode):
    """No operation of torch, and no look at the gradient of a shard, is allowed in here."""

    def __enter__(self) -> Any:
        def refuse(*_: object) -> None:
            raise AssertionError("a gradient was read")

        DTensor.grad = property(refuse)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        del DTensor.grad
        super().__exit__(*error)

    def __torch_dispatch__(self, function: Any, *_: Any, **__: Any) -> Any:
        raise AssertionError(f"{function} was called")


def looked_at() -> tuple[int, int]:
    """Return the bytes of gradients that the gauges tell after the norm is measured, and the bytes
    that the gradients have."""
    engine, optimizer = sharded(llama())
    steps(engine, optimizer, 0, 1, distributed.get_world_size(), distributed.get_rank())
    engine.model(input_ids=step_rows(0), use_cache=False).logits.float().mean().backward()
    engine.clip_grad_norm(1.0)
    there = sum(p.grad.to_local().nbytes for p in engine.model.parameters())
    with _NoOperation():
        seen = engine.memory().device_by["gradients"], engine.residency().gradients_bytes
    engine.close()
    assert seen[0] == seen[1]
    return seen[0], there


def bytes_of_a_checkpoint() -> tuple[int, int]:
    """Return the estimated size of a checkpoint in bytes, and its real one."""
    comm = {"compress": "int8", "config": {"error_feedback": True}}
    engine, optimizer = sharded(llama(), comm=comm)
    steps(engine, optimizer, 0, 1, distributed.get_world_size(), distributed.get_rank())
    told = engine.shard_bytes()
    taken = sum(t.nbytes for _, tensors in engine.state_shards() for t in tensors.values())
    engine.close()
    return told, taken


def whole_ones_left() -> list[int]:
    """Return how many whole weights there still are after each unit is sharded."""
    model = llama()
    whole = [weakref.ref(parameter) for parameter in model.parameters()]
    left = []

    def noted(unit: Any, **how: Any) -> None:
        fully_shard(unit, **how)
        gc.collect()
        left.append(sum(one() is not None for one in whole))

    with patch("fluxtrain.parallel.sharding.fully_shard", noted):
        engine, _ = sharded(model)
    engine.close()
    return left


def refused_step(fused: bool) -> tuple[bool, bool]:
    """Make a step whose gradient is not finite on one rank: return whether the weights stayed, and
    whether the next step moves them."""
    model: Any = llama()
    engine, optimizer = sharded(model, fused=fused)
    here = [parameter.to_local() for parameter in model.parameters()]
    before = [own.clone() for own in here]

    def stayed() -> bool:
        return all(map(torch.equal, here, before))

    loss = model(input_ids=step_rows(0), use_cache=False).logits.float().mean()
    loss.backward()
    if distributed.get_rank() == 1:
        next(p for p in model.parameters()).grad.to_local()[0] = torch.inf
    engine.clip_grad_norm(1.0, [loss]).skips = True
    optimizer.step()
    first = stayed()
    engine.forget_gradients()
    steps(engine, optimizer, 1, 2, distributed.get_world_size(), distributed.get_rank())
    second = stayed()
    engine.close()
    return first, not second
