"""Products of sharded linear layers, forward and backward, overlapped with their communication.

Unlike the operators of `weft`, they keep the gathered input for the backward, as torch's styles do,
so that it is not sent a second time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from weft.ops.operands import as_rows


def gathered_linear(
    x: torch.Tensor, weights: list[torch.Tensor], dim: int, group: str, schedule: str
) -> tuple[torch.Tensor, ...]:
    """all_gather(x, dim) @ w.t() for every w [N, K]. Ranks hold shards of x along `dim`."""
    results: tuple[torch.Tensor, ...]
    results = _Gathered.apply(x, dim, group, schedule, *weights)  # type: ignore[no-untyped-call]
    return results


def replicated_linear(
    x: torch.Tensor, weights: list[torch.Tensor], group: str, schedule: str
) -> tuple[torch.Tensor, ...]:
    """x @ w.t() for every w. All ranks hold the same x, so its gradient is summed over ranks."""
    results: tuple[torch.Tensor, ...]
    results = _Replicated.apply(x, group, schedule, *weights)  # type: ignore[no-untyped-call]
    return results


def shared_bias(bias: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """A bias that every rank adds to its own rows. Its gradient is summed over ranks."""
    result: torch.Tensor = _SharedBias.apply(bias, group)  # type: ignore[no-untyped-call]
    return result


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, dim: int, group: str, schedule: str, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        gathered, ys = torch.ops.weft.all_gather_matmul(
            x, [w.t() for w in weights], dim, group, return_A=True, schedule=schedule
        )
        ctx.save_for_backward(gathered, *weights)
        ctx.dim, ctx.group, ctx.schedule, ctx.own = dim, group, schedule, x.shape[dim]
        return tuple(ys)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: torch.Tensor) -> tuple[Any, ...]:
        gathered, *weights = ctx.saved_tensors
        dx = None
        if ctx.needs_input_grad[0]:
            dx = torch.ops.weft.matmul_reduce_scatter(
                _joined(dys, -1),
                _joined(weights, 0),
                "sum",
                ctx.dim,
                ctx.group,
                schedule=ctx.schedule,
                own_rows=ctx.own,
            )
        rows = as_rows(gathered, ctx.dim)[0]
        dws = [as_rows(dy, ctx.dim)[0].t() @ rows for dy in dys]
        return dx, None, None, None, *dws


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: str, schedule: str, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        ctx.group, ctx.schedule = group, schedule
        return tuple(x @ w.t() for w in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: torch.Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        dx = None
        if ctx.needs_input_grad[0]:
            dx = torch.ops.weft.matmul_all_reduce(
                _joined(dys, -1), _joined(weights, 0), "sum", ctx.group, schedule=ctx.schedule
            )
        rows = as_rows(x, 0)[0]
        return dx, None, None, *(as_rows(dy, 0)[0].t() @ rows for dy in dys)


class _SharedBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bias: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return bias.view_as(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def _joined(parts: Any, dim: int) -> torch.Tensor:
    """Concatenates operands, so that a sum of products becomes one product."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)
