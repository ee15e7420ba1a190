"""The forms in which bags can be given to `embedding_all_to_all`: offsets with or without the last
one, lengths, and values with lengths as a KeyedJaggedTensor has them; and bags of tables that are
distributed by rows."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from weft.errors import Unsupported
from weft.operation import split, starts

Tensors = Sequence[torch.Tensor]
MODES = ("sum", "mean", "max")


class Bagged(NamedTuple):
    """For every table the row numbers of all bags, the start of each bag, and the factor of each
    row, if there are factors."""

    indices: Any
    offsets: Any
    weights: list[torch.Tensor] | None


def bagged(
    count: int,
    indices: Any,
    offsets: Any,
    lengths: Any,
    weights: Any,
    include_last_offset: bool | None,
) -> Bagged:
    """The bags of `count` tables as lists of tensors. What is wrong beyond their form is left to
    the checks of the call."""
    if callable(getattr(indices, "values", None)) and callable(getattr(indices, "lengths", None)):
        if offsets is not None or lengths is not None:
            raise Unsupported(
                "a KeyedJaggedTensor has its own lengths; leave out offsets= and lengths="
            )
        own = getattr(indices, "weights_or_none", lambda: None)()
        if weights is None and own is not None:
            weights = own
        indices, lengths = indices.values(), indices.lengths()
    if lengths is not None:
        if offsets is not None or include_last_offset is not None:
            raise Unsupported("give offsets= or lengths=, not both")
        return _by_lengths(count, indices, lengths, weights)
    if offsets is None:
        raise Unsupported("give the bags as offsets= or as lengths=")
    listed = None if weights is None else list(weights)
    if include_last_offset:
        return Bagged(indices, _without_last(indices, offsets), listed)
    if include_last_offset is None:
        _warn_of_last(indices, offsets)
    return Bagged(indices, offsets, listed)


def _by_lengths(count: int, values: Any, lengths: Any, weights: Any) -> Bagged:
    """Lengths are [tables, B], flat or nested. Values are one tensor for all tables, or a list."""
    if not isinstance(lengths, torch.Tensor):
        lengths = torch.stack(list(lengths)) if len(lengths) else torch.zeros(0, dtype=torch.int64)
    if lengths.is_floating_point() or lengths.numel() % max(count, 1):
        raise Unsupported(
            f"lengths must have one integer per table and bag; {lengths.numel()} of "
            f"{lengths.dtype} cannot be those of {count} tables"
        )
    by_table = lengths.reshape(count, -1) if count else lengths.reshape(0, 0)
    if by_table.numel() and int(by_table.min()) < 0:
        raise Unsupported(f"lengths has a number below zero: {int(by_table.min())}")
    totals = by_table.sum(1).tolist()
    offsets = [row.cumsum(0) - row for row in by_table]
    indices = _cut("values", values, totals)
    return Bagged(indices, offsets, None if weights is None else _cut("weights", weights, totals))


def _cut(name: str, values: Any, totals: Sequence[int]) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        if values.dim() != 1 or values.shape[0] != sum(totals):
            raise Unsupported(
                f"{name} is {list(values.shape)}, but lengths add up to {sum(totals)} rows"
            )
        return list(torch.split(values, list(totals)))
    listed = list(values)
    for i, (part, total) in enumerate(zip(listed, totals, strict=False)):
        if part.shape[0] != total:
            raise Unsupported(f"{name}[{i}] has {part.shape[0]} rows, but its lengths say {total}")
    return listed


def _without_last(indices: Any, offsets: Any) -> list[torch.Tensor]:
    """Offsets without the last one, which must be the number of indices."""
    kept = []
    for i, (index, offset) in enumerate(zip(indices, offsets, strict=False)):
        if offset.shape[0] == 0 or int(offset[-1]) != index.shape[0]:
            last = "missing" if offset.shape[0] == 0 else int(offset[-1])
            raise Unsupported(
                f"with include_last_offset, the last offset is the number of indices; in "
                f"offsets[{i}] it is {last}, and indices[{i}] has {index.shape[0]}"
            )
        kept.append(offset[:-1])
    return [*kept, *offsets[len(kept) :]]


def ends_with_total(indices: Any, offsets: Any) -> bool:
    """Whether the last offset of every table is the number of its indices."""
    if not isinstance(offsets, Sequence) or not isinstance(indices, Sequence) or not offsets:
        return False
    for index, offset in zip(indices, offsets, strict=False):
        if not (isinstance(offset, torch.Tensor) and isinstance(index, torch.Tensor)):
            return False
        if offset.dim() != 1 or offset.shape[0] < 2 or index.shape[:1] == (0,):
            return False
        if not offset.is_cpu:
            return False
        if int(offset[-1]) != index.shape[0]:
            return False
    return True


def _warn_of_last(indices: Any, offsets: Any) -> None:
    if not torch.compiler.is_compiling() and ends_with_total(indices, offsets):
        warnings.warn(
            "the last bag of every table is empty; if offsets has the number of indices at its "
            "end, pass include_last_offset=True, and if the bag is meant to be empty, False",
            stacklevel=4,
        )


def modes_of(mode: object, count: int) -> list[str]:
    """The mode of every table: one for all, or a list. In a schema, a list is a text with a comma
    after each mode."""
    if isinstance(mode, str):
        modes = mode.split(",")[:-1] if "," in mode else [mode] * count
    elif isinstance(mode, Sequence):
        modes = list(mode)
    else:
        raise Unsupported(f"mode must be one of {', '.join(MODES)}, or a list, not {mode!r}")
    for one in modes:
        if one not in MODES:
            raise Unsupported(f"mode must be one of {', '.join(MODES)}, not {one!r}")
    if len(modes) != count:
        raise Unsupported(f"there are {count} tables, but {len(modes)} modes")
    return modes


def mode_text(mode: Any) -> str:
    """The mode as one text."""
    return mode if isinstance(mode, str) else "".join(f"{one}," for one in mode)


class Shards:
    """Bags of tables that are distributed by rows: every rank pools the rows that it has.

    row_splits: for every table, the rows of each rank.
    """

    def __init__(
        self,
        tables: Tensors,
        given: Bagged,
        row_splits: Sequence[Sequence[int]],
        modes: list[str],
        rank: int,
        world: int,
    ) -> None:
        self.rank, self.world, self.modes = rank, world, modes
        self.dims = [table.shape[1] for table in tables]
        if len(row_splits) != len(tables):
            raise Unsupported(f"there are {len(tables)} tables, but {len(row_splits)} row_splits")
        self._owners: list[torch.Tensor] = []
        self._bags: list[torch.Tensor] = []
        self._count = max((offset.shape[0] for offset in given.offsets), default=0)
        indices, offsets = [], []
        weights: list[torch.Tensor] | None = None if given.weights is None else []
        for i, (table, index, offset) in enumerate(
            zip(tables, given.indices, given.offsets, strict=True)
        ):
            rows = list(row_splits[i])
            if len(rows) != world or min(rows, default=0) < 0:
                raise Unsupported(f"row_splits[{i}] must have the rows of each of {world} ranks")
            if rows[rank] != table.shape[0]:
                raise Unsupported(
                    f"row_splits[{i}] says {rows[rank]} rows for rank {rank}, but tables[{i}] has "
                    f"{table.shape[0]}"
                )
            index = index.long()
            if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < sum(rows):
                raise Unsupported(
                    f"indices[{i}] goes from {int(index.min())} to {int(index.max())}, but the "
                    f"whole table has {sum(rows)} rows"
                )
            ends = torch.tensor(rows, device=index.device).cumsum(0)
            owner = torch.searchsorted(ends, index, right=True)
            length = torch.diff(offset.long(), append=offset.new_tensor([index.shape[0]]).long())
            bag = torch.repeat_interleave(
                torch.arange(offset.shape[0], device=offset.device), length
            )
            mine = owner == rank
            kept = bag[mine].bincount(minlength=offset.shape[0])
            indices.append(index[mine] - starts(rows)[rank])
            offsets.append(kept.cumsum(0) - kept)
            if weights is not None and given.weights is not None:
                weights.append(given.weights[i][mine])
            self._owners.append(owner)
            self._bags.append(bag)
        self.given = Bagged(indices, offsets, weights)
        self.pooling = ["sum" if mode == "mean" else mode for mode in modes]
        """The mode of what a rank pools: means are divided at the end."""

    def joined(self, y: torch.Tensor) -> torch.Tensor:
        """The result of this rank's bags, from the parts of all ranks."""
        bags = split(self._count, self.world)
        first, own = starts(bags)[self.rank], bags[self.rank]
        parts = torch.split(y.view(own, self.world, sum(self.dims)), self.dims, -1)
        made = []
        for part, mode, owner, bag in zip(parts, self.modes, self._owners, self._bags, strict=True):
            inside = (bag >= first) & (bag < first + own)
            place = (bag[inside] - first) * self.world + owner[inside]
            rows = place.bincount(minlength=own * self.world).view(own, self.world)
            if mode == "max":
                there = (rows > 0)[:, :, None]
                most = part.masked_fill(~there, float("-inf")).max(1).values
                made.append(
                    torch.where(there.any(1), most, torch.zeros((), dtype=y.dtype, device=y.device))
                )
            else:
                total = part.sum(1)
                if mode == "mean":
                    total = total / rows.sum(1).clamp(min=1)[:, None].to(y.dtype)
                made.append(total)
        return torch.cat(made, 1) if made else y
