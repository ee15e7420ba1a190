"""Whether tensors have memory in common. A result may not lie in an input, for an operator writes
the first rows of one while it reads the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from weft.errors import Unsupported


def check_apart(name: str, out: torch.Tensor, others: Iterable[tuple[str, Any]]) -> None:
    """Raises if a result has memory in common with one of the other tensors, given with names."""
    for other, tensor in others:
        if aliased(out, tensor):
            raise Unsupported(
                f"{name} and {other} share memory; give {name} memory of its own, or leave it out"
            )


def any_aliased(outs: Any, others: Any) -> bool:
    """Whether a result, or one of a list, has memory in common with another one or with one of the
    other tensors."""
    made, rest = list(_tensors(outs)), list(_tensors(others))
    return any(aliased(out, other) for i, out in enumerate(made) for other in (*made[:i], *rest))


def aliased(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors may have an element in common. Columns of one matrix have not, if they
    are different ones; for other layouts, that one lies between the elements of the other is
    enough."""
    start, end = _extent(a)
    first, last = _extent(b)
    return start < last and first < end and not _columns_apart(a, b)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first byte and behind the last one."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    steps = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (steps + 1) * tensor.element_size()


def _columns_apart(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two matrices are different columns (or rows) of a larger one."""
    strides = a.stride()
    if len(strides) != 2 or strides != b.stride() or a.element_size() != b.element_size():
        return False
    inner = 0 if strides[0] < strides[1] else 1
    if strides[inner] != 1:
        return False
    between, rest = divmod(b.data_ptr() - a.data_ptr(), a.element_size())
    column = between % strides[1 - inner]
    return not rest and a.shape[inner] <= column <= strides[1 - inner] - b.shape[inner]


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)
