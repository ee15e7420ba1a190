"""Shared by the float8 operators: checks of operands, scales and results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft.dtype import float8, scalar_types, summed_in_float32
from weft.errors import Unsupported
from weft.ops.operands import named
from weft.run.call import check_tensor


def check_eight(
    x_name: str, x: torch.Tensor, weights: Sequence[torch.Tensor], results: Sequence[torch.dtype]
) -> str:
    """The name of the dtype of x. Raises unless x [..., K] and every w [K, N] are float8 and can be
    multiplied into these results."""
    check_tensor(x_name, x, (2, 3, 4))
    for name, weight in named("w", weights):
        check_tensor(name, weight, (2,))
        for what, tensor in ((x_name, x), (name, weight)):
            if tensor.dtype not in float8():
                known = " or ".join(map(str, float8()))
                raise Unsupported(f"{what} is {tensor.dtype}; scaled products take {known}")
        if weight.shape[0] != x.shape[-1]:
            raise Unsupported(
                f"{name} has {weight.shape[0]} rows, but {x_name} has {x.shape[-1]} columns; "
                "both are K and must be equal"
            )
    for result in results:
        if result not in summed_in_float32():
            known = ", ".join(map(str, summed_in_float32()))
            raise Unsupported(f"out_dtype must be one of {known}, not {result}")
    return float8()[x.dtype]


def result_dtypes(given: Sequence[Any]) -> list[torch.dtype]:
    """The dtypes of results: bfloat16 where none is given. torch hands a list of dtypes to a kernel
    as a list of numbers."""
    return [torch.bfloat16 if one is None else scalar_types().get(one, one) for one in given]


def decided_as(x: torch.Tensor) -> str:
    """The dtype for which a schedule is chosen. A CPU multiplies float8 as float32. A device has
    twice the rate of bfloat16 and half its bytes, so that what hides what is the same."""
    return "float32" if x.is_cpu else "bfloat16"


def check_result_scale(scale: object) -> None:
    """torch scales float8 results only, which weft does not make."""
    if scale is not None:
        raise Unsupported(
            "result_scale is for float8 results; leave it out, and convert the result"
        )


def x_scales(name: str, scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
    """The scale of every row of x as [..., 1], or None if there is one scale for all of x."""
    _check_scale(name, scale)
    if scale.numel() == 1:
        return None
    if tuple(scale.shape) != (*x.shape[:-1], 1):
        raise Unsupported(
            f"{name} must have one number, or one for each row of x: the shape "
            f"{[*x.shape[:-1], 1]}, not {list(scale.shape)}"
        )
    return scale


def by_rows(scale: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether a scale belongs to the rows of x on this rank. Its shape says so and not its size,
    because a rank may have one row, or none."""
    return scale.dim() == x.dim()


def w_scales(name: str, scale: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The scale of every column of w as [1, columns], or [1, 1] if there is one for all."""
    _check_scale(name, scale)
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    if tuple(scale.shape) != (1, w.shape[1]):
        raise Unsupported(
            f"{name} must have one number, or one for each column of w: the shape "
            f"{[1, w.shape[1]]}, not {list(scale.shape)}"
        )
    return scale


def check_bias(bias: torch.Tensor | None, columns: int) -> None:
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != columns):
        raise Unsupported(f"bias must have the shape [{columns}], not {list(bias.shape)}")


def _check_scale(name: str, scale: object) -> None:
    if not isinstance(scale, torch.Tensor) or scale.dtype != torch.float32:
        raise Unsupported(f"{name} must be a tensor of torch.float32")
