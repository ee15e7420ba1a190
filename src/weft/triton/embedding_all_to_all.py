"""`EmbeddingAllToAll`: lookups in tables that are spread over ranks, in one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft.errors import Error, Unsupported
from weft.triton.kernels import embedding_all_to_all as device
from weft.triton.resident_launch import KernelCalls, check_input, check_sizes
from weft.triton.space import Space, aligned

BLOCK_BAGS = 16
BLOCK_COLUMNS = 64


class EmbeddingAllToAll:
    """Every rank pools the bags of the whole batch from its own tables. Each pooled row is stored
    in the result of the rank that owns the bag as soon as it is made. Equals

        pooled = [embedding_bag(bags of table t, tables[t], mode=mode) for t in own tables]
        received = [torch.empty(own bags, width of rank r) for r in range(world)]
        dist.all_to_all(received, list(torch.cat(pooled, 1).tensor_split(world)))
        y = torch.cat(received, 1)      # [own bags, widths of all tables of all ranks]

    with sums in float32. Tables may differ in height and width, and ranks in the number of their
    tables. The batch is split as by `tensor_split`. The result is in this rank's symmetric memory
    and is overwritten by the next call but one; use `clone()` to keep it.
    """

    def __init__(
        self,
        space: Space,
        tables: Sequence[torch.Tensor],
        batch: int,
        dtype: torch.dtype = torch.float32,
        *,
        mode: str = "sum",
        weighted: bool = False,
        grid: int | None = None,
    ) -> None:
        self.space, self.batch, self.dtype = space, batch, dtype
        self.mode, self.weighted = mode, weighted
        world, me = space.world, space.rank
        refusal: Error | None = None
        try:
            self.tables = self._checked(tables)
        except Error as error:
            refusal, self.tables = error, []
        same = (
            ("batch", batch),
            ("dtype", str(dtype)),
            ("mode", mode),
            ("weighted", weighted),
        )
        # The ranks first exchange the widths of their tables. The size of the result follows from
        # them, and must be the same on all ranks.
        widths = [table.shape[1] for table in self.tables]
        own = (("widths", widths), ("tables", len(widths)))
        proposals = space.compare("triton.embedding_all_to_all", same, own, refusal)
        columns = [sum(dict(proposal.own)["widths"]) for proposal in proposals]
        counts = [dict(proposal.own)["tables"] for proposal in proposals]
        self.columns = sum(columns)
        self._firsts = [rank * (batch // world) + min(rank, batch % world) for rank in range(world)]
        self._firsts.append(batch)
        self.rows = self._firsts[me + 1] - self._firsts[me]
        most_rows = -(-batch // world)
        sizes = [*[most_rows * self.columns * dtype.itemsize] * 2, world * 8]
        self._calls = KernelCalls(
            device.embedding_all_to_all,
            device.PHASES,
            space,
            (*same, ("columns", columns)),
            size=sum(map(aligned, sizes)),
            grid=grid,
        )
        region = self._calls.region
        shape = (most_rows, self.columns)
        self._results = [region.carve(shape, dtype) for _ in range(2)]
        self._arrived = region.carve((world,), torch.int64)
        blocks = -(-self.rows // BLOCK_BAGS)
        first_column = sum(columns[:me])
        targets = [first_column + sum(widths[:table]) for table in range(len(widths))]
        self._of_tables = {
            "tables": self._private([table.data_ptr() for table in self.tables]),
            "heights": self._private([table.shape[0] for table in self.tables]),
            "widths": self._private(widths),
            "targets": self._private(targets),
            "firsts": self._private(self._firsts),
            "pieces": self._private([max(count * blocks, 1) for count in counts]),
        }

    def __call__(
        self,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """indices: those of all bags of this rank's tables, bag after bag and table after table.
        offsets: [tables * batch + 1], the start of each bag, and the end."""
        turn = self._calls.turn

        def prepare() -> dict[str, Any]:
            self._check_bags(indices, offsets, per_sample_weights)
            return {
                **self._of_tables,
                "indices": indices,
                "offsets": offsets,
                "weights": indices if per_sample_weights is None else per_sample_weights,
                "out": self._results[turn],
                "arrived": self._arrived,
                "bases": self._calls.region.bases,
                "me": self.space.rank,
                "world": self.space.world,
                "num_tables": len(self.tables),
                "batch": self.batch,
                "out_stride": self.columns,
                "epoch": self._calls.done + 1,
                "MEAN": self.mode == "mean",
                "WEIGHTED": self.weighted,
                "BLOCK_B": BLOCK_BAGS,
                "BLOCK_D": BLOCK_COLUMNS,
            }

        self._calls.run(prepare, options={"num_warps": 4})
        return self._results[turn][: self.rows]

    def check(self) -> None:
        """Raises the error of the calls so far, if there is one. On a GPU this waits for them."""
        self._calls.check()

    def _private(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor([*numbers, 0], dtype=torch.int64, device=self.space.device)

    def _checked(self, tables: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if self.mode not in ("sum", "mean"):
            raise Unsupported(f"mode must be sum or mean, not {self.mode!r}")
        if self.mode == "mean" and self.weighted:
            raise Unsupported("per-sample weights are for mode sum only, as in torch")
        check_sizes(self.dtype, batch=self.batch)
        for number, table in enumerate(tables):
            check_input(self.space, f"table {number}", table, self.dtype, (None, None))
        return [table.contiguous() for table in tables]

    def _check_bags(
        self, indices: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None
    ) -> None:
        """Raises unless the arguments fit, as far as that is known without reading the memory of a
        GPU. The kernel itself reads nothing for an index outside of its table."""
        for name, tensor in (("indices", indices), ("offsets", offsets)):
            if not isinstance(tensor, torch.Tensor) or tensor.dtype not in _WHOLE:
                raise Unsupported(f"{name} must be a tensor of int32 or int64")
        check_input(self.space, "indices", indices, indices.dtype, (None,))
        count = len(self.tables) * self.batch + 1
        check_input(self.space, "offsets", offsets, offsets.dtype, (count,))
        if self.weighted != (weights is not None):
            made = "with" if self.weighted else "without"
            raise Unsupported(f"the operator was made {made} per-sample weights")
        if weights is not None:
            check_input(self.space, "per_sample_weights", weights, self.dtype, (len(indices),))
        if self.space.device.type == "cpu":
            self._check_values(indices, offsets)

    def _check_values(self, indices: torch.Tensor, offsets: torch.Tensor) -> None:
        if offsets[0] != 0 or offsets[-1] != len(indices) or bool((offsets.diff() < 0).any()):
            raise Unsupported(
                f"offsets must begin with 0, never decrease, and end with the {len(indices)} "
                "indices there are"
            )
        for number, table in enumerate(self.tables):
            bounds = offsets[number * self.batch], offsets[(number + 1) * self.batch]
            part = indices[int(bounds[0]) : int(bounds[1])]
            if part.numel() and not 0 <= int(part.min()) <= int(part.max()) < len(table):
                raise Unsupported(
                    f"table {number} has {len(table)} rows, but indices go from {int(part.min())} "
                    f"to {int(part.max())}"
                )


_WHOLE = (torch.int32, torch.int64)
