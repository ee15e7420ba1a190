"""The fused path of `matmul_all_reduce`: what it needs besides that of the other schedules.

With few rows the product is bound by reading w. Blocks of it leave as they are made, the owner of a
block adds what all ranks made of it, in the order of ranks, and stores the sum into everyone's y.
"""

from __future__ import annotations

import torch

from weft.errors import Unsupported
from weft.fabric import HostFabric
from weft.ops.common import DTYPES
from weft.plan.matmul_all_reduce import FEW_ROWS
from weft.schedule import Schedule
from weft.select.auto import Decision

_FUSED = Schedule.parse("fused")

NARROW = (torch.bfloat16, torch.float16, torch.int8)
"""What a weight may be kept in, beside the dtype of x."""


def few_rows(fabric: HostFabric, m: int, dtype: torch.dtype) -> Decision | None:
    """What `auto` is for an all-reduce of few rows; None where there is a choice to make."""
    if fabric.network or fabric.world == 1 or m > FEW_ROWS or dtype == torch.float64:
        return None
    why = f"{m} rows: reading w is all, and blocks leave as they are made"
    return Decision(_FUSED.name, _FUSED, why)


def check_weight(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor | None) -> None:
    """That w may be multiplied with x as it is: of x's dtype, or narrower, with a scale if int8."""
    if w.dtype == x.dtype and scale is None:
        return
    if x.dtype not in DTYPES or x.dtype == torch.float64:
        raise Unsupported(f"x is {x.dtype}; weights of another dtype go with float32 and halves")
    if w.dtype != x.dtype and (w.dtype not in NARROW or w.element_size() > x.element_size()):
        known = ", ".join(str(d).removeprefix("torch.") for d in NARROW)
        raise Unsupported(
            f"x is {DTYPES[x.dtype]} and w is {str(w.dtype).removeprefix('torch.')}; "
            f"w must have the dtype of x, or a narrower one of {known}"
        )
    if w.dtype == torch.int8 and scale is None:
        raise Unsupported("w is int8 and needs its scale=, one number for each of its columns")
    if scale is not None:
        if not isinstance(scale, torch.Tensor) or scale.dtype != torch.float32:
            raise Unsupported("scale must be a float32 tensor with one number per column of w")
        if scale.device.type != "cpu" or tuple(scale.shape) != (w.shape[1],):
            raise Unsupported(
                f"scale has the shape {tuple(scale.shape)} on {scale.device}; it must be "
                f"({w.shape[1]},) on the CPU, one number per column of w"
            )


def widened(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """w in the dtype of x, scaled."""
    if scale is None:
        return w.to(x.dtype)
    return (w.to(torch.float32) * scale).to(x.dtype)
