"""`weft.nn.ExpertParallel`: the experts of a mixture-of-experts block, distributed over ranks.

Tokens go to the ranks of their experts inside the first product of the experts, and come back
inside the last:

    router -> sort by expert -> all_to_all_matmul -> activation -> matmul_all_to_all -> weigh, add
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from weft.collectives import all_gather, all_to_all
from weft.errors import Unsupported
from weft.operation import split
from weft.ops.all_to_all_matmul import all_to_all_matmul
from weft.ops.matmul_all_to_all import matmul_all_to_all
from weft.schedule import Schedule

_NEEDED = ("gate_up_proj", "down_proj", "act_fn")


class ExpertParallel(ParallelStyle):
    """Distributes the experts of a block as transformers defines it (Mixtral, DeepSeek, Qwen MoE
    and others): rank r of the mesh holds the r-th part of `gate_up_proj` [E, 2I, H] and `down_proj`
    [E, H, I], as DTensors. The router and shared experts stay as they are, on every rank.

        parallelize_module(layer, mesh, {"mlp.experts": weft.nn.ExpertParallel()})

    The forward of the experts takes the hidden states [tokens, H], the indices of the chosen
    experts and their weights, both [tokens, k], and equals that of the module: it also accepts the
    index E, for a token that is dropped.

    Args:
        input_layouts: `Shard(0)` if every rank has tokens of its own, `Replicate()` if all ranks
            have the same. Then each rank sends its part of the tokens, and all get all results.
        schedule: as in `weft.all_to_all_matmul`, for forward and backward.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        schedule: str | Schedule = "auto",
    ) -> None:
        self.input_layouts = Shard(0) if input_layouts is None else input_layouts
        if self.input_layouts not in (Shard(0), Replicate()):
            raise Unsupported(
                f"ExpertParallel takes tokens as Shard(0) or Replicate(), not {input_layouts}"
            )
        self.schedule = str(schedule)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        experts: Any = (
            module if hasattr(module, "gate_up_proj") else getattr(module, "experts", module)
        )
        check_experts(experts, device_mesh.size())
        for name in _NEEDED[:2]:
            weight = getattr(experts, name)
            placed = distribute_tensor(
                weight.data, device_mesh, [Shard(0)], src_data_rank=self.src_data_rank
            )
            parameter = nn.Parameter(placed, requires_grad=weight.requires_grad)
            experts.register_parameter(name, parameter)
        applied = _Applied(device_mesh, self.input_layouts, self.schedule)
        experts.forward = partial(_forward, experts, applied)
        return module


def check_experts(experts: Any, world: int) -> None:
    """Raises unless a module holds experts that so many ranks can share."""
    missing = [name for name in _NEEDED if not hasattr(experts, name)]
    if missing:
        raise Unsupported(
            f"ExpertParallel needs a module with {', '.join(_NEEDED)}; "
            f"{type(experts).__name__} has no {', '.join(missing)}"
        )
    biased = [name for name, _ in experts.named_parameters() if name not in _NEEDED]
    if biased:
        raise Unsupported(
            f"{type(experts).__name__} has {', '.join(biased)}; "
            "ExpertParallel takes experts without other parameters"
        )
    count = experts.gate_up_proj.shape[0]
    if count % world:
        raise Unsupported(f"{count} experts cannot be shared out evenly among {world} ranks")


@dataclass(frozen=True)
class _Applied:
    """The style on a mesh, shared by a module and all its copies."""

    mesh: DeviceMesh
    layout: Placement
    schedule: str

    def __deepcopy__(self, memo: dict[int, Any]) -> _Applied:
        return self


def _forward(
    experts: Any,
    applied: _Applied,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    mesh, schedule = applied.mesh, applied.schedule
    group = mesh.get_group()
    if applied.layout == Shard(0):
        return _exchanged(experts, group, schedule, hidden_states, top_k_index, top_k_weights)
    rows = list(split(hidden_states.shape[0], mesh.size()))
    rank = mesh.get_local_rank()
    x, weights = (_OwnRows.apply(t, rows, rank, group) for t in (hidden_states, top_k_weights))  # type: ignore[no-untyped-call]
    index = torch.split(top_k_index, rows)[rank]
    y = _exchanged(experts, group, schedule, x, index, weights)
    result: torch.Tensor = _AllRows.apply(y, rows, rank, group)  # type: ignore[no-untyped-call]
    return result


def _exchanged(
    experts: Any,
    group: dist.ProcessGroup,
    schedule: str,
    x: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """The results of this rank's tokens."""
    up, down = (_own(getattr(experts, name)).transpose(1, 2) for name in _NEEDED[:2])
    each, world = up.shape[0], dist.get_world_size(group)
    chosen = index.flatten()
    counts = chosen.bincount(minlength=each * world)[: each * world]
    # Sorted by expert, which is also by rank. Tokens that are dropped come last.
    order = chosen.argsort(stable=True)[: int(counts.sum())]
    sent, came = counts.view(world, each), all_to_all(counts, group=group).view(world, each)
    token = order // index.shape[1]
    options: dict[str, Any] = {"group": group, "schedule": schedule}
    gate, raised = all_to_all_matmul(x[token], up, sent, came, **options).chunk(2, -1)
    y = matmul_all_to_all(experts.act_fn(gate) * raised, down, came, sent, **options)
    weighed = y * weights.flatten()[order].unsqueeze(1)
    return torch.zeros_like(x).index_add(0, token, weighed.to(x.dtype))


def _own(parameter: Any) -> torch.Tensor:
    local: torch.Tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local


class _OwnRows(torch.autograd.Function):
    """This rank's rows of a tensor that all ranks hold. Its gradient is gathered again."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, rows: list[int], rank: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.rows, ctx.group = rows, group
        return torch.split(x, rows)[rank]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        whole = all_gather(gradient.contiguous(), sizes=ctx.rows, group=ctx.group)
        return whole, None, None, None


class _AllRows(torch.autograd.Function):
    """The rows of all ranks. All ranks then hold the same, so the gradient of a rank's rows is its
    part of the gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, rows: list[int], rank: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.rows, ctx.rank = rows, rank
        return all_gather(x.contiguous(), sizes=rows, group=group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return torch.split(gradient, ctx.rows)[ctx.rank], None, None, None
