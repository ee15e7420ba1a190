"""Products of sharded linear layers, forward and backward, overlapped with their communication.

Unlike the operators of `weft`, they keep the gathered input for the backward, as torch's styles do,
so that it is not sent a second time. Under autocast, operands are cast as those of
`torch.nn.functional.linear`.
"""

from __future__ import annotations

from typing import Any

import torch

from weft.ops.modes import autocast
from weft.ops.operands import as_rows, resolve_group
from weft.ops.replicated import Plain, shared


def gathered_linear(
    x: torch.Tensor, weights: list[torch.Tensor], dim: int, group: str, schedule: str
) -> tuple[torch.Tensor, ...]:
    """all_gather(x, dim) @ w.t() for every w [N, K]. Ranks hold shards of x along `dim`."""
    results: tuple[torch.Tensor, ...]
    x, weights = autocast(x), autocast(weights)
    results = _Gathered.apply(x, dim, group, schedule, *weights)  # type: ignore[no-untyped-call]
    return results


def replicated_linear(
    x: torch.Tensor, weights: list[torch.Tensor], group: str, schedule: str
) -> tuple[torch.Tensor, ...]:
    """x @ w.t() for every w. All ranks hold the same x, so its gradient is summed over ranks."""
    results: tuple[torch.Tensor, ...]
    x, weights = autocast(x), autocast(weights)
    results = _Replicated.apply(x, group, schedule, *weights)  # type: ignore[no-untyped-call]
    return results


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, dim: int, group: str, schedule: str, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        gathered, ys = torch.ops.weft.all_gather_matmul(
            x, [w.t() for w in weights], dim, group, return_A=True, schedule=schedule
        )
        ctx.save_for_backward(x, gathered, *weights)
        ctx.dim, ctx.group, ctx.schedule, ctx.own = dim, group, schedule, x.shape[dim]
        return tuple(ys)

    @staticmethod
    def backward(ctx: Any, *dys: torch.Tensor) -> tuple[Any, ...]:
        x, gathered, *weights = ctx.saved_tensors
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
        flat = [as_rows(dy, ctx.dim)[0] for dy in dys]
        if torch.is_grad_enabled():  # second derivatives go back to x, not to what was gathered
            rows = as_rows(x, ctx.dim)[0]
            turned = torch.ops.weft.gather_contract(
                rows, flat, None, None, ctx.group, schedule=ctx.schedule
            )
            return dx, None, None, None, *(g.t() for g in turned)
        rows = as_rows(gathered, ctx.dim)[0]
        return dx, None, None, None, *(d.t() @ rows for d in flat)


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: str, schedule: str, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        ctx.group, ctx.schedule = group, schedule
        return tuple(x @ w.t() for w in weights)

    @staticmethod
    def backward(ctx: Any, *dys: torch.Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        dx = None
        if ctx.needs_input_grad[0]:
            dx = torch.ops.weft.matmul_all_reduce(
                _joined(dys, -1), _joined(weights, 0), "sum", ctx.group, schedule=ctx.schedule
            )
        if torch.is_grad_enabled():  # for second derivatives: x is the same on all ranks
            x = shared(x, Plain(resolve_group(ctx.group)))
        rows = as_rows(x, 0)[0]
        return dx, None, None, *(as_rows(dy, 0)[0].t() @ rows for dy in dys)


def _joined(parts: Any, dim: int) -> torch.Tensor:
    """Concatenates operands, so that a sum of products becomes one product."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)
