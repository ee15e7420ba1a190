"""`weft.nn.ExpertParallel`: the experts of a mixture-of-experts block, distributed over ranks.

Tokens go to the ranks of their experts inside the first product of the experts, and come back
inside the last:

    router -> sort by expert -> all_to_all_matmul -> activation -> matmul_all_to_all -> weigh, add

If all ranks hold the same tokens, none must be sent: each rank multiplies those of its experts, and
the results are summed over the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from weft.collectives import all_to_all
from weft.errors import Unsupported
from weft.nn.sharded import Quick
from weft.ops.all_to_all_matmul import all_to_all_matmul
from weft.ops.matmul_all_to_all import matmul_all_to_all
from weft.ops.replicated import shared, summed
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
            have the same. Then results are summed over the ranks, and no token is sent.
        schedule: as in `weft.all_to_all_matmul`, for forward and backward of `Shard(0)`.
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
        applied = _Applied(device_mesh, self.input_layouts, self.schedule, Quick(device_mesh))
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
    by: Quick

    def __deepcopy__(self, memo: dict[int, Any]) -> _Applied:
        return self


def _forward(
    experts: Any,
    applied: _Applied,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    if applied.layout == Replicate():
        return _summed(experts, applied.by, hidden_states, top_k_index, top_k_weights)
    group = applied.mesh.get_group()
    return _exchanged(experts, group, applied.schedule, hidden_states, top_k_index, top_k_weights)


def _summed(
    experts: Any, by: Quick, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The results of tokens that all ranks hold. Nothing needs to be sent to the experts: every
    rank adds what its own give, and the sums of all ranks are added."""
    x, weights = shared(x, by), shared(weights, by)
    up, down = _weights(experts)
    each = up.shape[0]
    chosen = index.flatten() - each * dist.get_rank(by.group)
    mine = ((chosen >= 0) & (chosen < each)).nonzero().squeeze(1)
    order = mine[chosen[mine].argsort(stable=True)]
    counts = chosen[order].bincount(minlength=each).tolist()
    token = order // index.shape[1]
    # A rank without tokens multiplies none of them, so that its gradients have the same graph.
    busy = [number for number, count in enumerate(counts) if count] or [0]
    parts = []
    sent = torch.split(x[token], [counts[number] for number in busy])
    for number, rows in zip(busy, sent, strict=True):
        gate, raised = (rows @ up[number]).chunk(2, -1)
        parts.append((experts.act_fn(gate) * raised) @ down[number])
    y = parts[0] if len(parts) == 1 else torch.cat(parts)
    return summed(_added(x, y, token, weights.flatten()[order]), by)


def _exchanged(
    experts: Any,
    group: dist.ProcessGroup,
    schedule: str,
    x: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """The results of this rank's tokens."""
    up, down = _weights(experts)
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
    return _added(x, y, token, weights.flatten()[order])


def _weights(experts: Any) -> list[torch.Tensor]:
    """This rank's weights of the first and of the last product, [experts, K, N]."""
    held = (getattr(experts, name) for name in _NEEDED[:2])
    return [(p.to_local() if isinstance(p, DTensor) else p).transpose(1, 2) for p in held]


def _added(
    x: torch.Tensor, y: torch.Tensor, token: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The weighed rows of y, added for each token of x."""
    weighed = y * weights.unsqueeze(1)
    return torch.zeros_like(x).index_add(0, token, weighed.to(x.dtype))
