"""Which ranks are on which machine, and which rank transfers what between machines.

Data that several ranks of a machine need from another machine, or send to it, crosses the network
once: one of them, the carrier, sends or receives it, and the others use shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Nodes:
    """The machine of every rank, as a number."""

    of: tuple[int, ...]

    @cached_property
    def numbers(self) -> list[int]:
        """All machines, in the order of their first rank."""
        return list(dict.fromkeys(self.of))

    @property
    def levels(self) -> int:
        """2 if there are several machines and one of them has several ranks, else 1."""
        return 2 if 1 < len(self.numbers) < len(self.of) else 1

    def members(self, node: int) -> list[int]:
        return [rank for rank, number in enumerate(self.of) if number == node]

    def mates(self, rank: int) -> list[int]:
        """The other ranks on a rank's machine, starting with the next."""
        return _after(self.members(self.of[rank]), rank)

    def others(self, rank: int) -> list[int]:
        """The machines other than a rank's own, starting with the next."""
        return _after(self.numbers, self.of[rank])

    def carrier(self, rank: int, node: int) -> int:
        """The rank on `node` that transfers data from, or to, a rank on another machine."""
        position = self.members(self.of[rank]).index(rank)
        members = self.members(node)
        return members[position % len(members)]


def _after(members: Sequence[int], one: int) -> list[int]:
    at = members.index(one)
    return [*members[at + 1 :], *members[:at]]
