"""A product of known numbers before a device is trusted with others.

The code that drives GPUs was written without one. So the first call of a group checks one small
product in every dtype, whose result is known to the last bit, and refuses the device if it differs.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from weft.dtype import in_triton
from weft.errors import Unsupported

OFF = "WEFT_CHECK"
DTYPES = tuple(in_triton())
ROWS, INNER, COLUMNS = 6, 16, 8

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""`all_gather_matmul`: takes this rank's rows of x, and w; returns the product of all rows."""


def wanted() -> bool:
    """Whether the check is to run: unless WEFT_CHECK=off."""
    return os.environ.get(OFF, "").lower() not in ("off", "0", "no", "false")


def check(
    product: Product,
    device: torch.device,
    rank: int,
    world: int,
    everyone: Callable[[bool], bool],
) -> None:
    """Multiplies known numbers on all ranks of a group, and raises `Unsupported` on all of them if
    a result is wrong on one. All ranks call this together; WEFT_CHECK is the same on all of them.

    everyone: whether something is true on all ranks; all ranks call it together.
    """
    if not wanted():
        return
    wrong = [dtype for dtype in DTYPES if not everyone(_right(product, device, rank, world, dtype))]
    if wrong:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in wrong)
        raise Unsupported(
            f"a small product of known numbers came out wrong on {device.type} ({names}), so weft "
            "does not use this device; run weft doctor --gpu and send its report "
            f"({OFF}=off skips this check)"
        )


def _right(
    product: Product, device: torch.device, rank: int, world: int, dtype: torch.dtype
) -> bool:
    # Small whole numbers: products and sums are exact in every dtype, in any order.
    x = (torch.arange(world * ROWS * INNER, device="cpu") * 7 % 5 - 2).reshape(world * ROWS, INNER)
    w = (torch.arange(INNER * COLUMNS, device="cpu") * 3 % 5 - 2).reshape(INNER, COLUMNS)
    shard = x[rank * ROWS : (rank + 1) * ROWS].to(dtype)
    y = product(shard.to(device), w.to(dtype).to(device))
    return torch.equal(y.cpu(), (x @ w).to(dtype))
