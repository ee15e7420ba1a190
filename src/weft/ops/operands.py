"""Shared by operators: groups by name, checks of arguments, and rows of tensors with more than two
dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import index
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group

from weft.dtype import name_of, on_host
from weft.errors import Mismatch, Unsupported
from weft.ops import modes
from weft.ops.aliasing import check_apart
from weft.plan.scattering import shared_bytes
from weft.run.call import check_tensor
from weft.schedule import ENGINES, Schedule
from weft.select.store import bucket

_ANY = Schedule.parse("adaptive")

DTYPES = on_host()


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype; raises unless operators support it."""
    if dtype not in DTYPES:
        raise Unsupported(
            f"dtype {dtype} cannot be multiplied here; use {', '.join(DTYPES.values())}"
        )
    return DTYPES[dtype]


def group_name(group: dist.ProcessGroup | None) -> str:
    """The name by which graphs refer to a group."""
    found = dist.group.WORLD if group is None else group
    if found is None:
        raise Unsupported(
            "there is no process group yet; call torch.distributed.init_process_group('gloo') first"
        )
    return str(found.group_name)


def resolve_group(name: str) -> dist.ProcessGroup:
    return _resolve_process_group(name)  # type: ignore[arg-type]


def shared_workspaces(
    schedule: Schedule | None, world: int, made: int, owned: int, n: int, dtype: str, summed: bool
) -> dict[str, int]:
    """The workspace that peers touch (`plan.scattering.shared_bytes`) for a schedule, or for None,
    for any that rank 0 may have chosen. Pages take memory only when touched."""
    engines = ENGINES if schedule is None else (schedule.engine,)
    spaces: dict[str, int] = {}
    for engine in engines:
        one = (schedule or _ANY).with_engine(engine)
        spaces.update(shared_bytes(one, world, made, owned, n, dtype, summed))
    return spaces


def bucket_of(*sizes: int) -> tuple[int, ...]:
    """Sizes rounded to half octaves, so that one choice serves similar sizes. For sizes that change
    from call to call, as in the routing of an MoE layer."""
    return tuple(map(bucket, sizes))


def check_group_rank(name: str, sizes: Sequence[int], world: int, rank: int, actual: int) -> None:
    """Raises unless a list with one size per rank fits the group and this rank. A size below 0 fits
    any."""
    if len(sizes) != world:
        raise Unsupported(f"{name} has {len(sizes)} sizes, but the group has {world} ranks")
    if sizes[rank] != actual and sizes[rank] >= 0:
        raise Unsupported(f"{name} says {sizes[rank]} for rank {rank}, but its tensor has {actual}")


def dispatched(tensors: Sequence[object], out: object, sizes: Sequence[object] = ()) -> bool:
    """Whether a call must go through the dispatcher of torch: for a graph, for gradients, or for a
    mode such as autocast. Calls that the dispatcher would refuse on this rank alone (wrong types,
    an `out`) do not go there, so that they are refused on every rank. sizes: arguments that are
    lists of sizes."""
    if torch.compiler.is_compiling():
        if out is not None:
            raise Unsupported("out= cannot be used in a compiled graph; use the returned tensor")
        return True
    if out is not None or not (differentiated(tensors) or modes.active()):
        return False
    return all(isinstance(t, torch.Tensor) for t in tensors) and all(map(are_sizes, sizes))


def differentiated(tensors: Sequence[object]) -> bool:
    """Whether autograd would record a call."""
    return torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors)


def are_sizes(sizes: object) -> bool:
    """Whether an argument is a list of sizes."""
    listed = isinstance(sizes, Sequence) and not isinstance(sizes, str)
    return listed and all(isinstance(size, int) for size in sizes)  # type: ignore[attr-defined]


def listed_sizes(name: str, sizes: object) -> tuple[int, ...]:
    """The whole numbers of a list with one size per rank; raises unless it is one."""
    try:
        return tuple(map(index, sizes))  # type: ignore[call-overload]
    except TypeError:
        raise Unsupported(f"{name} must be a list with one size per rank, not {sizes!r}") from None


