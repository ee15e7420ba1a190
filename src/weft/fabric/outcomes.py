"""The outcome of a native wait: a code, and the rank that it concerns, or -1."""

from __future__ import annotations

from weft.errors import Error, PeerLost, Timeout

(
    OK,
    TIMEOUT,
    PEER_LOST,
    PEER_LEFT,
    PEER_FAILED,
    CANCELLED,
    DISAGREE,
    AGAIN,
    WITHDRAWN,
    CORRUPT,
    OUTSIDE,
) = range(11)
"""The same numbers as in native/heap.h."""

Outcome = tuple[int, int]

_GONE = {
    PEER_LOST: "died",
    PEER_LEFT: "left the group",
    PEER_FAILED: "gave up",
    CORRUPT: "has a header or a message that does not fit its memory",
}


BY_ITSELF, BY_A_PEER, BY_ITS_DEADLINE = range(3)
"""Why a rank gave up, as native/heap.h numbers it."""


def why(error: Error) -> int:
    """Why a rank gave up. Peers name the rank that is the cause, and where a deadline has passed,
    their own tells them what is late."""
    if isinstance(error, PeerLost):
        return BY_A_PEER
    return BY_ITS_DEADLINE if isinstance(error, Timeout) else BY_ITSELF


def peer_error(outcome: Outcome, rank: int, where: str, there: str = "") -> PeerLost | None:
    """The error on `rank`, which was `where`, for an outcome that a peer caused; None for other
    outcomes. there: the call in which the peer gave up, if that is known."""
    code, peer = outcome
    if code not in _GONE:
        return None
    did = _GONE[code] + (f" {there}" if there and code == PEER_FAILED else "")
    return PeerLost(f"rank {peer} {did}; rank {rank} was {where}", peer)
