"""One collective operation, and the table of kinds that all ways to carry it out share.

The native channel of the host, the command variants of copy engines, the library that compute units
drive, and the algorithms of clusters are ways to carry out a `Collective`
(`weft.study.collective_ways` lists them). What they have in common is here: what every rank gives
and gets, whether it is added, and how sizes are counted.

    all_gather      every rank gives its part, and every rank gets the whole
    all_to_all      every rank gives a part to each rank, and gets a part from each
    reduce_scatter  every rank gives a whole; they are added, and every rank gets its part
    all_reduce      every rank gives a whole; they are added, and every rank gets the sum
    broadcast       the root gives a whole, and every rank gets it
    gather          every rank gives its part, and the root gets the whole
    scatter         the root gives a whole, and every rank gets its part
    reduce          every rank gives a whole; they are added, and the root gets the sum
    barrier         nothing moves; no rank goes on before all have come
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from weft.dtype import ITEM_BYTES
from weft.dtype import find as find_dtype
from weft.errors import Unsupported, nearest
from weft.operation import ranks_label, split

KindName = Literal[
    "all_gather",
    "all_to_all",
    "reduce_scatter",
    "all_reduce",
    "broadcast",
    "gather",
    "scatter",
    "reduce",
    "barrier",
]
Share = Literal["part", "parts", "whole", "nothing"]
"""What a rank has of a collective: its own part, a part for or from each rank, or all of it."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of collective. number: as `native/job.h` has it."""

    name: KindName
    number: int
    gives: Share
    gets: Share
    sums: bool = False
    from_root: bool = False  # only the root gives
    to_root: bool = False  # only the root gets

    @property
    def rooted(self) -> bool:
        return self.from_root or self.to_root

    @property
    def phases(self) -> int:
        """How often the whole passes the links of a device: an all-reduce scatters and gathers."""
        return 2 if self.sums and self.gets == "whole" and not self.to_root else 1


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("all_gather", 0, "part", "whole"),
        Kind("all_to_all", 1, "parts", "parts"),
        Kind("reduce_scatter", 2, "whole", "part", sums=True),
        Kind("all_reduce", 3, "whole", "whole", sums=True),
        Kind("broadcast", 4, "whole", "whole", from_root=True),
        Kind("gather", 5, "part", "whole", to_root=True),
        Kind("scatter", 6, "whole", "part", from_root=True),
        Kind("reduce", 7, "whole", "whole", sums=True, to_root=True),
        Kind("barrier", 8, "nothing", "nothing"),
    )
}
"""All kinds by name, in the order of their numbers."""

UNROOTED: tuple[KindName, ...] = tuple(
    kind.name for kind in KINDS.values() if kind.gives != "nothing" and not kind.rooted
)
"""The kinds in which all ranks do the same, so that one stands for all of them."""


def find_kind(name: str) -> Kind:
    """The kind of that name."""
    if name not in KINDS:
        raise Unsupported(f"there is no collective {name!r}{nearest(name, KINDS)}")
    return KINDS[name]


@dataclass(frozen=True)
class Collective:
    """A collective over the ranks of a group.

    sizes: elements of each rank's part; for all_to_all those of every pair, by source * world +
    target. root: the rank that gives or gets alone, where the kind has one.
    """

    kind: KindName
    sizes: tuple[int, ...]
    world: int
    dtype: str = "float32"
    root: int = 0

    name: ClassVar[str] = "collective"

    def __post_init__(self) -> None:
        wanted = self.world**2 if find_kind(self.kind).gives == "parts" else self.world
        if len(self.sizes) != wanted or min(self.sizes, default=0) < 0:
            raise Unsupported(f"{self.kind} over {self.world} ranks takes {wanted} sizes")
        if not 0 <= self.root < self.world:
            raise Unsupported(f"there is no rank {self.root} in a world of {self.world}")
        find_dtype(self.dtype)

    @classmethod
    def even(
        cls, kind: str, num_bytes: int, world: int, dtype: str = "float32", root: int = 0
    ) -> Collective:
        """One over `num_bytes` as libraries count them, in parts as even as can be: the gathered
        result, a rank's input of what is shared out, or the vector that is added or passed on."""
        about = find_kind(kind)
        parts = split(num_bytes // ITEM_BYTES[dtype], world)
        sizes = parts * world if about.gives == "parts" else parts
        return cls(about.name, sizes, world, dtype, root)

    @property
    def label(self) -> str:
        return f"{self.kind} of {self.total} {self.dtype} over {ranks_label(self.world)}"

    @property
    def total(self) -> int:
        """Elements as libraries count them; of an all-to-all, the largest input of a rank."""
        if KINDS[self.kind].gives != "parts":
            return sum(self.sizes)
        return max(sum(self.sent(rank)) for rank in range(self.world))

    @property
    def total_bytes(self) -> int:
        return self.total * ITEM_BYTES[self.dtype]

    def sent(self, rank: int) -> tuple[int, ...]:
        """Elements that a rank gives to each rank in an all-to-all."""
        return self.sizes[rank * self.world : (rank + 1) * self.world]

    def num_flops(self, rank: int) -> int:
        return 0

    def num_bytes(self, source: int, target: int) -> int:
        """Bytes that must travel from one rank to another."""
        about, item = KINDS[self.kind], ITEM_BYTES[self.dtype]
        outside = (about.from_root and source != self.root) or (
            about.to_root and target != self.root
        )
        if source == target or outside or about.gives == "nothing":
            return 0
        if about.gives == "parts":
            return self.sent(source)[target] * item
        if about.gives == "part":
            return self.sizes[source] * item
        if about.gets == "part":
            return self.sizes[target] * item
        if about.rooted:
            return self.total * item
        return (self.sizes[source] + self.sizes[target]) * item

    def compute_only(self) -> Collective:
        return Collective("barrier", (0,), 1, self.dtype)


class OneCollective(NamedTuple):
    """All communication of an operation on one rank, as one collective before or after its
    products: y{i} = collective(x) @ w{i}, or y = collective(x @ w).

    sizes: rows as all ranks know them, empty if every pair of ranks has a number of its own. given
    and taken: the rows of this rank's pieces, one behind the other. columns: of every row. inner:
    the K of its products. gathers: whether it comes before them.
    """

    kind: Kind
    sizes: tuple[int, ...]
    given: tuple[int, ...]
    taken: tuple[int, ...]
    columns: int
    inner: int
    gathers: bool = False
    weights: int = 1

    @classmethod
    def by_pair(
        cls, splits: Sequence[Sequence[int]], rank: int, columns: int, inner: int
    ) -> OneCollective:
        """An all-to-all. splits: per rank, how many of its rows go to each rank."""
        given = tuple(splits[rank])
        taken = tuple(rows[rank] for rows in splits)
        alike = len({rows for some in splits for rows in some}) == 1
        return cls(KINDS["all_to_all"], given[:1] if alike else (), given, taken, columns, inner)

    @property
    def rows(self) -> int:
        """The rows of what is gathered, or of the product that is sent."""
        return sum(self.taken if self.gathers else self.given)

    @property
    def moves(self) -> bool:
        """Whether any rank has something to send."""
        return self.columns > 0 and (any(self.sizes) or not self.sizes)
