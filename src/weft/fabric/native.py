"""The methods of the native module that calls and flights of a fabric of processes use.

On one machine this is `_native.Fabric` itself; between machines `group.network_native` implements
the same methods with headers that travel over a network.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from weft.fabric.outcomes import Outcome


class Native(Protocol):
    """Headers, counters and flights of one group, on one rank."""

    def agree(self, call: int, signatures: Sequence[int], deadline: int) -> Outcome:
        """Waits until every rank has entered a call. Compares their signatures, if any are
        given."""

    def header(self, call: int, rank: int) -> bytes: ...
    def entered(self, rank: int) -> int:
        """The last call that a rank has entered."""

    def cancel(self, call: Any) -> None: ...
    def finish(self, call: Any) -> Outcome:
        """Waits until no copy of a flight is running."""

    def outcome(self, call: Any) -> Outcome: ...
    def wait(self, call: Any, rank: int, counter: int) -> Outcome: ...
    def doorbell(self) -> int: ...
    def wait_doorbell(self, call: Any, seen: int) -> Outcome: ...
    def reached(self, call: int, counters: Sequence[tuple[int, int]]) -> list[bool]: ...
    def signal(self, call: int, counter: int, rings: Sequence[int]) -> int: ...
    def done(self, call: int) -> Outcome:
        """Posts that this rank no longer touches the memory of other ranks in this call."""

    def wait_released(self, call: int, deadline: int) -> Outcome:
        """Waits until every peer is done with a call."""

    def fail(self, call: int, why: int) -> None:
        """Informs the peers that this rank gave up in a call. why: see `outcomes.why`."""

    def failed(self, rank: int) -> int:
        """The call in which a rank gave up; 0 if it has not."""

    def leave(self) -> None: ...
