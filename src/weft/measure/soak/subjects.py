"""The calls that soak makes: for each operator and collective, random inputs of every rank and the
result in plain torch.

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
from torch.nn.functional import embedding_bag

from weft import collectives
from weft.ops.all_gather_matmul import all_gather_matmul
from weft.ops.all_to_all_matmul import all_to_all_matmul
from weft.ops.embedding_all_to_all import embedding_all_to_all
from weft.ops.matmul_all_reduce import matmul_all_reduce
from weft.ops.matmul_all_to_all import matmul_all_to_all
from weft.ops.matmul_reduce_scatter import matmul_reduce_scatter
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

    def there(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor on the device of the call."""
        return tensor.to(self.device)

    def rows_of(self, rank: int) -> int:
        """The rows of a rank if M is split evenly."""
        return self.m // self.world + (rank < self.m % self.world)

    def received(self, rank: int) -> list[int]:
        return [sizes[rank] for sizes in self.splits]


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
    return torch.equal(result.cpu(), subject.expected(draw, rank).to(draw.dtype))


class _World:
    def __init__(self, world: int) -> None:
        self.world = world


def _schedules(world: int) -> Sequence[str]:
    return ["auto", *(str(schedule) for schedule in Schedule.space(_World(world)))]


# -- operators -------------------------------------------------------------------------------------


def _x(draw: Draw, rank: int) -> torch.Tensor:
    return draw.values(rank, 0, draw.m, draw.k)


def _shard(draw: Draw, rank: int) -> torch.Tensor:
    return draw.values(rank, 0, draw.rows_of(rank), draw.k)


def _routed(draw: Draw, rank: int) -> torch.Tensor:
    return draw.values(rank, 0, sum(draw.splits[rank]), draw.k)


def _w(draw: Draw, rank: int) -> torch.Tensor:
    return draw.values(rank, 1, draw.k, draw.n)


def _total(draw: Draw) -> torch.Tensor:
    parts = [_x(draw, rank).double() @ _w(draw, rank).double() for rank in range(draw.world)]
    return torch.stack(parts).sum(0)


def _exchanged(draw: Draw, rank: int, of: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """The rows of every rank's tensor that are for this rank."""
    return torch.cat(
        [
            torch.split(of(source).double(), draw.splits[source])[rank]
            for source in range(draw.world)
        ]
    )


def _gathered(draw: Draw) -> torch.Tensor:
    return torch.cat([_shard(draw, rank).double() for rank in range(draw.world)])


register(
    Subject(
        "all_gather_matmul",
        lambda d, rank, group, schedule: all_gather_matmul(
            d.there(_shard(d, rank)), d.there(_w(d, rank)), group=group, schedule=schedule
        ),
        lambda d, rank: _gathered(d) @ _w(d, rank).double(),
    )
)
register(
    Subject(
        "matmul_reduce_scatter",
        lambda d, rank, group, schedule: matmul_reduce_scatter(
            d.there(_x(d, rank)), d.there(_w(d, rank)), group=group, schedule=schedule
        ),
        lambda d, rank: _total(d).tensor_split(d.world)[rank],
    )
)
register(
    Subject(
        "matmul_all_reduce",
        lambda d, rank, group, schedule: matmul_all_reduce(
            d.there(_x(d, rank)), d.there(_w(d, rank)), group=group, schedule=schedule
        ),
        lambda d, rank: _total(d),
    )
)
register(
    Subject(
        "all_to_all_matmul",
        lambda d, rank, group, schedule: all_to_all_matmul(
            d.there(_routed(d, rank)),
            d.there(_w(d, rank)),
            d.splits[rank],
            d.received(rank),
            group=group,
            schedule=schedule,
        ),
        lambda d, rank: _exchanged(d, rank, lambda r: _routed(d, r)) @ _w(d, rank).double(),
    )
)
register(
    Subject(
        "matmul_all_to_all",
        lambda d, rank, group, schedule: matmul_all_to_all(
            d.there(_routed(d, rank)),
            d.there(_w(d, rank)),
            d.splits[rank],
            d.received(rank),
            group=group,
            schedule=schedule,
        ),
        lambda d, rank: _exchanged(d, rank, lambda r: _routed(d, r).double() @ _w(d, r).double()),
    )
)


def _bags(draw: Draw, rank: int) -> tuple[list[torch.Tensor], ...]:
    """The tables, indices and offsets of a rank."""
    tables, indices, offsets = [], [], []
    for place in range(1 + (draw.seed + rank) % 3):
        rows, columns = 1 + 7 * place, (1, 8, 37)[(draw.seed + place) % 3]
        tables.append(draw.values(rank, place, rows, columns))
        indices.append(torch.arange(draw.m) % rows)
        offsets.append(torch.arange(draw.m) // 2 * 2)
    return tables, indices, offsets


def _pooled(draw: Draw, rank: int) -> torch.Tensor:
    found = [torch.zeros(draw.m, 0, dtype=torch.float64)]
    for table, index, offset in zip(*_bags(draw, rank), strict=True):
        if draw.m:
            found.append(embedding_bag(index, table.double(), offset, mode="sum"))
        else:
            found.append(table.double()[:0])
    return torch.cat(found, 1)


def _looked_up(draw: Draw, rank: int) -> torch.Tensor:
    whole = torch.cat([_pooled(draw, source) for source in range(draw.world)], 1)
    return whole.tensor_split(draw.world)[rank]


register(
    Subject(
        "embedding_all_to_all",
        lambda d, rank, group, schedule: embedding_all_to_all(
            *([d.there(t) for t in some] for some in _bags(d, rank)),
            group=group,
            schedule=schedule,
        ),
        _looked_up,
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
        schedules=lambda world: ("auto", "in-kernel:3", "serial@dma", "hetero-unfused-1d@cores"),
    )
)


# -- collectives -----------------------------------------------------------------------------------


def _collective(name: str, call: Callable[..., Any], expected: Callable[..., Any]) -> None:
    """schedules: the engine, and whether the call is in the background."""

    def run(d: Draw, rank: int, group: dist.ProcessGroup | None, way: str) -> torch.Tensor:
        engine, _, background = way.partition(" ")
        made = call(d, rank, group, engine, bool(background))
        return made.wait() if background else made  # type: ignore[no-any-return]

    ways = ("dma", "cores", "dma background", "cores background")
    register(Subject(name, run, expected, schedules=lambda world: ways, collective=True))


_collective(
    "all_gather",
    lambda d, r, group, engine, later: collectives.all_gather(
        _x(d, r), group=group, engine=engine, async_op=later
    ),
    lambda d, r: torch.cat([_x(d, source).double() for source in range(d.world)]),
)
_collective(
    "all_reduce",
    lambda d, r, group, engine, later: collectives.all_reduce(
        _x(d, r), group=group, engine=engine, async_op=later
    ),
    lambda d, r: torch.stack([_x(d, source).double() for source in range(d.world)]).sum(0),
)
_collective(
    "all_to_all",
    lambda d, r, group, engine, later: collectives.all_to_all(
        _routed(d, r), d.splits[r], d.received(r), group=group, engine=engine, async_op=later
    ),
    lambda d, r: _exchanged(d, r, lambda source: _routed(d, source)),
)
_collective(
    "broadcast",
    lambda d, r, group, engine, later: collectives.broadcast(
        _x(d, r), d.root, group=group, engine=engine, async_op=later
    ),
    lambda d, r: _x(d, d.root).double(),
)