def named(name: str, tensors: Sequence[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """The tensors of an argument that may be one or a list, with their names in errors."""
    if len(tensors) == 1:
        return [(name, tensors[0])]
    return [(f"{name}[{i}]", tensor) for i, tensor in enumerate(tensors)]


def check_operands(
    x_name: str, x: torch.Tensor, weights: Sequence[torch.Tensor], any_weight: bool = False
) -> None:
    """Raises unless x [..., K] and every w [K, N] can be multiplied. any_weight: the dtype of w has
    been checked already."""
    check_tensor(x_name, x, (2, 3, 4))
    for name, weight in named("w", weights):
        check_tensor(name, weight, (2,))
        check_device(name, weight, x_name, x)
        if weight.dtype != x.dtype and not any_weight:
            raise Unsupported(
                f"{x_name} is {dtype_name(x.dtype)} and {name} is {dtype_name(weight.dtype)}; "
                "cast one to the dtype of the other"
            )
        if weight.shape[0] != x.shape[-1]:
            raise Unsupported(
                f"{name} has {weight.shape[0]} rows, but {x_name} has {x.shape[-1]} columns; "
                "both are K and must be equal"
            )
    dtype_name(x.dtype)


def check_device(name: str, tensor: torch.Tensor, x_name: str, x: torch.Tensor) -> None:
    """Raises unless a tensor is on the device of x."""
    if tensor.device != x.device:
        raise Unsupported(
            f"{name} is on {tensor.device} and {x_name} on {x.device}; move one to the other"
        )


def check_dim(name: str, dim: int, x: torch.Tensor) -> int:
    """A dimension of x, counted from 0. Raises if it is the last one or does not exist."""
    if not isinstance(dim, int) or not -x.dim() <= dim < x.dim() or dim % x.dim() == x.dim() - 1:
        raise Unsupported(f"{name} must be from 0 to {x.dim() - 2}, not {dim!r}")
    return dim % x.dim()


def check_out(
    name: str,
    out: object,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    columns: int,
    rows: int | None = None,
    x_name: str = "x",
) -> None:
    """Raises unless a result with these columns, and rows if they are known, fits into out, and out
    is memory of its own."""
    if x.dim() != 2:
        raise Unsupported(f"out= takes 2-D {x_name} only; reshape it to [rows, K] first")
    tensor = check_tensor(name, out, (2,))
    check_device(name, tensor, x_name, x)
    if tensor.dtype != x.dtype:
        raise Unsupported(
            f"{name} is {name_of(tensor.dtype)}, but the result is {dtype_name(x.dtype)}"
        )
    if any(tensor.stride(dim) == 0 and tensor.shape[dim] > 1 for dim in range(2)):
        raise Unsupported(f"{name} is an expanded view; give each of its elements its own memory")
    if differentiated([x, *weights, tensor]):
        raise Unsupported(
            f"{name} or an input requires grad, and out= has no backward; "
            "leave it out, or call under torch.no_grad()"
        )
    for size, what, wanted in (
        (tensor.shape[0], "rows", rows),
        (tensor.shape[1], "columns", columns),
    ):
        if wanted is not None and size != wanted:
            raise Unsupported(f"{name} has {size} {what}, but the result has {wanted}")
    check_apart(name, tensor, [(x_name, x), *named("w", weights)])


def has_columns(w: torch.Tensor) -> bool:
    """Whether the columns of a weight are contiguous, as those of `linear.weight.t()`. Products of
    few rows take another time then, so a schedule is chosen for each layout."""
    return w.stride(0) == 1


def num_rows(inner: Sequence[int]) -> int:
    """The number of rows of one index of a dimension, from the sizes beside it (see `as_rows`)."""
    return math.prod(inner) or 1


def as_rows(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, tuple[int, ...]]:
    """x as a matrix whose rows are ordered by a dimension, and the sizes of one index of it."""
    if x.dim() == 2:
        return x, ()
    moved = x.movedim(dim, 0)
    inner = tuple(moved.shape[1:-1])
    if 0 in inner:  # nothing is there but the size of the dimension
        return x.new_zeros(moved.shape[0], x.shape[-1]), inner
    return moved.reshape(moved.shape[0] * math.prod(inner), x.shape[-1]), inner


def as_shaped(result: torch.Tensor, x: torch.Tensor, dim: int) -> torch.Tensor:
    """The rows of a result in the shape of x, of which `dim` may have another size."""
    if x.dim() == 2:
        return result
    inner = list(x.movedim(dim, 0).shape[1:-1])
    if 0 in inner:
        shaped = result.new_empty(result.shape[0], *inner, result.shape[1])
    else:
        shaped = result.view(result.shape[0] // math.prod(inner), *inner, result.shape[1])
    return shaped.movedim(0, dim)


def resized(x: torch.Tensor, dim: int, size: int, columns: int) -> torch.Tensor:
    """The result of a fake kernel: like x, with another size of a dimension and of the last one."""
    shape = list(x.shape)
    shape[dim], shape[-1] = size, columns
    return x.new_empty(shape)


def check_splits(
    name: str, splits: Sequence[int] | None, world: int, rows: int, inner: int = 1
) -> tuple[int, ...]:
    """The number of rows to (or from) each rank. Raises unless there is one size per rank and their
    sum is `rows` (below 0: any number). A size counts as `inner` rows."""
    if splits is None or not are_sizes(splits):
        raise Unsupported(f"{name} must be a list with one size per rank, not {splits!r}")
    sizes = tuple(size * inner for size in splits)
    if len(sizes) != world:
        raise Unsupported(f"{name} has {len(sizes)} sizes, but the group has {world} ranks")
    if min(sizes) < 0:
        raise Unsupported(f"{name} has a size below zero: {list(splits)}")
    if sum(sizes) != rows and rows >= 0:
        raise Unsupported(
            f"{name} {list(splits)} adds up to {sum(sizes) // max(inner, 1)}, "
            f"but there are {rows // max(inner, 1)} rows"
        )
    return sizes


def match_splits(
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
) -> tuple[tuple[int, ...], ...]:
    """The in_splits of every rank, from the (in_splits, out_splits) of all ranks. Raises `Mismatch`
    unless they match for every pair of ranks."""
    for source, (sent, _) in enumerate(pairs):
        for target, (_, expected) in enumerate(pairs):
            if sent[target] != expected[source]:
                raise Mismatch(
                    f"ranks disagree on the splits: rank {source} sends {sent[target]} rows to "
                    f"rank {target}, which expects {expected[source]}"
                )
    return tuple(tuple(sent) for sent, _ in pairs)


def save_routed(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: Any) -> None:
    """Saves for the backward pass what an operator with splits was called with."""
    x, w, ctx.in_splits, ctx.out_splits, ctx.group = inputs
    ctx.save_for_backward(x, w)
    ctx.schedule = keyword_only_inputs["schedule"]
