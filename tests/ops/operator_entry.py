"""What an entry of the table of operators is made of: draws, examples, peers, and the entry itself.

Values are small integers, so that every sum is exact in every dtype and equality is equality.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

import weft

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SIZES = (0, 1, 2, 3, 5, 8, 13, 31, 64)
FEW = ("serial@dma", "hetero-unfused-1d@cores", "adaptive@dma", "adaptive:4@dma", "adaptive@direct")


class Draw:
    """What is drawn for one call: sizes are the same on all ranks, values are each rank's own."""

    def __init__(
        self, seed, dtype=torch.float32, *, group=None, sizes=SIZES, shape=None, grad=False
    ):
        self.seed, self.dtype, self.grad = seed, dtype, grad
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        common = random.Random(seed)
        drawn = [common.choice(sizes) for _ in range(3)]
        self.m, self.n, self.k = shape or drawn
        self.splits = [[common.choice(sizes) for _ in range(self.world)] for _ in range(self.world)]
        """How many rows every rank sends to every rank."""
        self._generator = torch.Generator().manual_seed(1000 * seed + self.rank)

    def values(self, *shape):
        made = torch.randint(-2, 3, shape, generator=self._generator).to(self.dtype)
        return made.requires_grad_(self.grad)

    @property
    def sent(self):
        return self.splits[self.rank]

    @property
    def taken(self):
        return [sizes[self.rank] for sizes in self.splits]


@dataclass(frozen=True)
class Example:
    """The arguments of one call."""

    arguments: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=dict)

    def call(self, function, **options):
        return function(*self.arguments, **{**self.options, **options})

    def map(self, function) -> Example:
        """The same with every tensor changed."""
        options = {name: mapped(value, function) for name, value in self.options.items()}
        return Example(mapped(self.arguments, function), options)

    def double(self) -> Example:
        """The same in float64, in leaves of their own."""

        def wide(tensor):
            if not tensor.is_floating_point():
                return tensor
            return tensor.detach().double().requires_grad_(tensor.requires_grad)

        return self.map(wide)

    @property
    def tensors(self) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        self.map(found.append)
        return found

    @property
    def leaves(self) -> list[torch.Tensor]:
        """The tensors that gradients are wanted for."""
        return [tensor for tensor in self.tensors if tensor.requires_grad]


def mapped(value, function):
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(item, function) for item in value)
    return value


class Peers:
    """This rank among the ranks of a group, for references."""

    def __init__(self, group=None):
        self.group = group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)

    def gather(self, x, sums=True) -> list[torch.Tensor]:
        """The x of every rank. sums: whether every rank uses what it gathers for a result of its
        own, so that gradients of all ranks add up; otherwise all of them hold one result."""
        return list(_Gather.apply(x, self, sums))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, peers, sums):
        ctx.peers, ctx.sums = peers, sums
        return tuple(exchanged(peers, x.detach()))

    @staticmethod
    def backward(ctx, *gradients):
        own = gradients[ctx.peers.rank]
        if ctx.sums:
            own = sum(other[ctx.peers.rank] for other in exchanged(ctx.peers, list(gradients)))
        return own, None, None


def exchanged(peers, value):
    values = [None] * peers.world
    dist.all_gather_object(values, value, group=peers.group)
    return values


@dataclass(frozen=True)
class Operator:
    """One operator: how to make inputs for it, and what it equals."""

    name: str
    examples: Mapping[str, Callable[[Draw], Example]]
    """Inputs of this rank, by what is particular to them; "plain" is the first."""
    reference: Callable[..., Any]
    """The same arguments, and peers=: the result of this rank."""
    graph: Callable[[Example, str], tuple[tuple[Any, ...], dict[str, Any]]] | None
    """The arguments of `torch.ops.weft.NAME`, for an example and the name of a group. None where
    an example may have no tensor at all on some rank, for which torch finds no kernel."""
    dtypes: tuple[torch.dtype, ...] = DTYPES
    schedules: Callable[[int], Sequence[str]] = lambda world: space(world)
    few: tuple[str, ...] = FEW
    """Some of the schedules, for tests that are about something else."""
    more: tuple[str, ...] = ()
    """Schedules beside those of the space, for more ranks than one."""
    shapes: tuple[tuple[int, int, int], ...] = ()
    """M, N and K that every schedule meets, beside random ones."""
    replicated: bool = False
    """Whether all ranks hold one result, and each the gradient of it."""

    @property
    def function(self):
        return getattr(weft, self.name)


def space(world: int) -> list[str]:
    """The names of all schedules."""

    class Sized:
        pass

    Sized.world = world
    return [str(schedule) for schedule in weft.Schedule.space(Sized)]
