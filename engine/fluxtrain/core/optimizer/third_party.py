"""Another package's AdamW over a model that lives wholly on the device; imported when asked for.

The optimizer gets plain parameters over the same memory, because compiled steps and custom kernels
cannot take wrapped ones. The gradients are clipped in place first, so the host reads the norm once
a step.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fluxtrain.core.gradients.host_gradients import round_stored
from fluxtrain.core.guards.writes import check_writes
from fluxtrain.core.memory.group import Group
from fluxtrain.core.memory.segment import Member
from fluxtrain.core.runtime.parameter import owner_of
from fluxtrain.errors import BadInput, MisusedModel

if TYPE_CHECKING:
    from fluxtrain.core.runtime.context import Context

SHARD = "optimizer"
Groups = list[dict[str, Any]]
Make = Callable[[Groups], torch.optim.Optimizer]


class ThirdPartyOptimizer:
    """Steps the weights themselves, without fp32 masters."""

    updates_in_backward = False

    def __init__(self, context: Context, groups: Groups, make: Make) -> None:
        """Call `make` with `groups` in which plain parameters replace the wrapped ones.

        Raises MisusedModel when a part of the model does not live on the device.
        """
        elsewhere = [group.name for group in context.groups if not group.is_on("device", "state")]
        if elsewhere:
            raise MisusedModel(
                f"{elsewhere[0]} and {len(elsewhere) - 1} more parts live on the host, where only "
                "FluxTrain's own AdamW updates: use placement.offload=none, or train.states=8bit"
            )
        self._context = context
        self._pairs: list[tuple[Group, Member, nn.Parameter]] = []
        self._loose: list[nn.Parameter] = []
        self.inner = make([{**g, "params": [self._plain(p) for p in g["params"]]} for g in groups])

    @property
    def param_groups(self) -> Groups:
        """Return the groups of the package's optimizer."""
        return self.inner.param_groups

    def begin_in_backward(self, loss: Tensor) -> None:
        """Raise MisusedModel: the packages step all weights at once."""
        raise MisusedModel(
            f"{type(self.inner).__name__} cannot update in the backward pass: set "
            "train.max_grad_norm, or use FluxTrain's own adamw"
        )

    def step(self) -> None:
        """Clip by the norm that the engine measured, and step.

        Does nothing if the norm or a loss is not finite; reading the norm reports that.
        """
        context = self._context
        norm, context.norm = context.norm, None
        scale = 1.0 if norm is None else norm.scale()
        if math.isnan(scale):
            return
        for group in context.groups:
            check_writes(group)
            round_stored(group)
        for _, member, plain in self._pairs:
            plain.grad = _scaled(member, scale) if member.has_gradient else None
        for parameter in self._loose:
            if parameter.grad is not None and scale != 1.0:
                parameter.grad.mul_(scale)
        self.inner.step()
        for _, _, plain in self._pairs:
            plain.grad = None
        for group in context.groups:
            group.weights_changed(frozen=False)
        context.counters.step += 1

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for group in self._context.groups:
            self._context.gradients_of(group).host.forget(group)
        for parameter in self._loose:
            parameter.grad = None

    def state_shards(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield the optimizer's state as bytes (n,) uint8, in its package's own format."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # paged states are read by the host
        file = io.BytesIO()
        torch.save(self.inner.state_dict(), file)
        yield SHARD, {"state_dict": torch.frombuffer(file.getbuffer(), dtype=torch.uint8)}

    def load_state_shard(self, name: str, tensors: dict[str, Tensor]) -> bool:
        """Load the shards of `state_shards`. Raises BadInput for the state of another optimizer."""
        if name != SHARD:
            return False
        try:
            file = io.BytesIO(tensors["state_dict"].numpy().tobytes())
            state = torch.load(file, map_location="cpu", weights_only=True)
            self.inner.load_state_dict(state)
        except (KeyError, TypeError, ValueError, RuntimeError, UnpicklingError) as error:
            raise BadInput(
                f"the checkpoint's optimizer state cannot be used ({str(error).splitlines()[0]}): "
                "resume with the train.optimizer and the package that it was made with"
            ) from error
        self._page_again()
        return True

    def _page_again(self) -> None:
        """Move the loaded states of a paged optimizer back to paged memory."""
        if not getattr(self.inner, "is_paged", False):
            return
        inner: Any = self.inner
        for parameter, state in inner.state.items():
            for name in ("state1", "state2"):
                loaded = state.get(name)
                if isinstance(loaded, Tensor):
                    state[name] = inner.get_state_buffer(parameter, dtype=loaded.dtype)
                    state[name].copy_(loaded)

    def _plain(self, parameter: nn.Parameter) -> nn.Parameter:
        owner = owner_of(parameter)
        if owner is None:
            self._loose.append(parameter)
            return parameter
        plain = nn.Parameter(owner.group.memory.views[owner.member.index])
        self._pairs.append((owner.group, owner.member, plain))
        return plain


def _scaled(member: Member, scale: float) -> Tensor:
    """Multiply the stored gradient in place by `scale` and by the factor recorded for it."""
    gradient = member.gradient
    factor, member.gradient_scale = member.gradient_scale * scale, 1.0
    return gradient if factor == 1.0 else gradient.mul_(factor)


@dataclass(frozen=True, kw_only=True)
class ThirdParty:
    """The package of an optimizer, and its arguments besides rate, betas and epsilon."""

    package: str
    module: str
    name: str
    extra: str  # of this project, which installs it
    needs_gpu: bool = False
    options: tuple[tuple[str, Any], ...] = ()


THIRD_PARTY = {
    "bnb-adamw-8bit": ThirdParty(
        package="bitsandbytes", module="bitsandbytes.optim", name="AdamW8bit", extra="bitsandbytes"
    ),
    "bnb-paged-adamw-8bit": ThirdParty(
        package="bitsandbytes",
        module="bitsandbytes.optim",
        name="PagedAdamW8bit",
        extra="bitsandbytes",
        needs_gpu=True,
    ),
    "torchao-adamw-4bit": ThirdParty(
        package="torchao",
        module="torchao.optim",
        name="AdamW4bit",
        extra="torchao",
        options=(("bf16_stochastic_round", True),),  # without masters, small updates would vanish
    ),
}


def check_third_party(name: str, device: str) -> None:
    """Raise BadInput if the optimizer `name` is not available on `device` (cpu, cuda)."""
    found = THIRD_PARTY[name]
    if importlib.util.find_spec(found.package) is None:
        raise BadInput(
            f"train.optimizer={name} needs the package {found.package}, which is not installed: "
            f"pip install 'fluxtrain[{found.extra}]', or use train.states=8bit, which needs nothing"
        )
    if found.needs_gpu and device == "cpu":
        raise BadInput(f"train.optimizer={name} pages between a GPU and the host: it needs a GPU")


def third_party_optimizer(
    name: str,
    groups: Iterable[dict[str, Any]],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
) -> torch.optim.Optimizer:
    """Make the optimizer `name` over parameter groups with their own rate and decay.

    Raises BadInput if its package is too old or cannot be loaded.
    """
    found = THIRD_PARTY[name]
    try:
        kind = getattr(importlib.import_module(found.module), found.name)
        made: torch.optim.Optimizer = kind(
            list(groups), lr=lr, betas=betas, eps=eps, **dict(found.options)
        )
    except (ImportError, AttributeError, TypeError) as error:
        raise BadInput(
            f"train.optimizer={name}: {found.package} cannot be used ({error}): "
            f"pip install --upgrade 'fluxtrain[{found.extra}]'"
        ) from error
    return made
