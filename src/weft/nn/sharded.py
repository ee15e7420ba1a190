"""The layers of a sharded model: how each of them computes with this rank's part of its
parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from weft import fabric as fabrics
from weft.collectives.gathers import all_gather
from weft.collectives.sums import all_reduce
from weft.nn.sharding import instead, own_parameters
from weft.nn.styles import ColwiseParallel, RowwiseParallel
from weft.ops.replicated import Plain, part, shared, summed, whole


class Quick(Plain):
    """weft's collectives on a mesh if its group has them; torch's otherwise, and in graphs."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh.get_group())
        self.mesh = mesh
        self._usable: bool | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Quick:
        return self

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        if not self._takes(x):
            return super().sum(x)
        x = x.contiguous()
        return all_reduce(x, out=torch.empty_like(x), group=self.group)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        if not self._takes(x):
            return super().gather(x)
        x = x.contiguous()
        world = dist.get_world_size(self.group)
        out = x.new_empty(world * x.shape[0], *x.shape[1:])
        return all_gather(x, out=out, group=self.group)

    def _takes(self, x: torch.Tensor) -> bool:
        if torch.compiler.is_compiling() or not x.is_cpu:
            return False
        if self._usable is None:
            self._usable = fabrics.of(self.group).can.collectives
        return self._usable


class GatheredColumns(ColwiseParallel):
    """Columns of a result that are gathered afterwards, as those of a language model's head."""

    def __init__(self, schedule: str, by: Quick, size: int) -> None:
        super().__init__(output_layouts=Replicate(), schedule=schedule)
        self._by, self._size = by, size

    def _placed(self, y: torch.Tensor, linear: nn.Module, mesh: DeviceMesh) -> Any:
        return whole(y, -1, self._size, self._by)


class Rows(RowwiseParallel):
    """A product that is summed over the ranks. If `sequence` is set, every rank gets its part of
    the sequence of the sum, as a DTensor. divided: whether the input is divided already."""

    def __init__(self, schedule: str, by: Quick, divided: bool = True) -> None:
        super().__init__(schedule=schedule)
        self._scattered = RowwiseParallel(
            output_layouts=Shard(1), use_local_output=False, schedule=schedule
        )
        self._by, self._divided, self.sequence = by, divided, False

    def multiply(self, linear: nn.Module, x: Any, mesh: DeviceMesh) -> Any:
        if not self._divided:
            x = part(x, -1, self._by)
        if self.sequence:
            return self._scattered.multiply(linear, x, mesh)
        return super().multiply(linear, x, mesh)


def embedding_rows(
    module: nn.Module, span: tuple[int, int], by: Quick, ids: torch.Tensor
) -> torch.Tensor:
    """An embedding whose vocabulary is divided. span: the first row of this rank, and their
    number."""
    start, count = span
    local = ids - start
    outside = (local < 0) | (local >= count)
    with instead(module, own_parameters(module)):
        rows: torch.Tensor = type(module).forward(module, local.masked_fill(outside, 0))
    return summed(rows.masked_fill(outside.unsqueeze(-1), 0), by)


def embedding_columns(module: nn.Module, size: int, by: Quick, ids: torch.Tensor) -> torch.Tensor:
    """An embedding whose columns are divided."""
    with instead(module, own_parameters(module)):
        mine = type(module).forward(module, ids)
    return whole(mine, -1, size, by)


def experts(module: nn.Module, by: Quick, *inputs: Any, **options: Any) -> torch.Tensor:
    """Experts, each of them divided as an MLP. Tokens and routing are the same on all ranks."""
    if torch.is_grad_enabled():
        inputs = tuple(_shared_float(value, by) for value in inputs)
        options = {name: _shared_float(value, by) for name, value in options.items()}
    with instead(module, own_parameters(module)):
        made: torch.Tensor = type(module).forward(module, *inputs, **options)
    return summed(made, by)


def shared_parameters(module: nn.Module, by: Quick, *inputs: Any, **options: Any) -> Any:
    """A module whose input is divided, but whose parameters are whole on every rank."""
    if not torch.is_grad_enabled():
        return type(module).forward(module, *inputs, **options)
    values = {name: shared(p, by) for name, p in module._parameters.items() if p is not None}
    with instead(module, values):
        return type(module).forward(module, *inputs, **options)


def latent_projection(module: nn.Module, rotary: int, by: Quick, x: torch.Tensor) -> torch.Tensor:
    """The projection to the latent keys and values of DeepSeek, whole on every rank. Its last
    columns, the rotary part, go to the heads of this rank without another layer."""
    y: torch.Tensor = type(module).forward(module, x)
    if not torch.is_grad_enabled():
        return y
    latent, key = torch.split(y, [y.shape[-1] - rotary, rotary], -1)
    return torch.cat([latent, shared(key, by)], -1)


def summed_result(module: nn.Module, by: Quick, *inputs: Any, **options: Any) -> torch.Tensor:
    """A module of which every rank makes a term of the result."""
    return summed(type(module).forward(module, *inputs, **options), by)


def shared_identity(module: nn.Module, world: int, x: torch.Tensor, *inputs: Any) -> Any:
    """A module that passes its input on, in a place where results are summed over the ranks."""
    return type(module).forward(module, x / world, *inputs)


def _shared_float(value: Any, by: Quick) -> Any:
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return shared(value, by) if floating else value
