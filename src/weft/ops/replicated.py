"""Tensors that all ranks hold, and their gradients.

If every rank makes another part of a result from such a tensor, the gradient of the tensor is the
sum of those of all ranks: `shared` marks the place. The other functions are its counterparts.

    function    forward                    backward
    shared      nothing                    the sum over ranks
    summed      the sum over ranks         nothing
    whole       gathers shards             keeps this rank's part
    part        keeps this rank's part     gathers shards
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

# Older versions of torch have the second name only, newer ones warn about it.
_gather: Any = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor


class Collectives(Protocol):
    """What adds and gathers tensors of all ranks of a group."""

    group: dist.ProcessGroup

    def sum(self, x: torch.Tensor) -> torch.Tensor: ...

    def gather(self, x: torch.Tensor) -> torch.Tensor: ...


class Plain:
    """The collectives of torch.distributed, which graphs can contain."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of the x of all ranks, in new memory."""
        return _ready(functional.all_reduce(x.contiguous(), "sum", self.group))

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """The x of all ranks, concatenated along the first dimension."""
        return _ready(_gather(x.contiguous(), 0, self.group))


def _ready(x: torch.Tensor) -> torch.Tensor:
    waited: torch.Tensor = x.wait() if isinstance(x, functional.AsyncCollectiveTensor) else x
    return waited


def shared(x: torch.Tensor, by: Collectives) -> torch.Tensor:
    """x, which all ranks hold and of which every rank makes another part of the result."""
    result: torch.Tensor = _Shared.apply(x, by)  # type: ignore[no-untyped-call]
    return result


def summed(x: torch.Tensor, by: Collectives) -> torch.Tensor:
    """The sum of the x of all ranks, on every rank."""
    result: torch.Tensor = _Summed.apply(x, by)  # type: ignore[no-untyped-call]
    return result


def whole(x: torch.Tensor, dim: int, size: int, by: Collectives) -> torch.Tensor:
    """The shards of all ranks along a dimension of this size, cut as by `chunk`."""
    result: torch.Tensor = _Whole.apply(x, dim % x.dim(), size, by)  # type: ignore[no-untyped-call]
    return result


def part(x: torch.Tensor, dim: int, by: Collectives) -> torch.Tensor:
    """This rank's shard of x along a dimension, cut as by `chunk`."""
    result: torch.Tensor = _Part.apply(x, dim % x.dim(), by)  # type: ignore[no-untyped-call]
    return result


def _gathered(x: torch.Tensor, dim: int, size: int, by: Collectives) -> torch.Tensor:
    world = dist.get_world_size(by.group)
    most = -(-size // world)
    rows = x.movedim(dim, 0)
    if rows.shape[0] < most:
        rows = torch.cat([rows, rows.new_zeros(most - rows.shape[0], *rows.shape[1:])])
    together = by.gather(rows)
    together = together if together.shape[0] == size else together[:size]
    return together.movedim(0, dim).contiguous()


def _own(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    most = -(-x.shape[dim] // dist.get_world_size(group))
    start = min(dist.get_rank(group) * most, x.shape[dim])
    return x.narrow(dim, start, min(most, x.shape[dim] - start)).contiguous()


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, by: Collectives) -> torch.Tensor:
        ctx.by = by
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return summed(gradient, ctx.by), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, by: Collectives) -> torch.Tensor:
        ctx.by = by
        return by.sum(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return shared(gradient, ctx.by), None


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, size: int, by: Collectives) -> torch.Tensor:
        ctx.dim, ctx.by = dim, by
        return _gathered(x, dim, size, by)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return part(gradient, ctx.dim, ctx.by), None, None, None


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, by: Collectives) -> torch.Tensor:
        ctx.dim, ctx.size, ctx.by = dim, x.shape[dim], by
        return _own(x, dim, by.group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return whole(gradient, ctx.dim, ctx.size, ctx.by), None, None
