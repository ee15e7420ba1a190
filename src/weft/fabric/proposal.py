"""The proposal in the header of a call, in a form that ranks can compare."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from weft.errors import Mismatch, Unsupported
from weft.fabric import _native

Items = tuple[tuple[str, Any], ...]

UNSHARED = "unshared"
"""The name of an item of `own`: this rank has exposed no memory to its peers."""

PEERS_DECIDE = "peers decide"
"""The name of an item of `same` that is True if the result of a rank depends on sizes that only its
peers know. Then a rank cannot repeat a call without hearing from them."""


@dataclass(frozen=True)
class Proposal:
    """The call that a rank proposes. `same` must be equal on all ranks; `own` may differ (sizes of
    uneven shards). A rank with bad input proposes its `error`, so that no peer waits for it."""

    operation: str
    same: Items = ()
    own: Items = ()
    error: str = ""

    @cached_property
    def blob(self) -> bytes:
        items = [self.operation, self.same, self.own, self.error]
        text = json.dumps(items, ensure_ascii=False).encode(errors="replace")
        if len(text) > _native.MAX_BLOB:
            raise Unsupported(
                f"the call has too many tensors: its description takes {len(text)} bytes of "
                f"{_native.MAX_BLOB}; split it into several calls"
            )
        return text

    @cached_property
    def unshared(self) -> Proposal:
        """The same call, with no memory that peers could touch."""
        return replace(self, own=(*self.own, (UNSHARED, True))).checked()

    @property
    def shares(self) -> bool:
        """Whether the rank has exposed what a plan may need."""
        return not any(name == UNSHARED for name, _ in self.own)

    @classmethod
    def of_error(cls, operation: str, error: Exception) -> Proposal:
        """The proposal of a rank that cannot take part."""
        # Shortened so that it always fits into a header, where a character takes up to six bytes.
        return cls(operation, error=str(error)[:600] or type(error).__name__)

    def checked(self) -> Proposal:
        """Raises unless the proposal fits into a header; returns the proposal."""
        assert self.blob
        return self

    @cached_property
    def signature(self) -> int:
        return int.from_bytes(hashlib.blake2b(self.blob, digest_size=8).digest(), "little")

    @classmethod
    def read(cls, blob: bytes) -> Proposal:
        """The proposal of a header. Raises ValueError if a header does not hold one."""
        try:
            operation, same, own, error = json.loads(blob)
            if not isinstance(operation, str) or not isinstance(error, str):
                raise ValueError("an operation and an error are text")
            return cls(operation, _items(same), _items(own), error)
        except (TypeError, RecursionError) as failure:
            raise ValueError(str(failure)) from None


@lru_cache(maxsize=4096)
def proposal_of(operation: str, same: Items, own: Items) -> Proposal:
    """A proposal that fits into a header. It is cached, because most calls repeat."""
    return Proposal(operation, same, own).checked()


def check_same(proposals: Sequence[Proposal], call: int) -> None:
    """Raises `Mismatch`, with the same message on every rank, unless all propose the same call."""
    for rank, proposal in enumerate(proposals):
        if proposal.error:
            raise Mismatch(f"call {call} was refused by rank {rank}: {proposal.error}")
    first = proposals[0]
    for rank, proposal in enumerate(proposals):
        if proposal.operation != first.operation:
            raise Mismatch(
                f"ranks disagree in call {call}: rank 0 calls {first.operation}, "
                f"rank {rank} calls {proposal.operation}"
            )
        names = [[name for name, _ in one.same] for one in (first, proposal)]
        if names[0] != names[1]:
            raise Mismatch(
                f"ranks disagree in call {call} of {first.operation}: "
                f"rank 0 has the arguments {names[0]}, rank {rank} {names[1]}"
            )
        for (name, ours), (_, theirs) in zip(first.same, proposal.same, strict=True):
            if ours != theirs:
                raise Mismatch(
                    f"ranks disagree in call {call} of {first.operation}: "
                    f"{name} is {ours} on rank 0 and {theirs} on rank {rank}"
                )


def _items(pairs: list[list[Any]]) -> Items:
    return tuple((name, _frozen(value)) for name, value in pairs)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
