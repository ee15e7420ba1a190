"""Parallel styles for `parallelize_module`: torch's own plans, with overlapped linear layers.

Parameters are sharded as in torch's styles (they stay DTensors). Inputs and outputs have the same
layouts, and gradients the same values. Only the collective and the product next to it become one
operator:

    ColwiseParallel   input Shard(d)     all_gather_matmul      backward: matmul_reduce_scatter
                      input Replicate    a local product        backward: matmul_all_reduce
    RowwiseParallel   output Shard(d)    matmul_reduce_scatter  backward: all_gather_matmul
                      output Replicate   matmul_all_reduce      backward: a local product
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.distributed.tensor import parallel as plain
from torch.distributed.tensor.parallel import SequenceParallel
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional

from weft.errors import Unsupported
from weft.nn.linear import gathered_linear, replicated_linear
from weft.nn.together import Applied, Together
from weft.ops.matmul_all_reduce import matmul_all_reduce
from weft.ops.operands import group_name
from weft.ops.replicated import Plain, shared
from weft.schedule import Schedule


class ColwiseParallel(plain.ColwiseParallel):
    """`torch.distributed.tensor.parallel.ColwiseParallel` with overlapped linear layers.

    With input_layouts=Shard(d), where d is not the last dimension, and with this rank's rows of the
    weight and its bias, equals::

        x = all_gather(x_shard, dim=d)
        y = torch.nn.functional.linear(x, weight, bias)

    With input_layouts=Replicate(), where all ranks hold x, equals the second line, and the sum of
    its gradient over ranks is overlapped. nn.Embedding, and layouts that need other steps, are left
    to torch.

    Args:
        input_layouts, output_layouts, use_local_output: as torch's.
        schedule: as in `weft.all_gather_matmul`, for forward and backward.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        schedule: str | Schedule = "auto",
    ) -> None:
        super().__init__(
            input_layouts=input_layouts,
            output_layouts=output_layouts,
            use_local_output=use_local_output,
        )
        self.schedule = str(schedule)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Linear):
            return super()._apply(module, device_mesh)
        _share_input(self, [module], device_mesh)
        return module

    def sends_nothing(self, x: Any) -> bool:
        """Whether the product of x is local and has no gradient, so that layers need not share."""
        replicated = not isinstance(x, DTensor) and self.input_layouts[0] == Replicate()
        return replicated and not torch.is_grad_enabled()

    def multiply(self, linears: list[nn.Module], x: Any, mesh: DeviceMesh) -> list[Any]:
        """The results of linear layers with the same input."""
        if self.sends_nothing(x):
            return [self._placed(_plainly(linear, x), linear, mesh) for linear in linears]
        local, layout = _local(x, mesh, self.input_layouts[0])
        weights = [own_weight(linear) for linear in linears]
        name = group_name(mesh.get_group())
        if isinstance(layout, Shard) and layout.dim % local.dim() < local.dim() - 1:
            dim = layout.dim % local.dim()
            ys = gathered_linear(local, weights, dim, name, self.schedule)
        else:
            if layout != Replicate():
                local = _redistributed(local, mesh, layout, Replicate())
            ys = replicated_linear(local, weights, name, self.schedule)
        results = []
        for y, linear in zip(ys, linears, strict=True):
            bias = own(linear.bias)
            results.append(self._placed(y if bias is None else y + bias.to(y.dtype), linear, mesh))
        return results

    def _placed(self, y: torch.Tensor, linear: nn.Module, mesh: DeviceMesh) -> Any:
        made, wanted = Shard(y.dim() - 1), self.output_layouts[0]
        weight: Any = linear.weight
        columns = weight.shape[0 if isinstance(linear, nn.Linear) else 1]
        return _result(y, mesh, made, wanted, self.use_local_output, columns)


