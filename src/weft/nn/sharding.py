"""Parameters as DTensors, and modules that compute with this rank's part of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from weft.errors import Unsupported


class Sharder:
    """Replaces parameters by DTensors on a mesh. A parameter that several modules hold (a tied
    embedding) stays one parameter. source: the rank whose values count; None if all ranks hold the
    same, so that nothing must be sent."""

    def __init__(self, mesh: DeviceMesh, source: int | None) -> None:
        self._mesh, self.source = mesh, source
        self._made: dict[nn.Parameter, tuple[Placement, nn.Parameter]] = {}

    def shard(self, module: nn.Module, name: str, placement: Placement) -> None:
        """Replaces one parameter of a module; nothing happens if it has none of that name."""
        parameter = module._parameters.get(name)
        if parameter is None:
            return
        known = self._made.get(parameter)
        if known is None:
            whole = distribute_tensor(
                parameter.data, self._mesh, [placement], src_data_rank=self.source
            )
            made = nn.Parameter(whole, requires_grad=parameter.requires_grad)
            known = self._made[parameter] = (placement, made)
        module._parameters[name] = known[1]

    def spread(self, model: nn.Module) -> None:
        """Gives the values of the source to all parameters and buffers that stay whole."""
        if self.source is None or self._mesh.size() == 1:
            return
        for tensor in (*model.parameters(), *model.buffers()):
            if not isinstance(tensor, DTensor) and tensor.device.type != "meta":
                value = tensor.detach().contiguous()
                dist.broadcast(value, group_src=self.source, group=self._mesh.get_group())
                tensor.detach().copy_(value)


def columns(weight: torch.Tensor, turned: bool, parts: int = 1) -> Placement:
    """The placement of a weight (or of its bias) whose columns of the result are divided. turned:
    the weight is [K, N]. parts: of how many layers it consists, one after the other."""
    dim = weight.dim() - 1 if turned or weight.dim() == 1 else weight.dim() - 2
    return Shard(dim) if parts == 1 else _StridedShard(dim, split_factor=parts)


def rows(weight: torch.Tensor, turned: bool, parts: int = 1) -> Placement:
    """The placement of a weight (or of its bias) whose columns of the input are divided."""
    if weight.dim() == 1:
        return Replicate()
    dim = weight.dim() - 2 if turned else weight.dim() - 1
    return Shard(dim) if parts == 1 else _StridedShard(dim, split_factor=parts)


@contextmanager
def instead(module: nn.Module, values: Mapping[str, Any]) -> Iterator[None]:
    """Replaces parameters of a module by other tensors while it computes."""
    before = {name: module._parameters[name] for name in values}
    module._parameters.update(values)
    try:
        yield
    finally:
        module._parameters.update(before)


def own_parameters(module: nn.Module) -> dict[str, Any]:
    """This rank's parts of the parameters of a module that are DTensors."""
    held: dict[str, Any] = module._parameters
    return {name: p.to_local() for name, p in held.items() if isinstance(p, DTensor)}


def parameter_placement(parameter: Any, style: str) -> Placement:
    """The placement of a parameter that a plan names by itself, as the weights of experts."""
    kind, _, number = style.partition(":")
    if kind in ("packed_colwise", "packed_rowwise"):
        place = columns if kind == "packed_colwise" else rows
        return place(parameter, False, int(number or 2))
    if kind in ("colwise", "rowwise"):
        return columns(parameter, False) if kind == "colwise" else rows(parameter, False)
    if kind == "replicated_with_grad_allreduce":
        return Replicate()
    raise Unsupported(f"a parameter alone cannot have the style {style!r}; give it to its module")


def is_linear(module: nn.Module) -> bool:
    """Whether a module is an nn.Linear, or a Conv1D of transformers, whose weight is turned."""
    turned = type(module).__name__ == "Conv1D" and hasattr(module, "nf")
    return isinstance(module, nn.Linear) or turned


def out_features(module: nn.Module) -> int:
    """The number of columns of the result of a linear layer."""
    if isinstance(module, nn.Linear):
        return module.out_features
    count: int = module.nf  # type: ignore[assignment]
    return count


def span(size: int, rank: int, world: int) -> tuple[int, int]:
    """The first row of a rank, and the number of its rows, as by `chunk`."""
    most = -(-size // world)
    start = min(rank * most, size)
    return start, min(most, size - start)
