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


class Bags:
    """The lookups of one call on one rank. It keeps its tensors alive. out: the dtype of pooled
    rows."""

    def __init__(
        self,
        tables: Sequence[torch.Tensor],
        indices: Sequence[torch.Tensor],
        offsets: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor | None],
        modes: Sequence[str],
        out: torch.dtype,
    ) -> None:
        self.tables, self.indices, self.offsets = tables, indices, offsets
        self.native = _native.Bags()
        self._kept = (tables, indices, offsets, weights)
        column = 0
        for table, index, offset, weight, mode in zip(
            tables, indices, offsets, weights, modes, strict=True
        ):
            rows, dim = table.shape
            self.native.add(
                table.data_ptr(),
                _TYPES[table.dtype],
                rows,
                dim,
                column,
                index.data_ptr(),
                index.dtype == torch.int64,
                index.shape[0],
                offset.data_ptr(),
                offset.dtype == torch.int64,
                offset.shape[0],
                0 if weight is None else weight.data_ptr(),
                POOLING[mode],
                _TYPES[out],
            )
            column += dim

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
