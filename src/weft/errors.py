"""Every error weft raises on purpose. Each carries one sentence: what was wrong, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class Error(Exception):
    """Base of all weft errors, so that `except weft.Error` catches what weft raises on purpose."""


class PeerLost(Error):
    """A rank of the group died or left it. The group is over; the survivors can form a new one."""

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class Timeout(Error):
    """A wait passed its deadline. Says who waited, in which call, and for what."""


class Cancelled(Error):
    """A rank cancelled a collective before it began. Raised on every rank; the group lives on."""


class Mismatch(Error):
    """The ranks of a call disagree. Raised on every rank, before anything moves."""


class Unsupported(Error):
    """The call, name or file is not something weft can do. Says why, and what would work."""


class InvalidPlan(Error):
    """A plan broke a rule that `plan.verify` proves: a bug in a lowering, never in a call."""


def nearest(word: str, known: Iterable[str]) -> str:
    """` (did you mean a or b?)` for a word that is not known, or nothing where none is near."""
    close = difflib.get_close_matches(word, list(known), n=3, cutoff=0.4)
    return f" (did you mean {' or '.join(close)}?)" if close else ""
