"""Sums of products, as every fabric of processes makes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def add(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Sets every target to the sum of the sources, in their order, rounded once."""
    first, rest = sources[0], sources[1:]
    total = targets[0]
    if len(sources) > 2 and total.dtype.itemsize < 4:
        total = first.float()
        for source in rest:
            total += source
        targets[0].copy_(total)
    elif rest:
        torch.add(first, rest[0], out=total)
        for source in rest[1:]:
            total += source
    else:
        total.copy_(first)
    for target in targets[1:]:
        target.copy_(targets[0])
