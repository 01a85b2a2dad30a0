"""Test the engine against itself on this machine: every comparison is bit for bit.

A tiny Llama model is trained for a few steps; each check says how much it compared.
"""

from __future__ import annotations

import errno
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from fluxtrain.commands.doctor.kernel_test import check_kernels
from fluxtrain.commands.doctor.same import Mismatch, same_bits
from fluxtrain.core.wrap.engine import engine_of
from fluxtrain.core.wrap.wrap import wrap
from fluxtrain.errors import NoSpace
from fluxtrain.events.answers.doctor import SelfTest
from fluxtrain.files.folders import unfinished_folder
from fluxtrain.files.temporary import FULL
from fluxtrain.train.checkpoint.shard_file import hash_file, read_tensors, write_tensors
from fluxtrain.units import bytes_text

STEPS = 3
ROWS, CHUNK_ROWS, SEQUENCE_LENGTH, VOCABULARY = 4, 2, 32, 128

Check = Callable[[], str]
_CLOSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR})


class Unwritable(Exception):
    """Raised when the disk of the runs cannot be written, which is no fault of the engine."""


def self_tests(folder: Path, say: Callable[[str], None]) -> tuple[SelfTest, ...]:
    """Run all self-tests; `folder` is on the disk of the runs. A check that raises has failed."""
    checks: dict[str, Check] = {
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


def run_check(name: str, check: Check) -> SelfTest:
    """Run one check: it passes, fails with what differed or broke, or is left out where the disk
    cannot be written."""
    try:
        return SelfTest(name=name, passed=True, detail=check())
    except Mismatch as mismatch:
        return SelfTest(name=name, passed=False, detail=str(mismatch))
    except Unwritable as unwritable:
        return SelfTest(name=name, passed=None, detail=str(unwritable))
    except Exception as error:  # noqa: BLE001 - whatever breaks the engine here is the result
        words = str(error).partition("\n")[0]
        return SelfTest(name=name, passed=False, detail=f"{type(error).__name__}: {words}")


def check_streaming(device: str) -> str:
    """Check that streamed training gives the losses, weights and states of resident training."""
    with _deterministic():
        ends = []
        for offload in ("none", "max"):
            trainee = Trainee(seed=1, device=device, offload=offload)
            ends.append({**trainee.train(range(STEPS)), **trainee.state()})
    return f"equal to resident in {same_bits(*ends):,} values after {STEPS} steps"


def check_checkpoint(folder: Path) -> str:
    """Check that a run restored from files on the disk of the runs continues as one that never
    stopped."""
    with _deterministic(), _temporary(folder) as place:
        saved, restored = (Trainee(seed=seed, device="cpu", offload="max") for seed in (1, 2))
        saved.train(range(STEPS))
        written = 0
        for position, (name, tensors) in enumerate(saved.engine.state_shards()):
            path = place / f"{position}.safetensors"
            file = write_tensors(path, tensors)
            if hash_file(path) != file:
                raise Mismatch(f"{name}: the disk gave back other bytes than were written")
            written += file.bytes
            restored.engine.load_state_shard(name, read_tensors(path))
        same_bits(saved.state(), restored.state())
        ends = [{**one.train([STEPS]), **one.state()} for one in (saved, restored)]
    return f"{bytes_text(written)} to files and back, equal in {same_bits(*ends):,} values"


@contextmanager
def _temporary(folder: Path) -> Iterator[Path]:
    """Make a temporary folder in `folder` for the length of the context. Raises Unwritable."""
    try:
        with unfinished_folder(folder, ".fluxtrain-") as place:
            yield place
    except (OSError, NoSpace) as error:
        full = isinstance(error, NoSpace) or error.errno in FULL
        if not full and error.errno not in _CLOSED:
            raise
        why = "it is full" if full else error.strerror
        raise Unwritable(
            f"nothing can be written in {folder}, where runs go ({why}): "
            + ("free some space there, or " if full else "")
            + "set FLUXTRAIN_RUNS to a folder that you can write"
        ) from error


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


class Trainee:
    """A wrapped tiny model with its optimizer."""

    def __init__(self, *, seed: int, device: str, offload: str) -> None:
        model = tiny_model(seed)
        self.model = wrap(
            model, device=device, offload=offload, chunk_rows=CHUNK_ROWS, overlap=True
        )
        self.engine = engine_of(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.1)

    def train(self, steps: Iterable[int]) -> dict[str, Tensor]:
        """Train steps with clipping on tokens that depend on the step alone; return the losses."""
        losses = {}
        for step in steps:
            tokens = torch.Generator().manual_seed(step)
            ids = torch.randint(VOCABULARY, (ROWS, SEQUENCE_LENGTH), generator=tokens)
            loss = self.model(input_ids=ids, labels=ids).loss
            loss.backward()
            self.engine.clip_grad_norm(0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses[f"loss of step {step}"] = loss.detach().cpu()
        return losses

    def state(self) -> dict[str, Tensor]:
        """Copy all weights, lower halves and moments."""
        return {
            f"{shard} {name}": tensor.detach().cpu().clone()
            for shard, tensors in self.engine.state_shards()
            for name, tensor in tensors.items()
        }


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
