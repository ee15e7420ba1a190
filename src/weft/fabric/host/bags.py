"""Bags of embedding lookups, in place of the tensor of pooled rows, which is never made. Rows are
pooled when a task needs them, directly into its target."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.dtype import kernel_numbers
from weft.errors import Unsupported
from weft.fabric import _native

POOLING = {"sum": 0, "mean": 1, "max": 2}
"""The numbers of modes in native code."""

_TYPES = kernel_numbers()
Tensors = Sequence[torch.Tensor]


class Bags:
    """The lookups of one call on one rank, made by `viewed` or `bags_of`. It keeps its tensors
    alive."""

    __slots__ = ("_weights", "indices", "native", "offsets", "tables")

    def __init__(
        self,
        native: _native.Bags,
        tables: Tensors,
        indices: Tensors,
        offsets: Tensors,
        weights: Tensors | None,
    ) -> None:
        self.native = native
        self.tables, self.indices, self.offsets = tables, indices, offsets
        self._weights = weights

    def check(self) -> None:
        """Raises unless all offsets and indices are inside of their tensors."""
        code, number, at = self.native.check()
        if code == 0:
            return
        offsets, indices = self.offsets[number], self.indices[number]
        if code == 4:
            raise Unsupported(
                f"indices[{number}][{at}] is {int(indices[at])}, but tables[{number}] has "
                f"{self.tables[number].shape[0]} rows"
            )
        value = int(offsets[at])
        if code == 1:
            raise Unsupported(f"offsets[{number}] must start at 0, not at {value}")
        if code == 2:
            raise Unsupported(
                f"offsets[{number}] must not decrease, but goes from {int(offsets[at - 1])} to "
                f"{value} at bag {at}"
            )
        raise Unsupported(
            f"offsets[{number}][{at}] is {value}, but indices[{number}] has {indices.shape[0]}"
        )

    def pool(self, row: int, rows: int, column: int, columns: int, target: torch.Tensor) -> None:
        """Stores `rows` bags from `row` on, and `columns` columns from `column` on, into the
        target."""
        pitch = target.stride(0) * target.element_size()
        self.native.pool(
            row, rows, column, columns, target.data_ptr(), pitch, torch.get_num_threads()
        )

    def data_ptr(self) -> int:
        """0, because bags have no address."""
        return 0

    def spread(self, number: int, bags: torch.Tensor, target: torch.Tensor) -> None:
        """Stores the gradient of a table into the target. bags: the gradient of its bags, in the
        dtype of pooled rows."""
        pitch = bags.stride(0) * bags.element_size()
        self.native.spread(
            number, bags.data_ptr(), pitch, target.data_ptr(), torch.get_num_threads()
        )


def viewed(
    tables: Tensors,
    indices: Tensors,
    offsets: Tensors,
    weights: Tensors | None,
    modes: Sequence[str],
    out: torch.dtype,
) -> Bags | None:
    """The bags of tensors that are just as the kernels take them, made in one step; None if one of
    them is not. out: the dtype of pooled rows."""
    native = _native.bags_of(
        list(tables),
        list(indices),
        list(offsets),
        None if weights is None else list(weights),
        [POOLING[mode] for mode in modes],
        _TYPES[out],
    )
    return None if native is None else Bags(native, tables, indices, offsets, weights)


def bags_of(
    tables: Tensors,
    indices: Tensors,
    offsets: Tensors,
    weights: Tensors | None,
    modes: Sequence[str],
    out: torch.dtype,
) -> Bags:
    """The bags of any tensors that have been checked."""
    found = viewed(tables, indices, offsets, weights, modes, out)
    if found is None:
        found = viewed(
            tables,
            [index.contiguous() for index in indices],
            [offset.contiguous() for offset in offsets],
            None if weights is None else [w.contiguous().resolve_neg() for w in weights],
            modes,
            out,
        )
    assert found is not None, "lookups of checked tensors can be made"
    return found
