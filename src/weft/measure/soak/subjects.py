"""What a call of soak is: a function, random inputs of every rank, and the result in plain torch.
The files `*_subjects.py` register them.

Values are -1, 0 and 1, so that sums are exact in every dtype, and results must be equal bit for
bit. They follow from the seed of a call and the rank. So every rank can make the inputs of all
ranks, and a result is compared without any communication.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from weft.ops.operator import operators
from weft.schedule import Schedule

ROWS = (0, 1, 2, 3, 5, 8, 13, 31, 64, 200)
INNER = (0, 1, 3, 8, 17, 64)
COLUMNS = (0, 1, 2, 7, 16, 33, 300)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LARGE = 0.02
"""The share of calls whose messages take several chunks."""


class Draw:
    """What is drawn for one call: the same sizes on all ranks, and values of each rank."""

    def __init__(
        self, seed: int, world: int, dtypes: Sequence[torch.dtype], device: str = "cpu"
    ) -> None:
        choose = random.Random(seed)
        self.seed, self.world, self.device = seed, world, device
        self.dtype = choose.choice(dtypes)
        self.m, self.k, self.n = (choose.choice(sizes) for sizes in (ROWS, INNER, COLUMNS))
        if choose.random() < LARGE:
            self.m, self.n = 4000, 64
        self.splits = [[choose.choice(ROWS[:8]) for _ in range(world)] for _ in range(world)]
        """The number of rows that every rank sends to every rank."""
        self.root = choose.randrange(world)

    def values(self, rank: int, place: int, *shape: int) -> torch.Tensor:
        """A tensor of a rank. place: which of its tensors."""
        generator = torch.Generator().manual_seed(hash((self.seed, rank, place)) % 2**63)
        return torch.randint(-1, 2, shape, generator=generator).to(self.dtype)

    def x(self, rank: int) -> torch.Tensor:
        """[M, K] of a rank."""
        return self.values(rank, 0, self.m, self.k)

    def shard(self, rank: int) -> torch.Tensor:
        """The rows of a rank if M is split evenly."""
        return self.values(rank, 0, self.rows_of(rank), self.k)

    def routed(self, rank: int) -> torch.Tensor:
        """The rows that a rank sends, sorted by the rank that they are for."""
        return self.values(rank, 0, sum(self.splits[rank]), self.k)

    def w(self, rank: int) -> torch.Tensor:
        """[K, N] of a rank."""
        return self.values(rank, 1, self.k, self.n)

    def there(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor on the device of the call."""
        return tensor.to(self.device)

    def rows_of(self, rank: int) -> int:
        """The number of rows of a rank if M is split evenly."""
        return self.m // self.world + (rank < self.m % self.world)

    def received(self, rank: int) -> list[int]:
        """The number of rows that a rank gets from every rank."""
        return [sizes[rank] for sizes in self.splits]

    def exchanged(self, rank: int, of: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """The rows of every rank's tensor that are for this rank."""
        return torch.cat(
            [
                torch.split(of(source).double(), self.splits[source])[rank]
                for source in range(self.world)
            ]
        )


@dataclass(frozen=True)
class Subject:
    """A function of weft. call: makes it on a rank and returns its result. expected: the same in
    plain torch, in float64."""

    name: str
    call: Callable[[Draw, int, dist.ProcessGroup | None, Any], torch.Tensor]
    expected: Callable[[Draw, int], torch.Tensor]
    dtypes: Sequence[torch.dtype] = DTYPES
    schedules: Callable[[int], Sequence[str]] = lambda world: _schedules(world)
    collective: bool = False
    """Whether it goes through the channel, which not every fabric has."""


_subjects: dict[str, Subject] = {}


def register(subject: Subject) -> None:
    """Makes a function part of soak."""
    _subjects[subject.name] = subject


def subjects() -> dict[str, Subject]:
    """All functions of soak by name."""
    return dict(_subjects)


def left_out() -> list[str]:
    """The operators that soak does not call by themselves."""
    return sorted(set(operators()) - set(_subjects))


def right(subject: Subject, draw: Draw, rank: int, result: torch.Tensor) -> bool:
    """Whether a result is what plain torch gives, bit for bit."""
    return torch.equal(result, subject.expected(draw, rank).to(draw.dtype))


class _World:
    def __init__(self, world: int) -> None:
        self.world = world


def _schedules(world: int) -> Sequence[str]:
    return ["auto", *(str(schedule) for schedule in Schedule.space(_World(world)))]
