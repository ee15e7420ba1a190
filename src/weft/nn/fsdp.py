"""FSDP2 with weft's all-gather of weights and reduce-scatter of gradients, on any process group of
one machine, on CPUs and devices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from weft.collectives.backend_work import WeftWork
from weft.collectives.gathers import all_gather
from weft.collectives.sums import reduce_scatter
from weft.errors import Unsupported
from weft.fabric import of

SMALL = 1 << 16
"""Bytes below which a buffer is not worth symmetric memory."""


class _Allocating:
    """Allocates the buffers of FSDP's collectives."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A buffer that peers read in place, or an ordinary one if it is small or on a device,
        where the channel stages it."""
        sizes = [int(s) for s in size]
        if device.type != "cpu" or math.prod(sizes) * dtype.itemsize < SMALL:
            return torch.empty(sizes, dtype=dtype, device=device)
        return of(self._group).memory.empty(sizes, dtype)


class AllGather(_Allocating):
    """Gathers weights through weft's channel, for `FSDPModule.set_custom_all_gather`.

    The result is allocated in symmetric memory and contains the rank's own shard. FSDP copies its
    shard there in any case, and peers then read it in place.
    """

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Equals `dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)`."""
        if not async_op:
            all_gather(input_tensor, out=output_tensor, group=group)
            return None
        handle = all_gather(input_tensor, out=output_tensor, group=group, async_op=True)
        return WeftWork([handle], output_tensor)


class ReduceScatter(_Allocating):
    """Adds gradients through weft's channel, for `FSDPModule.set_custom_reduce_scatter`. Sums are
    in the order of ranks and rounded once, so two runs are equal to the last bit."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any = dist.ReduceOp.SUM,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Equals `dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)` for
        the operations SUM and AVG."""
        names = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.AVG: "avg"}
        name = next((text for one, text in names.items() if op == one), None)
        if name is None:
            raise Unsupported(f"weft.nn.ReduceScatter takes ReduceOp.SUM and AVG, not {op}")
        if not async_op:
            reduce_scatter(input_tensor, name, out=output_tensor, group=group)
            return None
        handle = reduce_scatter(input_tensor, name, out=output_tensor, group=group, async_op=True)
        return WeftWork([handle], output_tensor)


def gather_by_weft(
    module: torch.nn.Module, group: dist.ProcessGroup | None = None, *, gradients: bool = False
) -> int:
    """Makes every part of a module to which `fully_shard` was applied gather its weights with weft.
    Returns the number of parts. Equals, for each of them,

        part.set_custom_all_gather(weft.nn.AllGather(group))
        part.set_custom_reduce_scatter(weft.nn.ReduceScatter(group))  # with gradients=True

    group: the process group over which the weights are sharded (None: all ranks). gradients:
    whether weft adds the gradients too. Tensors of a device need this if the group has no backend
    for them.
    """
    parts: list[Any] = [m for m in module.modules() if hasattr(m, "set_custom_all_gather")]
    if not parts:
        raise Unsupported(
            "no part of the module is sharded, or this torch has no set_custom_all_gather; "
            "call torch.distributed.fsdp.fully_shard first"
        )
    weights, sums = AllGather(group), ReduceScatter(group)
    for part in parts:
        part.set_custom_all_gather(weights)
        if gradients:
            part.set_custom_reduce_scatter(sums)
    return len(parts)
