"""The five operators beside the plain torch that each equals, for tests that run on ranks.

Values are small integers, so that every sum is exact in every dtype and equality is equality.
"""

from __future__ import annotations

import random

import torch
import torch.distributed as dist

import weft
from weft.operation import split

NAMES = (
    "all_gather_matmul",
    "matmul_reduce_scatter",
    "matmul_all_reduce",
    "all_to_all_matmul",
    "matmul_all_to_all",
)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SIZES = (0, 1, 2, 3, 5, 8, 13, 31, 64)


class Case:
    """One call of one operator with this rank's tensors: `weft()` and `plain()` are to be equal."""

    def __init__(self, name, seed, dtype=torch.float32, group=None, grad=False, sizes=SIZES):
        self.name, self.group = name, group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        common = random.Random(seed)  # the same on all ranks
        own = torch.Generator().manual_seed(1000 * seed + self.rank)

        def values(*shape):
            made = torch.randint(-2, 3, shape, generator=own).to(dtype)
            return made.requires_grad_(grad)

        def size():
            return common.choice(sizes)

        m, n, k = size(), size(), size()
        self.splits = [[size() for _ in range(self.world)] for _ in range(self.world)]
        self.in_splits = self.splits[self.rank]
        self.out_splits = [sizes[self.rank] for sizes in self.splits]
        rows = sum(self.in_splits) if "all_to_all" in name else m
        if name == "all_gather_matmul":
            rows = split(m, self.world)[self.rank]
        self.m = m
        self.x, self.w = values(rows, k), values(k, n)

    def weft(self, schedule="auto", **options):
        options = {"group": self.group, "schedule": schedule, **options}
        arguments = [self.x, self.w]
        if "all_to_all" in self.name:
            arguments += [self.in_splits, self.out_splits]
        return getattr(weft, self.name)(*arguments, **options)

    def plain(self, x=None, w=None):
        """In float64, by torch.distributed and torch alone."""
        x = (self.x if x is None else x).detach().double()
        w = (self.w if w is None else w).detach().double()
        if self.name == "all_gather_matmul":
            return self.gathered(x, split(self.m, self.world)) @ w
        if self.name == "all_to_all_matmul":
            return self.exchanged(x) @ w
        product = x @ w
        if self.name == "matmul_all_to_all":
            return self.exchanged(product)
        dist.all_reduce(product, group=self.group)
        if self.name == "matmul_all_reduce":
            return product
        return product.tensor_split(self.world)[self.rank]

    def gathered(self, x, rows):
        parts = [torch.empty(max(rows), x.shape[1], dtype=x.dtype) for _ in rows]
        padded = torch.zeros(max(rows), x.shape[1], dtype=x.dtype)
        padded[: x.shape[0]] = x
        dist.all_gather(parts, padded, group=self.group)
        return torch.cat([part[:size] for part, size in zip(parts, rows, strict=True)])

    def exchanged(self, x):
        every = self.gathered(x, [sum(sizes) for sizes in self.splits])
        shards = every.split([sum(sizes) for sizes in self.splits])
        pairs = zip(shards, self.splits, strict=True)
        return torch.cat([shard.split(sizes)[self.rank] for shard, sizes in pairs])


def same(case: Case, schedule="auto", **options) -> None:
    """That weft and plain torch give the same."""
    got, want = case.weft(schedule, **options), case.plain()
    if isinstance(got, tuple):
        got = got[0]
    assert got.dtype == case.x.dtype
    assert torch.equal(got.detach().double(), want), (case.name, schedule, got, want)


def forward(name, schedules, seeds, dtypes=(torch.float32,)):
    """Every schedule on random sizes of every seed."""
    for seed in seeds:
        for dtype in dtypes:
            for schedule in schedules:
                same(Case(name, seed, dtype), schedule)


class _Shared(torch.autograd.Function):
    """Values that all ranks hold, and each uses in part: gradients are summed over ranks."""

    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total)
        return total


class _All(torch.autograd.Function):
    """The results of all ranks, on every rank."""

    @staticmethod
    def forward(ctx, y):
        sizes = [None] * dist.get_world_size()
        dist.all_gather_object(sizes, y.numel())
        ctx.shape, ctx.start = y.shape, sum(sizes[: dist.get_rank()])
        padded = y.new_zeros(max(*sizes, 1))
        padded[: y.numel()] = y.flatten()
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @staticmethod
    def backward(ctx, gradient):
        own = gradient[ctx.start : ctx.start + ctx.shape.numel()]
        return own.view(ctx.shape)


def gradients(name, schedule, seed):
    """torch's gradcheck of an operator as one function of the inputs of all ranks to the results of
    all: every rank holds all inputs and moves the same one at the same time."""
    case = Case(name, seed, torch.float64, sizes=(1, 2, 3))
    shapes = [None] * case.world
    dist.all_gather_object(shapes, (tuple(case.x.shape), tuple(case.w.shape)))
    sizes = [torch.Size(shape).numel() for pair in shapes for shape in pair]
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(sum(sizes), dtype=torch.float64, generator=generator)

    def function(values):
        parts = _Shared.apply(values).split(sizes)
        x, w = shapes[case.rank]
        case.x = parts[2 * case.rank].view(x)
        case.w = parts[2 * case.rank + 1].view(w)
        y = case.weft(schedule)
        # an all-reduce has one result, which all ranks hold
        return y.clone() if name == "matmul_all_reduce" else _All.apply(y)

    assert torch.autograd.gradcheck(
        function, (values.requires_grad_(),), check_undefined_grad=False
    )


def space(world):
    """The names of all schedules."""

    class Sized:
        pass

    Sized.world = world
    return [str(schedule) for schedule in weft.Schedule.space(Sized)]
