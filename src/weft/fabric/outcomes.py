"""How a native wait ends: a code, and the rank that it is about or -1."""

from __future__ import annotations

from weft.errors import PeerLost

OK, TIMEOUT, PEER_LOST, PEER_LEFT, PEER_FAILED, CANCELLED, DISAGREE, AGAIN, WITHDRAWN = range(9)
"""As native/heap.h has them."""

Outcome = tuple[int, int]

_GONE = {PEER_LOST: "died", PEER_LEFT: "left the group", PEER_FAILED: "gave up"}


def peer_error(outcome: Outcome, rank: int, where: str, there: str = "") -> PeerLost | None:
    """The error on `rank`, which was `where`, for an outcome that a peer caused; None for others.
    there: where the peer was when it gave up, if that is known."""
    code, peer = outcome
    if code not in _GONE:
        return None
    did = _GONE[code] + (f" {there}" if there and code == PEER_FAILED else "")
    return PeerLost(f"rank {peer} {did}; rank {rank} was {where}", peer)
