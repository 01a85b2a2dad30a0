"""Another package's optimizer over a model that lives wholly on the device.

It is given plain parameters over the same memory: compiled steps and custom kernels see no wrapped
ones. The gradients are clipped in place first, so the host reads the norm once a step.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fluxtrain.errors import BadInput, MisusedModel
from fluxtrain.memory.cuts import round_at_home, stored
from fluxtrain.memory.group import Group
from fluxtrain.memory.segment import Member
from fluxtrain.stream.parameter import owner_of
from fluxtrain.stream.writes import check_writes

if TYPE_CHECKING:
    from fluxtrain.stream.engine import Engine

SHARD = "optimizer"
Groups = list[dict[str, Any]]
Make = Callable[[Groups], torch.optim.Optimizer]


class OutsideOptimizer:
    """Steps the weights as they are, without masters; to the trainer it is an optimizer."""

    def __init__(self, engine: Engine, groups: Groups, make: Make) -> None:
        """`make` gets `groups` with plain parameters in place of wrapped ones.

        Raises MisusedModel when a part of the model does not live on the device.
        """
        elsewhere = [group.name for group in engine.groups if group.placement.state != "device"]
        if elsewhere:
            raise MisusedModel(
                f"{elsewhere[0]} and {len(elsewhere) - 1} more parts live on the host, where only "
                "FluxTrain's own AdamW updates: use placement.offload=none, or train.states=8bit"
            )
        self._engine = engine
        self._pairs: list[tuple[Group, Member, nn.Parameter]] = []
        self._loose: list[nn.Parameter] = []
        self.inner = make([{**g, "params": [self._plain(p) for p in g["params"]]} for g in groups])

    @property
    def param_groups(self) -> Groups:
        """The optimizer's own."""
        return self.inner.param_groups

    def step(self) -> None:
        """Clip by the norm that the engine measured, and step. Where norm or losses are not finite
        nothing is done: whoever reads the norm says so."""
        engine = self._engine
        norm, engine.norm = engine.norm, None
        scale = 1.0 if norm is None else norm.scale()
        if math.isnan(scale):
            return
        for group in engine.groups:
            check_writes(engine, group)
            round_at_home(group)
        for _, member, plain in self._pairs:
            plain.grad = _scaled(member, scale) if member.has_gradient else None
        for parameter in self._loose:
            if parameter.grad is not None and scale != 1.0:
                parameter.grad.mul_(scale)
        self.inner.step()
        for _, _, plain in self._pairs:
            plain.grad = None
        for group in engine.groups:
            group.version += 1
        engine.accounts.step += 1

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for group in self._engine.groups:
            self._engine.gradients.forget(group)
        for parameter in self._loose:
            parameter.grad = None

    def shard(self) -> tuple[str, dict[str, Tensor]]:
        """The optimizer's state as bytes (n,) uint8: formats of other packages are their own."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # paged states are read by the host
        file = io.BytesIO()
        torch.save(self.inner.state_dict(), file)
        return SHARD, {"state_dict": torch.frombuffer(file.getbuffer(), dtype=torch.uint8)}

    def load_shard(self, tensors: dict[str, Tensor]) -> None:
        """What `shard` gave, exactly. Raises BadInput for that of another optimizer."""
        try:
            file = io.BytesIO(tensors["state_dict"].numpy().tobytes())
            state = torch.load(file, map_location="cpu", weights_only=True)
            self.inner.load_state_dict(state)
        except (KeyError, ValueError, RuntimeError, UnpicklingError) as error:
            raise BadInput(
                f"the checkpoint's optimizer state cannot be used ({str(error).splitlines()[0]}): "
                "resume with the train.optimizer and the package that it was made with"
            ) from error
        self._page_again()

    def _page_again(self) -> None:
        """Loaded states of a paged optimizer go back to paged memory."""
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
        plain = nn.Parameter(owner.group.home_views[owner.member.index])
        self._pairs.append((owner.group, owner.member, plain))
        return plain


def _scaled(member: Member, scale: float) -> Tensor:
    """The stored gradient times `scale` and what was recorded for it, in place."""
    gradient = stored(member)
    factor, member.gradient_scale = member.gradient_scale * scale, 1.0
    return gradient if factor == 1.0 else gradient.mul_(factor)
