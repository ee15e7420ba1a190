"""Embedding lookups beside the plain torch that they equal, for tests that run on ranks.

Values are small integers, so that every sum is exact in every dtype and equality is equality.
"""

from __future__ import annotations

import random

import torch
import torch.distributed as dist
from torch.nn.functional import embedding_bag

import weft
from weft.operation import split

DIMS = (1, 3, 4, 8, 16, 24, 37, 64, 100)


class Case:
    """One call with this rank's tables. Every rank can make the inputs of all."""

    def __init__(self, seed, dtype=torch.float32, *, mode="sum", weighted=False, grad=False,
                 max_tables=3, batch=None, long=True):  # fmt: skip
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.mode, self.grad, self.weighted = mode, grad, weighted
        common = random.Random(seed)
        self.batch = common.choice((0, 1, 2, 5, 13, 40, 67)) if batch is None else batch
        self.inputs = [
            self._of_rank(1000 * seed + rank, common.randint(0, max_tables), dtype, long)
            for rank in range(self.world)
        ]
        self.tables, self.indices, self.offsets, self.weights = self.inputs[self.rank]
        for tensor in (*self.tables, *self.weights):
            tensor.requires_grad_(grad)

    def _of_rank(self, seed, count, dtype, long):
        choose, values = random.Random(seed), torch.Generator().manual_seed(seed)
        integer = torch.int64 if long else torch.int32
        tables, indices, offsets, weights = [], [], [], []
        for _ in range(count):
            rows = choose.choice((1, 2, 7, 50))
            lengths = [choose.choice((0, 1, 2, 5)) for _ in range(self.batch)]
            total = sum(lengths)
            starts = torch.tensor([sum(lengths[:i]) for i in range(self.batch)], dtype=integer)
            shape = (rows, choose.choice(DIMS))
            tables.append(torch.randint(-2, 3, shape, generator=values).to(dtype))
            indices.append(torch.randint(0, rows, (total,), generator=values).to(integer))
            offsets.append(starts)
            weights.append(torch.randint(-1, 3, (total,), generator=values).to(dtype))
        return tables, indices, offsets, weights

    def weft(self, schedule="auto", **options):
        options = {"mode": self.mode, "schedule": schedule, **options}
        if self.weighted:
            options["per_sample_weights"] = self.weights
        return weft.embedding_all_to_all(self.tables, self.indices, self.offsets, **options)

    def pooled(self, rank):
        """The pooled rows of all bags for the tables of a rank, in float64."""
        tables, indices, offsets, weights = self.inputs[rank]
        return [
            embedding_bag(
                i.long(), t.double(), o.long(), mode=self.mode,
                per_sample_weights=w.double() if self.weighted else None,
            )
            if self.batch else t.new_empty(0, t.shape[1]).double()
            for t, i, o, w in zip(tables, indices, offsets, weights, strict=True)
        ]  # fmt: skip

    def plain(self):
        parts = [table for rank in range(self.world) for table in self.pooled(rank)]
        rows = split(self.batch, self.world)
        first = sum(rows[: self.rank])
        if not parts:
            return torch.empty(rows[self.rank] * 0, 0, dtype=torch.float64)
        return torch.cat(parts, 1)[first : first + rows[self.rank]]


def same(case, schedule="auto", **options):
    got, want = case.weft(schedule, **options).detach(), case.plain()
    if got.numel() == 0 and want.numel() == 0:
        return
    if case.mode == "sum":
        assert torch.equal(got.double(), want.detach()), (schedule, got, want)
    else:
        tolerance = {4: 1e-6, 2: 1e-2}[got.element_size()]
        torch.testing.assert_close(got.double(), want.detach(), rtol=tolerance, atol=tolerance)


def forward(schedules, seeds, dtypes, **options):
    for seed in seeds:
        for dtype in dtypes:
            for schedule in schedules:
                same(Case(seed, dtype, **options), schedule)
