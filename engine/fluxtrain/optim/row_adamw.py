"""What the weights of some rows will be, before the update of their table has come to them.

AdamW of one element looks at no other, so the native kernels can compute rows of a table and write
nothing of it: the bits are those that the table's own update will write. That update may then come
last, and the next forward begins with the rows it looks up.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from fluxtrain import _native
from fluxtrain.optim.flat import Flat, check_flats
from fluxtrain.optim.hyper import AdamWUpdate

# Elements, some 3 ms: the update runs on all cores meanwhile, and all wait for the thread that gets
# a core last.
_LEAST_PER_THREAD = 1 << 22


def weights_of_rows(
    flat: Flat,
    rows: Tensor,
    into: Tensor,
    update: AdamWUpdate,
    *,
    threads: int | None = None,
) -> None:
    """The weights after `update` of `rows` (U,) int64 of the table that `flat` is, into `into`
    (U, H) on the host, without the GIL.

    Weights are bfloat16 with `lo`, or float32; moments have any format. Rows may come in any order
    and more than once; raises IndexError for one that the table does not have. threads
    None: as many as pay beside an update, torch's at most. The result does
    not depend on threads or on the instruction set.
    """
    width = _width(flat, rows, into)
    if not len(rows):
        return
    least, most = (int(row) for row in rows.aminmax())
    table_rows = flat.weights.numel() // width
    if least < 0 or most >= table_rows:
        raise IndexError(f"rows from {least} to {most} of a table of {table_rows}")
    held = None
    if flat.state_format == "8bit":
        held = _native.States8(*(t.data_ptr() for t in flat.states8))
    moments = (flat.m.data_ptr(), flat.v.data_ptr()) if held is None else (ctypes.byref(held),)
    bits = {torch.uint8: "8", torch.bfloat16: "16", torch.float32: ""}[flat.m.dtype]
    wide = "f32" if flat.lo is None else "split_f32"
    name = "split_bf16" if flat.gradient.dtype is torch.bfloat16 else wide
    _native.kernel(f"adamw{bits}_rows_{name}")(
        into.data_ptr(),
        *(weights.data_ptr() for weights in (flat.weights, flat.lo) if weights is not None),
        *moments,
        flat.gradient.data_ptr(),
        ctypes.byref(_native.Rows(rows.data_ptr(), len(rows), width)),
        ctypes.byref(_native.AdamWStep(*update.coefficients())),
        threads or min(torch.get_num_threads(), 1 + into.numel() // _LEAST_PER_THREAD),
    )


def _width(flat: Flat, rows: Tensor, into: Tensor) -> int:
    """Elements of a row; wrong tensors would corrupt memory in C, so they are refused here."""
    if flat.master is not None:
        raise TypeError("rows of fp16 weights are written with their masters")
    n = flat.check()
    count, width = into.shape
    check_flats([("rows", rows, (torch.int64,))])
    check_flats([("into", into, (flat.weights.dtype,))])
    if count != len(rows) or width == 0 or n % width:
        raise ValueError(f"{len(rows)} rows of {n} elements do not go into {tuple(into.shape)}")
    return width
