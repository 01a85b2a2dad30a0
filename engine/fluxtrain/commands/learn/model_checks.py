"""Checks of the tasks about models: LoRA, QLoRA, data parallel, evaluation, adapters."""

from __future__ import annotations

import math
import os
import re
import tempfile
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessRaisedException, start_processes

from fluxtrain.commands.learn.checking import Wrong, load, require

ROWS_BY_RANK = (5, 3)


def _near(own: Tensor, right: Tensor) -> bool:
    return own.shape == right.shape and torch.allclose(own, right, rtol=1e-4, atol=1e-5)


# -- 1: LoRA --------------------------------------------------------------------------------------


def check_lora(own: ModuleType) -> str:
    """Compare `LoRALinear` with peft: outputs, gradients, what is trained, the merged weight."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    rank, alpha = 4, 12
    base, hidden = nn.Linear(24, 16), torch.randn(5, 24)
    before = base(hidden).detach()
    layer = own.LoRALinear(base, rank, alpha)
    require(
        _near(layer(hidden), before),
        "a new LoRALinear changes the output already: B has to begin as zeros, so that training "
        "starts at the base",
    )
    require(layer.A.shape == (rank, 24), f"A is {tuple(layer.A.shape)}, not (rank, in) = (4, 24)")
    require(layer.B.shape == (16, rank), f"B is {tuple(layer.B.shape)}, not (out, rank) = (16, 4)")
    require(layer.A.abs().sum() > 0, "A is zero as well as B: then neither gets a gradient, ever")
    trained = {name for name, one in layer.named_parameters() if one.requires_grad}
    require(
        trained == {"A", "B"},
        f"trained are {sorted(trained)}, and it should be A and B alone: freeze the base with "
        "requires_grad_(False)",
    )
    same = nn.Linear(24, 16)
    same.load_state_dict(base.state_dict())
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=["0"], lora_dropout=0.0)
    theirs: Any = get_peft_model(nn.Sequential(same), config)
    reference = theirs.base_model.model[0]
    with torch.no_grad():
        layer.B.normal_()
        reference.lora_A["default"].weight.copy_(layer.A)
        reference.lora_B["default"].weight.copy_(layer.B)
    mine, right = layer(hidden), theirs(hidden)
    if not _near(mine, right):
        ratio = float((mine - before).detach().norm() / (right - before).detach().norm())
        raise Wrong(
            f"the adapter's part of the output is {ratio:.3g} times that of peft: it is "
            f"(alpha / rank) * B A x, and alpha / rank is {alpha / rank:g} here"
        )
    mine.square().sum().backward()
    right.square().sum().backward()
    for name, grad in (("A", reference.lora_A["default"]), ("B", reference.lora_B["default"])):
        found = getattr(layer, name).grad
        require(found is not None, f"{name} gets no gradient: is it detached on the way?")
        require(_near(found, grad.weight.grad), f"the gradient of {name} differs from peft's")
    merged = layer.merged()
    with torch.no_grad():
        again = hidden @ merged.T + base.bias
    require(
        _near(again, right), "merged() is not the weight that gives the same output without adapter"
    )
    share = (layer.A.numel() + layer.B.numel()) / base.weight.numel()
    return f"output, gradients and merged weight equal peft's; {share:.0%} of the layer is trained"


# -- 2: QLoRA -------------------------------------------------------------------------------------


def check_qlora(own: ModuleType) -> str:
    """Compare `quantize` and `dequantize` with bitsandbytes' NF4, through its oracle here."""
    from fluxtrain.core.quantization.reference import NF4, nf4_codes

    torch.manual_seed(0)
    weight = torch.randn(32, 64) * torch.logspace(-3, 0, 32)[:, None]  # rows of other sizes
    codes, absmax = own.quantize(weight)
    right_codes, right_absmax = nf4_codes(weight.flatten())
    require(
        absmax.numel() == right_absmax.numel(),
        f"there are {absmax.numel()} absolute maxima: one for each block of 64 values makes "
        f"{right_absmax.numel()}. One for all would round the small rows to nothing",
    )
    require(_near(absmax.flatten(), right_absmax), "absmax is not the largest |value| of a block")
    require(codes.dtype == torch.uint8, f"codes are {codes.dtype}: pack two of them into a uint8")
    require(
        codes.numel() == weight.numel() // 2,
        f"{codes.numel()} bytes of codes for {weight.numel()} weights: two codes go into one byte",
    )
    if not torch.equal(codes.flatten(), right_codes):
        swapped = (right_codes >> 4) | ((right_codes & 15) << 4)
        require(
            not torch.equal(codes.flatten(), swapped), "the first of two codes is the upper 4 bits"
        )
        wrong = int((codes.flatten() != right_codes).sum())
        raise Wrong(
            f"{wrong} of {codes.numel()} bytes differ from bitsandbytes': divide by absmax, then "
            "take the nearest of the 16 values of NF4 (they are not evenly spaced)"
        )
    back = own.dequantize(codes, absmax, weight.shape)
    table = torch.tensor(NF4)
    picked = torch.stack([right_codes >> 4, right_codes & 15], 1).long()
    expected = (table[picked].view(-1, 64) * right_absmax[:, None]).view(weight.shape)
    require(_near(back, expected), "dequantize does not give value-of-code times absmax back")
    error = float((back - weight).norm() / weight.norm())
    used = codes.numel() + 4 * absmax.numel()
    bits = 8 * used / weight.numel()
    return f"equal to bitsandbytes' NF4: {bits:g} bits a weight, relative error {error:.3f}"


