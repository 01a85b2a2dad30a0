"""Slots for adapters in an opened base: made before the model is wrapped, filled while it answers.

An adapter that came after wrapping would be refused by a packed base and cost a plain one a whole
new wrapping. A slot has room for the largest rank on every linear layer; a smaller adapter has
zeros in the rest of it, which add nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from peft.utils.other import get_pattern_key
from peft.utils.save_and_load import load_peft_weights
from torch import nn
from transformers import PreTrainedModel

from fluxtrain.errors import BadInput, Busy
from fluxtrain.methods.adapters import find_targets
from fluxtrain.results.adapter.source import AdapterSource, read_adapter

BASE = "__base__"  # peft's name of a row without an adapter
_PREFIX = "base_model.model."


@dataclass(kw_only=True)
class Slots:
    """The slots of one model."""

    layers: dict[str, Any]  # peft's, by the base's name for them
    rank: int
    names: list[str]
    filled: dict[str, str] = field(default_factory=dict)  # adapter -> slot, last used last
    rows: list[str] = field(default_factory=list)  # the slot of each row of the next pass

    @staticmethod
    def make(model: PreTrainedModel, count: int, rank: int) -> Slots:
        """Add `count` empty slots to a model that is not wrapped yet, in place.

        All other weights are frozen. Raises BadInput where no layer can have adapters.
        """
        targets = find_targets(model, "auto").names
        model.requires_grad_(False)
        names = [f"slot{number}" for number in range(count)]
        for name in names:
            config = LoraConfig(
                r=rank, lora_alpha=rank, target_modules=targets, task_type="CAUSAL_LM"
            )
            model.add_adapter(config, adapter_name=name)
        found: dict[str, Any] = {
            name: one for name, one in model.named_modules() if isinstance(one, LoraLayer)
        }
        slots = Slots(layers=found, rank=rank, names=names)
        for layer in found.values():
            for part in (*layer.lora_A.values(), *layer.lora_B.values()):
                part.requires_grad_(True)  # never packed with the frozen weights
                if not part.weight.is_meta:
                    nn.init.zeros_(part.weight)
            layer.register_forward_pre_hook(slots._choose, with_kwargs=True)
        return slots

    def facts(self) -> dict[str, int]:
        """Return the number of slots, their rank, and the memory of each."""
        parts = (part[self.names[0]] for one in self.layers.values() for part in _parts(one))
        size = sum(part.weight.numel() * part.weight.element_size() for part in parts)
        return {"slots": len(self.names), "slot_rank": self.rank, "slot_bytes": size}

    def use(self, adapters: Sequence[str | None]) -> None:
        """Let the rows of the next pass be computed with these adapters; None: the base alone."""
        self.rows = [BASE if name is None else self.filled[name] for name in adapters]

    def touch(self, name: str) -> None:
        """Note that an adapter is used."""
        self.filled[name] = self.filled.pop(name)

    def mount(self, name: str, source: AdapterSource, busy: Collection[str | None]) -> None:
        """Fill a slot with an adapter; the one that was used least recently leaves its own.

        busy: adapters that answer now. Raises BadInput where the adapter has no place in a slot,
        or all slots are busy.
        """
        weights = self._checked(source)
        free = [one for one in self.names if one not in self.filled.values()]
        if not free:
            idle = next((one for one in self.filled if one not in busy), None)
            if idle is None:
                raise Busy(
                    f"all {len(self.names)} slots hold adapters that answer now: ask again when "
                    "one has ended, or start with more --slots"
                )
            free = [self.filled.pop(idle)]
        slot = free[0]
        with torch.no_grad():
            for path, layer in self.layers.items():
                to_rank, from_rank = (part[slot].weight for part in _parts(layer))
                to_rank.zero_()
                from_rank.zero_()
                if path in weights:
                    down, up, scaling = weights[path]
                    to_rank[: len(down)].copy_(down)
                    from_rank[:, : len(down)].copy_(up)
                    layer.scaling[slot] = scaling
        self.filled[name] = slot

    def unmount(self, name: str, busy: Collection[str | None]) -> None:
        """Free an adapter's slot. Raises BadInput while it answers, or where it is not mounted."""
        if name not in self.filled or name in busy:
            why = "answers now" if name in busy else "is not mounted"
            raise BadInput(f"the adapter {name} {why}")
        del self.filled[name]

    def _choose(
        self, layer: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Tell a layer which adapter each of its rows has."""
        rows = self.rows or [BASE] * len(args[0])
        return args, {**options, "adapter_names": rows}

    def _checked(self, source: AdapterSource) -> dict[str, tuple[Any, Any, float]]:
        """Return the two matrices and the scaling of an adapter by layer. Raises BadInput."""
        config, found = source.config, load_peft_weights(str(source.folder), device="cpu")
        odd = [
            option
            for option, usual in (("use_dora", False), ("bias", "none"), ("lora_bias", False))
            if getattr(config, option, usual) != usual
        ]
        if config.peft_type != "LORA" or odd or config.modules_to_save:
            raise self._unfit(source, f"it is no plain LoRA ({', '.join(odd) or 'trained heads'})")
        weights = {}
        for key in [one for one in found if one.endswith(".lora_A.weight")]:
            path = key.removeprefix(_PREFIX).removesuffix(".lora_A.weight")
            down, up = found.pop(key), found.pop(key.replace(".lora_A.", ".lora_B."), None)
            if path not in self.layers or up is None:
                raise self._unfit(source, f"it changes {path}, where slots have no place")
            layer = self.layers[path]
            shapes = [tuple(part[self.names[0]].weight.shape) for part in _parts(layer)]
            if (down.shape[1], up.shape[0]) != (shapes[0][1], shapes[1][0]):
                raise self._unfit(source, f"its {path} has another shape than the base's")
            if len(down) > self.rank:
                raise self._unfit(
                    source,
                    f"its rank is {len(down)} and slots have {self.rank}: start the model with "
                    f"--slot-rank {len(down)}",
                )
            pattern = get_pattern_key(config.alpha_pattern.keys(), path)
            alpha = config.alpha_pattern.get(pattern, config.lora_alpha)
            by = math.sqrt(len(down)) if config.use_rslora else len(down)
            weights[path] = (down, up, alpha / by)
        if found or not weights:
            raise self._unfit(source, f"it holds {next(iter(found), 'nothing')} besides LoRA")
        return weights

    @staticmethod
    def _unfit(source: AdapterSource, why: str) -> BadInput:
        return BadInput(
            f"{source.folder} cannot be mounted in a slot: {why}; `fluxtrain export --merge` "
            "makes a model of its own of it"
        )


def adapter_to_mount(folder: Path, base_key: str, storage: str, dtype: str) -> AdapterSource:
    """Read an adapter, and refuse one that was trained on another base than the open one. Raises
    BadInput with both."""
    source = read_adapter(folder)
    told = source.trained_on
    if told is None:
        return source  # of another program: its shapes must do
    for what, own, theirs in (
        ("files", base_key, told.key or base_key),
        ("storage", storage, told.storage),
        ("dtype", dtype, told.dtype),
    ):
        if own != theirs:
            raise BadInput(
                f"{folder} was trained on a base of {what} {theirs[:16]}, and the open one has "
                f"{own[:16]}: open its base in the same way, with --packed or --dtype"
            )
    return source


def _parts(layer: Any) -> tuple[Any, Any]:
    return layer.lora_A, layer.lora_B
