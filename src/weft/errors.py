"""The errors that weft raises on purpose. Each has one sentence: what was wrong, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LONGEST = 4000
"""Characters of a message. What a user wrote may be longer, and is quoted in part."""


class Error(Exception):
    """Base class of all errors that weft raises on purpose."""

    def __init__(self, message: str = "") -> None:
        if len(message) > _LONGEST:
            half = _LONGEST // 2
            message = f"{message[:half]} ... {message[-half:]}"
        super().__init__(message)


class PeerLost(Error):
    """A rank of the group died or left it. The group cannot be used any more; the surviving ranks
    can create a new one."""

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class Timeout(Error):
    """A wait passed its deadline. The message names who waited, in which call, and for what."""


class Cancelled(Error):
    """A rank cancelled a collective before it began. Raised on every rank; the group can still be
    used."""


class Mismatch(Error):
    """The arguments of a call differ between ranks. Raised on every rank, before anything moves."""


class Unsupported(Error):
    """weft does not support the call, name or file. The message says why, and what would work."""


class InvalidPlan(Error):
    """A plan breaks a rule that `plan.verify` checks: a bug in a lowering, never in a call."""


def nearest(word: str, known: Iterable[str]) -> str:
    """` (did you mean a or b?)` for an unknown word, or an empty string if no word is near."""
    close = difflib.get_close_matches(word, list(known), n=3, cutoff=0.4)
    return f" (did you mean {' or '.join(close)}?)" if close else ""