# -- 4: data parallel -----------------------------------------------------------------------------


def _data() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, torch.randn(3, 8, 6), torch.randn(3, 8, 1)


def _rank(rank: int, path: str, folder: str) -> None:
    """Train three steps on the rows of one process."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the machine's name may lead nowhere
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2
    )
    own = load(Path(path))
    model, inputs, targets = _data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = sum(ROWS_BY_RANK[:rank])
    rows = slice(first, first + ROWS_BY_RANK[rank])
    losses = [
        float(own.train_step(model, optimizer, one[rows], wanted[rows]))
        for one, wanted in zip(inputs, targets, strict=True)
    ]
    torch.save((losses, [one.detach() for one in model.parameters()]), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def _alone(weigh: bool) -> tuple[list[float], list[Tensor]]:
    """Train the same in one process; weigh: each row counts the same, else each process does."""
    model, inputs, targets = _data()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    first = ROWS_BY_RANK[0]
    for one, wanted in zip(inputs, targets, strict=True):
        optimizer.zero_grad()
        rows = (model(one) - wanted).square()
        loss = rows.mean() if weigh else (rows[:first].mean() + rows[first:].mean()) / 2
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [parameter.detach() for parameter in model.parameters()]


def check_parallel(own: ModuleType) -> str:
    """Compare two processes of 5 and 3 rows with one process of 8."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            start_processes(_rank, args=(own.__file__, folder), nprocs=2, start_method="fork")
        except ProcessRaisedException as error:
            lines = re.findall(rf'"{re.escape(str(own.__file__))}", line (\d+)', str(error))
            place = f"line {lines[-1]}: " if lines else ""
            raise Wrong(place + str(error).strip().splitlines()[-1]) from error
        found = [Path(folder) / f"{rank}.pt" for rank in range(2)]
        require(all(one.exists() for one in found), "a process ended before it was checked")
        (losses, weights), (_, others) = (torch.load(one, weights_only=True) for one in found)
    require(
        all(map(_near, weights, others)),
        "after three steps the two processes have different weights: add the gradients of both up "
        "(all_reduce) between backward and the optimizer's step",
    )
    right_losses, right = _alone(weigh=True)
    if not all(map(_near, weights, right)):
        _, unweighted = _alone(weigh=False)
        require(
            not all(map(_near, weights, unweighted)),
            f"the processes have {ROWS_BY_RANK[0]} and {ROWS_BY_RANK[1]} rows, and a mean of their "
            "means counts the rows of the second more: add up sums and counts, then divide",
        )
        raise Wrong(
            "the weights differ from those of one process with all rows: the sum of gradients has "
            "to be divided by the number of all rows"
        )
    require(
        all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(losses, right_losses, strict=True)),
        f"the weights are right, and the loss that is returned is not the mean over all rows: "
        f"{losses[0]:.4f} in place of {right_losses[0]:.4f}",
    )
    return "two processes with 5 and 3 rows make the steps of one with 8"


# -- 6: evaluation --------------------------------------------------------------------------------


