"""Test the engine against itself on this machine: every comparison is bit for bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from fluxtrain.core.adamw.flat import Flat
from fluxtrain.core.adamw.hyper import AdamWUpdate, Hyper
from fluxtrain.core.adamw.kernels import Backend, step_
from fluxtrain.core.adamw.reference import encode
from fluxtrain.core.wrap.engine import engine_of
from fluxtrain.core.wrap.wrap import wrap
from fluxtrain.errors import NoSpace
from fluxtrain.events.answers.machine import SelfTest
from fluxtrain.files.folders import unfinished_folder
from fluxtrain.train.checkpoint.shard_file import hash_file, read_tensors, write_tensors
from fluxtrain.units import bytes_text

STEPS = 3
ELEMENTS = 100_003  # several threads, and a tail that fills no vector
ROWS, CHUNK_ROWS, SEQUENCE_LENGTH, VOCABULARY = 4, 2, 32, 128

Tensors = Mapping[str, Tensor]


class Mismatch(Exception):
    """Raised when two results that must be equal differ; the message says by how much."""


def self_tests(folder: Path, say: Callable[[str], None]) -> tuple[SelfTest, ...]:
    """Run all self-tests; `folder` is on the disk of the runs. A check that raises has failed."""
    checks: dict[str, Callable[[], str]] = {
        "native kernels": check_kernels,
        "streaming on cpu": lambda: check_streaming("cpu"),
        "streaming on cuda": lambda: check_streaming("cuda"),
        "checkpoint": lambda: check_checkpoint(folder),
    }
    found = []
    for name, check in checks.items():
        if name.endswith("cuda") and not torch.cuda.is_available():
            found.append(SelfTest(name=name, passed=None, detail="torch has no GPU to use"))
            continue
        say(f"testing {name}")
        found.append(run_check(name, check))
    return tuple(found)


def run_check(name: str, check: Callable[[], str]) -> SelfTest:
    """Run one check: it passes, fails with what differed or broke, or is left out where the disk
    cannot be written."""
    try:
        return SelfTest(name=name, passed=True, detail=check())
    except Mismatch as mismatch:
        return SelfTest(name=name, passed=False, detail=str(mismatch))
    except (OSError, NoSpace) as error:
        why = getattr(error, "strerror", None) or error
        return SelfTest(
            name=name,
            passed=None,
            detail=f"nothing can be written where runs go ({why}): free some space there, or set "
            "FLUXTRAIN_RUNS to a folder that you can write",
        )
    except Exception as error:  # noqa: BLE001 - whatever breaks the engine here is the result
        words = str(error).partition("\n")[0]
        return SelfTest(name=name, passed=False, detail=f"{type(error).__name__}: {words}")


def check_kernels() -> str:
    """Check that the native AdamW of this processor writes what torch's operations write."""
    return f"equal to torch in {same_bits(_updated('native'), _updated('torch')):,} values"


def _updated(backend: Backend) -> Tensors:
    """Return weights and moments after three updates of bf16 weights."""
    generator = torch.Generator().manual_seed(0)
    weights, grad, m = (torch.randn(ELEMENTS, generator=generator) for _ in range(3))
    hi, lo = encode(weights)
    flat = Flat(weights=hi, lo=lo, m=m, v=m.square(), gradient=grad.bfloat16())
    for step in range(1, STEPS + 1):
        flat = replace(flat, gradient=(grad * step).bfloat16())
        update = AdamWUpdate(hyper=Hyper(lr=1e-3, weight_decay=0.1), step=step, scale=0.5)
        step_(flat, update, backend=backend)
    return {name: value for name, value in vars(flat).items() if isinstance(value, Tensor)}


def check_streaming(device: str) -> str:
    """Check that streamed training gives the losses, weights and states of resident training."""
    with _deterministic():
        ends = []
        for offload in ("none", "max"):
            trainee = Trainee(seed=1, device=device, offload=offload)
            ends.append({**trainee.train(), **trainee.state()})
    return f"equal to resident in {same_bits(*ends):,} values after {STEPS} steps"


def check_checkpoint(folder: Path) -> str:
    """Check that a model which reads a trained one's files on the disk of the runs equals it."""
    saved, restored = (Trainee(seed=seed, device="cpu", offload="max") for seed in (1, 2))
    saved.train()
    written = 0
    with unfinished_folder(folder, ".fluxtrain-") as place:
        for position, (name, tensors) in enumerate(saved.engine.state_shards()):
            path = place / f"{position}.safetensors"
            file = write_tensors(path, tensors)
            if hash_file(path) != file:
                raise Mismatch(f"{name}: the disk gave back other bytes than were written")
            written += file.bytes
            restored.engine.load_state_shard(name, read_tensors(path))
    count = same_bits(saved.state(), restored.state())
    return f"{bytes_text(written)} to files and back, equal in {count:,} values"


def same_bits(one: Tensors, other: Tensors) -> int:
    """Compare the bits of all values, also of NaNs and of both zeros, and return their number.

    Raises Mismatch at the first difference.
    """
    if one.keys() != other.keys():
        raise Mismatch(f"only one side has {min(one.keys() ^ other.keys())!r}")
    for name, left in one.items():
        right = other[name]
        if left.shape != right.shape or left.dtype != right.dtype:
            raise Mismatch(f"{name} has another shape or dtype")
        bits = [each.contiguous().reshape(-1, 1).view(torch.uint8) for each in (left, right)]
        if wrong := int((bits[0] != bits[1]).any(1).sum()):
            raise Mismatch(f"{wrong:,} of {left.numel():,} values of {name} differ")
    return sum(tensor.numel() for tensor in one.values())


class Trainee:
    """A wrapped tiny model with its optimizer."""

    def __init__(self, *, seed: int, device: str, offload: str) -> None:
        self.model = wrap(
            tiny_model(seed), device=device, offload=offload, chunk_rows=CHUNK_ROWS, overlap=True
        )
        self.engine = engine_of(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.1)

    def train(self) -> Tensors:
        """Train with clipping on tokens that depend on the step alone; return the losses."""
        losses = {}
        for step in range(STEPS):
            tokens = torch.Generator().manual_seed(step)
            ids = torch.randint(VOCABULARY, (ROWS, SEQUENCE_LENGTH), generator=tokens)
            loss = self.model(input_ids=ids, labels=ids).loss
            loss.backward()
            self.engine.clip_grad_norm(0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses[f"loss of step {step}"] = loss.detach().cpu()
        return losses

    def state(self) -> Tensors:
        """Copy all weights, lower halves and moments."""
        return {
            f"{shard} {name}": tensor.detach().cpu().clone()
            for shard, tensors in self.engine.state_shards()
            for name, tensor in tensors.items()
        }


def tiny_model(seed: int) -> nn.Module:
    """Make a bf16 Llama of three blocks without touching the global random state."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2 * SEQUENCE_LENGTH,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    return model.to(torch.bfloat16).train()


@contextmanager
def _deterministic() -> Iterator[None]:
    """Make sums deterministic, without which no two runs on a GPU are comparable."""
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=warns)
