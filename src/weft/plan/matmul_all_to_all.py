"""Matmul then all-to-all: every rank multiplies its rows and sends each row to its target rank.

This is the last GEMM of the experts of an MoE layer, followed by combine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from weft.dtype import ITEM_BYTES
from weft.operation import dtypes_label, ranks_label, register, result_dtype, split
from weft.plan import expert_combine, experts, in_kernel, scattering, scattering_proof
from weft.plan.collective import OneCollective
from weft.plan.contents import Contents
from weft.plan.experts import pieces_of
from weft.plan.tasks import Plan
from weft.schedule import Schedule


@register
@dataclass(frozen=True)
class MatmulAllToAll:
    """Y on rank r = the rows of X_s @ W_s that are sent to r, in the order of ranks s.

    splits: per rank, how many of its rows go to each rank. inner: the K of every rank. result: the
    dtype of the products that travel and of Y, if not that of X. experts: if above 0, every rank
    has this many experts, each with its own W; splits are then by rank and expert, and the rows of
    X are in the order of experts and ranks (`plan.experts`).
    """

    splits: tuple[tuple[int, ...], ...]
    n: int
    inner: tuple[int, ...]
    dtype: str = "float32"
    result: str | None = None
    experts: int = 0

    name: ClassVar[str] = "matmul_all_to_all"
    routed: ClassVar[bool] = True
    summed: ClassVar[bool] = False
    everywhere: ClassVar[bool] = False

    @property
    def in_kernel(self) -> bool:
        """Whether a kernel can store the products into the memory of peers."""
        return not self.experts

    @classmethod
    def of(
        cls,
        m: int,
        n: int,
        k: int,
        world: int,
        dtype: str = "float32",
        result: str | None = None,
    ) -> MatmulAllToAll:
        """The operation with M rows on every rank, split evenly over all ranks."""
        return cls((split(m, world),) * world, n, (k,) * world, dtype, result)

    @property
    def world(self) -> int:
        return len(self.splits)

    @property
    def label(self) -> str:
        rows, k = sum(self.splits[0]), self.inner[0]
        experts = f" for {self.experts} experts" if self.experts else ""
        sizes = f"{rows}x{self.n}x{k}{experts}"
        return f"{self.name} {sizes} {dtypes_label(self)} on {ranks_label(self.world)}"

    def num_flops(self, rank: int) -> int:
        return 2 * sum(self.splits[rank]) * self.n * self.inner[rank]

    def num_bytes(self, source: int, target: int) -> int:
        rows = 0 if source == target else self.sizes(source)[target]
        return rows * self.n * ITEM_BYTES[result_dtype(self)]

    def compute_only(self) -> MatmulAllToAll:
        """The GEMM of one rank, without communication."""
        alone: tuple[int, ...] = (sum(self.splits[0]),)
        if self.experts:
            alone = tuple(rows for _, rows in pieces_of(self.tokens, self.experts).spans[0])
        return replace(self, splits=(alone,), inner=self.inner[:1])

    def refuses(self, schedule: Schedule) -> str | None:
        """The reason why this operation cannot have a schedule, or None if it can."""
        return experts.refuses(schedule) if self.experts else None

    def sizes(self, maker: int) -> tuple[int, ...]:
        if not self.experts:
            return self.splits[maker]
        each, rows = self.experts, self.splits[maker]
        return tuple(sum(rows[rank * each :][:each]) for rank in range(self.world))

    @property
    def tokens(self) -> tuple[tuple[int, ...], ...]:
        """Per rank, the rows that it gets from each (rank, expert)."""
        return tuple(
            tuple(
                self.splits[maker][owner * self.experts + expert]
                for maker in range(self.world)
                for expert in range(self.experts)
            )
            for owner in range(self.world)
        )

    def one_collective(self, rank: int) -> OneCollective | None:
        if self.experts:
            return None
        return OneCollective.by_pair(self.splits, rank, self.n, self.inner[rank])

    def lower(self, schedule: Schedule) -> Plan:
        if self.experts:
            return expert_combine.lower(self, schedule)
        if schedule.fusion == "kernel":
            return in_kernel.lower(self, schedule)
        return scattering.lower(self, schedule)

    def check(self, plan: Plan, contents: Contents) -> None:
        if self.experts:
            expert_combine.check(self, contents)
        else:
            scattering_proof.check(self, contents)
