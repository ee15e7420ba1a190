"""The checks of `embedding_all_to_all`: its arguments on one rank, its result, and their dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch

from weft.dtype import summed_in_float32
from weft.errors import Unsupported
from weft.ops.aliasing import check_apart
from weft.ops.embedding_inputs import modes_of
from weft.ops.operands import DTYPES, differentiated, dtype_name
from weft.run.call import check_tensor

Tables = Sequence[torch.Tensor]
NAMES = {name: dtype for dtype, name in DTYPES.items()}
LAST_OFFSET = "; if offsets has the number of indices at its end, pass include_last_offset=True"


def runs_of(sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The sizes as runs (size, count), because headers are small and tables may be many."""
    runs: list[tuple[int, int]] = []
    for size in sizes:
        if runs and runs[-1][0] == size:
            runs[-1] = (size, runs[-1][1] + 1)
        else:
            runs.append((size, 1))
    return tuple(runs)


def dtype_of(tables: Tables) -> str:
    """The dtype of the result of the tables that have columns; "" if there are none."""
    return promoted([dtype_name(t.dtype) for t in tables if t.shape[1]])


def promoted(names: Sequence[str]) -> str:
    """The dtype that has all values of the others."""
    if not names:
        return ""
    return dtype_name(reduce(torch.promote_types, [NAMES[name] for name in names]))


def checked_modes(
    tables: Tables, indices: Tables, offsets: Tables, mode: str, weights: Tables | None
) -> list[str]:
    """The mode of every table. Raises unless all arguments are valid."""
    named = {"tables": tables, "indices": indices, "offsets": offsets}
    if weights is not None:
        named["per_sample_weights"] = weights
    for name, some in named.items():
        if not isinstance(some, Sequence):
            raise Unsupported(f"{name} must be a list with one tensor per table")
        if len(some) != len(tables):
            raise Unsupported(f"there are {len(tables)} tables, but {len(some)} {name}")
        for i, tensor in enumerate(some):
            check_tensor(f"{name}[{i}]", tensor, (2 if name == "tables" else 1,))
    modes = modes_of(mode, len(tables))
    if weights is not None and set(modes) - {"sum"}:
        raise Unsupported("per_sample_weights go with mode='sum' only")
    for i, (table, index, offset) in enumerate(zip(tables, indices, offsets, strict=True)):
        if table.dtype not in summed_in_float32():
            known = ", ".join(summed_in_float32().values())
            raise Unsupported(f"tables[{i}] is {table.dtype}; use tables of one of {known}")
        if not table.is_contiguous():
            raise Unsupported(f"tables[{i}] is not contiguous; call .contiguous() on it once")
        for name, tensor in (("indices", index), ("offsets", offset)):
            if tensor.dtype not in (torch.int32, torch.int64):
                raise Unsupported(f"{name}[{i}] is {tensor.dtype}; use int32 or int64")
        if offset.shape[0] != offsets[0].shape[0]:
            one_more = abs(offset.shape[0] - offsets[0].shape[0]) == 1
            raise Unsupported(
                f"offsets[0] has {offsets[0].shape[0]} bags and offsets[{i}] {offset.shape[0]}; "
                f"all tables are looked up for the same batch{LAST_OFFSET if one_more else ''}"
            )
        if weights is not None and weights[i].shape != index.shape:
            raise Unsupported(
                f"per_sample_weights[{i}] has {weights[i].shape[0]} numbers for "
                f"{index.shape[0]} indices"
            )
        if weights is not None and weights[i].dtype != table.dtype:
            raise Unsupported(f"per_sample_weights[{i}] must have the dtype of tables[{i}]")
    return modes


def outdated(out: object, shape: tuple[int, int], dtype: torch.dtype) -> bool:
    """Whether out does not fit the result of the last such call. Peers may have other tables now,
    so this rank learns their sizes before it refuses."""
    return isinstance(out, torch.Tensor) and (tuple(out.shape), out.dtype) != (shape, dtype)


def check_result(out: object, shape: tuple[int, int] | None, dtype: str, inputs: Tables) -> None:
    """Raises unless the result fits into out, and out is memory of its own. shape: that of the
    result, if it is known."""
    if out is None:
        return
    tensor = check_tensor("out", out, (2,))
    if shape is not None and (tuple(tensor.shape) != shape or tensor.dtype != NAMES[dtype]):
        raise Unsupported(
            f"out is {tuple(tensor.shape)} {tensor.dtype}, but the result is {shape} {dtype}"
        )
    if differentiated([*inputs, tensor]):
        raise Unsupported(
            "out or an input requires grad, and out= has no backward; "
            "leave it out, or call under torch.no_grad()"
        )
    check_apart("out", tensor, [("an input", one) for one in inputs])