class _Bigrams(nn.Module):
    """Logits of the next token by the present one: a model whose likelihoods are known."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = torch.randn(vocabulary, vocabulary) * 2

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) -> (B, T, V)
        return self.table[tokens]


def check_evaluation(own: ModuleType) -> str:
    """Compare log-likelihoods and choices with sums that are written out."""
    model = _Bigrams(20)
    steps = model.table.log_softmax(-1)
    torch.manual_seed(2)
    for length in (1, 3, 6):
        context, answer = torch.randint(20, (4,)).tolist(), torch.randint(20, (length,)).tolist()
        tokens = context + answer
        begin = len(context)
        right = sum(float(steps[tokens[at - 1], tokens[at]]) for at in range(begin, len(tokens)))
        found = float(own.loglikelihood(model, context, answer))
        if math.isclose(found, right, rel_tol=1e-4, abs_tol=1e-4):
            continue
        late = sum(float(steps[tokens[at], tokens[at]]) for at in range(begin, len(tokens)))
        whole = sum(float(steps[tokens[at - 1], tokens[at]]) for at in range(1, len(tokens)))
        require(
            not math.isclose(found, late, rel_tol=1e-4, abs_tol=1e-4),
            "each token is scored by the logits of its own position: those of position t predict "
            "token t + 1",
        )
        require(
            not math.isclose(found, whole, rel_tol=1e-4, abs_tol=1e-4),
            "the tokens of the context are counted: only those of the answer are",
        )
        raise Wrong(f"the log-likelihood is {found:.4f} and should be {right:.4f}")
    rows, right_count = _choices(steps)
    found = float(own.accuracy(model, rows))
    require(
        math.isclose(found, right_count / len(rows)),
        f"the accuracy is {found:.3f} and should be {right_count / len(rows):.3f}: a longer choice "
        "has a lower sum, so compare the sums divided by the numbers of tokens",
    )
    return f"log-likelihoods and accuracy ({found:.2f} of {len(rows)} rows) are right"


def _choices(steps: Tensor) -> tuple[list[dict[str, Any]], int]:
    """Return rows of multiple choice, and how many a right evaluation gets."""
    rows, count = [], 0
    for _ in range(60):
        context = torch.randint(20, (3,)).tolist()
        choices = [torch.randint(20, (length,)).tolist() for length in (1, 3, 7)]
        means = []
        for choice in choices:
            tokens = [context[-1], *choice]
            pairs = pairwise(tokens)
            means.append(sum(float(steps[a, b]) for a, b in pairs) / len(choice))
        gold = int(torch.randint(3, ()))
        count += means.index(max(means)) == gold
        rows.append({"context": context, "choices": choices, "gold": gold})
    return rows, count


# -- 7: adapters ----------------------------------------------------------------------------------


def check_adapters(own: ModuleType) -> str:
    """Compare a batch of several adapters and the base with single rows."""
    torch.manual_seed(0)
    base, down, up = torch.randn(10, 12), torch.randn(3, 4, 12), torch.randn(3, 10, 4)
    scales, hidden = torch.tensor([0.5, 2.0, 1.0]), torch.randn(6, 12)
    chosen = torch.tensor([2, -1, 0, 1, 2, -1])
    found = own.forward(hidden, base, down, up, scales, chosen)
    for row, adapter in enumerate(chosen.tolist()):
        plain = base @ hidden[row]
        right = plain
        if adapter >= 0:
            right = plain + scales[adapter] * (up[adapter] @ (down[adapter] @ hidden[row]))
        if _near(found[row], right):
            continue
        require(
            adapter >= 0,
            f"row {row} asks for the base (-1) and gets an adapter: -1 is the last one to an index",
        )
        first = chosen[0]
        of_first = plain + scales[first] * (up[first] @ (down[first] @ hidden[row]))
        require(
            not _near(found[row], of_first),
            f"row {row} asks for adapter {adapter} and gets that of the first row: one user would "
            "read another's answers",
        )
        raise Wrong(
            f"row {row} differs from adapter {adapter} alone: each has a scale of its own, here "
            f"{float(scales[adapter]):g}"
        )
    alone = own.forward(hidden[3:4], base, down, up, scales, chosen[3:4])
    require(_near(alone[0], found[3]), "a row alone is answered differently than in the batch")
    return "each row of a batch gets its own adapter, or the base"
