"""The all-to-all in the gradient of `embedding_all_to_all`: columns of dY are sent back to the rank
that holds their tables. That rank then has the gradient of all its bags."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

from weft.dtype import ITEM_BYTES
from weft.errors import InvalidPlan
from weft.operation import ranks_label, register, split, starts
from weft.plan.builder import Builder, refuse_impossible
from weft.plan.contents import Contents, Data, covers_once
from weft.plan.tasks import Plan, Region
from weft.schedule import Schedule


@register
@dataclass(frozen=True)
class EmbeddingGradient:
    """dP on rank s = the columns of s in the dY of rank 0, rank 1, and so on, concatenated by rows.

    batch: per rank, its number of bags. columns: per rank, the columns of dY for its tables.
    """

    batch: tuple[int, ...]
    columns: tuple[int, ...]
    dtype: str = "float32"

    name: ClassVar[str] = "embedding_gradient"
    routed: ClassVar[bool] = True

    @classmethod
    def of(cls, m: int, n: int, k: int, world: int, dtype: str = "float32") -> EmbeddingGradient:
        """A batch of M bags, and tables with N columns in total on every rank. K is not used."""
        return cls(split(m, world), (n,) * world, dtype)

    @property
    def world(self) -> int:
        return len(self.batch)

    @property
    def label(self) -> str:
        sizes = f"{sum(self.batch)} bags, {self.columns[0]} columns a rank"
        return f"{self.name} of {sizes}, {self.dtype} on {ranks_label(self.world)}"

    def num_flops(self, rank: int) -> int:
        return 0

    def num_bytes(self, source: int, target: int) -> int:
        bags = 0 if source == target else self.batch[source]
        return bags * self.columns[target] * ITEM_BYTES[self.dtype]

    def compute_only(self) -> EmbeddingGradient:
        return replace(self, batch=(sum(self.batch),), columns=self.columns[:1])

    def refuses(self, schedule: Schedule) -> str | None:
        """The reason why this operation cannot have a schedule, or None if it can."""
        serial = schedule.serial and schedule.engine != "direct"
        return None if serial else "there is no compute to overlap with; use serial"

    def lower(self, schedule: Schedule) -> Plan:
        return _lower(self, schedule)

    def check(self, plan: Plan, contents: Contents) -> None:
        for rank in range(self.world):
            boxes = []
            for held in contents.of(rank, "dp"):
                value = held.value
                if not isinstance(value, Data) or value.buffer[1] != "dy":
                    raise InvalidPlan(f"dp@{rank} holds {value} where a gradient belongs")
                bag = starts(self.batch)[value.buffer[0]] + value.row
                column = value.column - starts(self.columns)[rank]
                if (bag, column) != (held.row, held.column):
                    raise InvalidPlan(f"dp@{rank}: {held} is in the wrong place")
                boxes.append((held.row, held.rows, held.column, held.columns, 0, 1))
            covers_once(boxes, (sum(self.batch), self.columns[rank], 1), f"dp@{rank}")


@lru_cache(maxsize=64)
def _lower(op: EmbeddingGradient, schedule: Schedule) -> Plan:
    refuse_impossible(schedule, op.refuses(schedule))
    builder = Builder(op, schedule)
    first, bags = starts(op.columns), starts(op.batch)
    for rank in range(op.world):
        builder.add_buffer("dy", rank, op.batch[rank], sum(op.columns), "input")
        builder.add_buffer("dp", rank, sum(op.batch), op.columns[rank], "output")
    for rank in range(op.world):
        columns = op.columns[rank]
        for step in range(op.world):
            peer = (rank + step) % op.world
            source = Region(peer, "dy", 0, op.batch[peer], first[rank], columns)
            target = Region(rank, "dp", bags[peer], op.batch[peer], 0, columns)
            if peer == rank:
                builder.permute(rank, [(source, target)], label="own bags")
            else:
                builder.copy(rank, source, target, peer=peer, label=f"gradients of {peer}")
    return builder.plan()
