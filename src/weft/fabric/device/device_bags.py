"""Bags of embedding lookups on a device: pooled by torch when the first task needs them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import embedding_bag


class DeviceBags:
    """The lookups of one call on one rank (see `weft.fabric.host.bags.Bags`).

    Offsets are on the device, so the host cannot tell which indices a slice of the bags has. All
    bags are therefore pooled at once, and tasks copy their parts.
    """

    def __init__(
        self,
        tables: Sequence[torch.Tensor],
        indices: Sequence[torch.Tensor],
        offsets: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor | None],
        modes: Sequence[str],
        out: torch.dtype,
    ) -> None:
        self._lookups = list(zip(tables, indices, offsets, weights, modes, strict=True))
        self._out = out
        self._pooled: torch.Tensor | None = None

    def check(self) -> None:
        """Does nothing: the host would have to wait for the device. torch's kernel checks."""

    def pool(self, row: int, rows: int, column: int, columns: int, target: torch.Tensor) -> None:
        """Stores `rows` bags from `row` on, and `columns` columns from `column` on, into the
        target."""
        if self._pooled is None:
            self._pooled = torch.cat([self._looked_up(*lookup) for lookup in self._lookups], 1)
        target.copy_(self._pooled[row : row + rows, column : column + columns])

    def _looked_up(
        self,
        table: torch.Tensor,
        index: torch.Tensor,
        offset: torch.Tensor,
        weight: torch.Tensor | None,
        mode: str,
    ) -> torch.Tensor:
        if table.shape[1] == 0 or offset.shape[0] == 0:
            return table.new_empty(offset.shape[0], table.shape[1], dtype=self._out)
        wide = table.detach().float()  # sums are rounded once
        given = None if weight is None else weight.detach().float()
        made: torch.Tensor = embedding_bag(
            index, wide, offset.to(index.dtype), mode=mode, per_sample_weights=given
        )
        return made.to(self._out)