class ColwiseTogether(ParallelStyle):
    """Gathers the input of several linear layers once (wq, wk, wv of an attention; w1, w3 of a
    gated MLP), and scatters its gradient once. Applied to the module that holds the layers.

    Equals a `PrepareModuleInput` that gathers, and `ColwiseParallel` for every layer. The first
    layer that is called multiplies for all; the others, called with the same tensor, return their
    results. If the tensor was changed in place in between, the product is computed again. A
    compiled model must not change it, because that cannot be detected there. Inference tensors have
    no version counter, so they are compared with a copy.

    Args:
        names: the layers, as attributes of the module.
        input_layouts, output_layouts, use_local_output, schedule: as in `ColwiseParallel`.
    """

    def __init__(
        self,
        *names: str,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        schedule: str | Schedule = "auto",
    ) -> None:
        self.names = names
        self.style = ColwiseParallel(
            input_layouts=input_layouts,
            output_layouts=output_layouts,
            use_local_output=use_local_output,
            schedule=schedule,
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linears: list[nn.Module] = []
        for name in self.names:
            linear = module.get_submodule(name)
            if not isinstance(linear, nn.Linear):
                raise Unsupported(
                    f"ColwiseTogether takes nn.Linear; {name} is a {type(linear).__name__}"
                )
            linears.append(linear)
        self.style.src_data_rank = self.src_data_rank
        _share_input(self.style, linears, device_mesh)
        return module


def _share_input(style: ColwiseParallel, linears: list[nn.Module], mesh: DeviceMesh) -> None:
    for linear in linears:
        distribute_module(linear, mesh, style._partition_linear_fn)
    install_columns(style, linears, mesh)


def install_columns(style: ColwiseParallel, linears: list[nn.Module], mesh: DeviceMesh) -> None:
    """Makes sharded layers with the same input multiply by a style."""
    together = Together(Applied(style, mesh), linears)
    for index, linear in enumerate(linears):
        linear.forward = partial(together.take, index)


def install_rows(style: RowwiseParallel, linear: nn.Module, mesh: DeviceMesh) -> None:
    """Makes a sharded layer multiply by a style."""
    linear.forward = partial(_rows_forward, Applied(style, mesh), linear)


class RowwiseParallel(plain.RowwiseParallel):
    """`torch.distributed.tensor.parallel.RowwiseParallel` with overlapped linear layers.

    Equals, with this rank's columns of the weight::

        y = all_reduce(x_shard @ weight.t()) + bias                   # output_layouts=Replicate()
        y = reduce_scatter(x_shard @ weight.t(), dim=d) + bias        # output_layouts=Shard(d)

    nn.Embedding, and layouts that need other steps, are left to torch.

    Args:
        input_layouts, output_layouts, use_local_output: as torch's.
        schedule: as in `weft.matmul_reduce_scatter`, for forward and backward.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        schedule: str | Schedule = "auto",
    ) -> None:
        super().__init__(
            input_layouts=input_layouts,
            output_layouts=output_layouts,
            use_local_output=use_local_output,
        )
        self.schedule = str(schedule)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        out = self.output_layouts[0]
        overlapped = out == Replicate() or (isinstance(out, Shard) and out.dim >= 0)
        if not isinstance(module, nn.Linear) or not overlapped:
            return super()._apply(module, device_mesh)
        distribute_module(module, device_mesh, self._partition_linear_fn)
        install_rows(self, module, device_mesh)
        return module

    def multiply(self, linear: nn.Module, x: Any, mesh: DeviceMesh) -> Any:
        """The result of the layer."""
        local, layout = _local(x, mesh, self.input_layouts[0])
        if not (isinstance(layout, Shard) and layout.dim % local.dim() == local.dim() - 1):
            local = _redistributed(local, mesh, layout, Shard(local.dim() - 1))
        group, out = mesh.get_group(), self.output_layouts[0]
        w, bias = own_weight(linear).t(), own(linear.bias)
        if isinstance(out, Shard):
            y = torch.ops.weft.matmul_reduce_scatter(
                local,
                w,
                "sum",
                out.dim,
                group_name(group),
                schedule=self.schedule,
                own_rows=_chunk_rows(local.shape[out.dim], group),
            )
            bias = None if bias is None else shared(bias, Plain(group))
        else:
            y = matmul_all_reduce(local, w, group=group, schedule=self.schedule)
        y = y if bias is None else y + bias.to(y.dtype)
        return _result(y, mesh, out, out, self.use_local_output)


def _rows_forward(applied: Applied, linear: nn.Module, input: Any) -> Any:
    return applied.style.multiply(linear, input, applied.mesh)


def own(parameter: Any) -> Any:
    """This rank's part of a parameter; None if there is none."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def own_weight(linear: nn.Module) -> torch.Tensor:
    """This rank's part of the weight of a linear layer, [N, K]. That of a Conv1D is [K, N]."""
    weight: torch.Tensor = own(linear.weight)
    return weight if isinstance(linear, nn.Linear) else weight.t()


def _plainly(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, own_weight(linear), own(linear.bias))


def _local(x: Any, mesh: DeviceMesh, layout: Placement) -> tuple[torch.Tensor, Placement]:
    """This rank's part of an input, and its placement. A DTensor brings its own placement."""
    if not isinstance(x, DTensor):
        return x, layout
    if isinstance(x.placements[0], Partial):
        x = x.redistribute(placements=[Replicate()])
    return x.to_local(), x.placements[0]


def _redistributed(
    x: torch.Tensor, mesh: DeviceMesh, layout: Placement, wanted: Placement
) -> torch.Tensor:
    whole = DTensor.from_local(x, mesh, [layout], run_check=False)
    local: torch.Tensor = whole.redistribute(placements=[wanted]).to_local()
    return local


def _result(
    y: torch.Tensor,
    mesh: DeviceMesh,
    made: Placement,
    wanted: Placement,
    local: bool,
    columns: int | None = None,
) -> Any:
    """Converts y from the layout `made` to `wanted`, as a DTensor or a plain tensor. columns: those
    of all ranks, if they are divided, because ranks may have different numbers of them."""
    if isinstance(wanted, Shard) and wanted.dim < 0:
        wanted = Shard(wanted.dim + y.dim())
    if made == wanted and local:
        return y
    shape = None if columns is None else torch.Size([*y.shape[:-1], columns])
    stride = None if shape is None else torch.empty(shape, device="meta").stride()
    result = DTensor.from_local(y, mesh, [made], run_check=False, shape=shape, stride=stride)
    if made != wanted:
        result = result.redistribute(placements=[wanted])
    return result.to_local() if local else result


def _chunk_rows(size: int, group: dist.ProcessGroup) -> int | None:
    """The number of rows that DTensor gives this rank (as `chunk` does), or None if all ranks have
    the same number, which is then also weft's split."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    if size % world == 0:
        return None
    most = -(-size // world)
    return max(0, min(most, size - rank * most))


__all__ = ["ColwiseParallel", "ColwiseTogether", "RowwiseParallel", "SequenceParallel"]
