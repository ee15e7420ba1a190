"""The errors that weft raises on purpose. Each has one sentence: what was wrong, and what to do."""

from __future__ import annotations

import difflib
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

_LONGEST = 4000
"""Characters of a message. What a user wrote may be longer, and is quoted in part."""


class Error(Exception):
    """Base class of all errors that weft raises on purpose."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*map(_on_one_line, arguments))


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


class RankFailed(Error):
    """A function that `weft.launch` runs raised an exception on a rank. `rank` is the number of the
    rank, `trace` the traceback there."""

    def __init__(self, message: str, rank: int = -1, trace: str = "") -> None:
        super().__init__()
        self.args = (_shortened(message),)  # of the user's exception, in as many lines as it had
        self.rank = rank
        self.trace = trace

    def __reduce__(self) -> tuple[type[RankFailed], tuple[str, int, str]]:
        return type(self), (str(self.args[0]), self.rank, self.trace)

    def __str__(self) -> str:
        return f"rank {self.rank} raised {self.args[0]}\n\n{self.trace}".rstrip()


def interrupted_by(interrupt: BaseException, rank: int) -> Error:
    """Why a group is over if an exception that is not weft's ended a call on a rank."""
    return Error(f"rank {rank} was interrupted by {type(interrupt).__name__}")


class InvalidPlan(Error):
    """A plan breaks a rule that `plan.verify` checks: a bug in a lowering, never in a call."""


def _on_one_line(message: object) -> object:
    message = _shortened(message)
    return printable(message) if isinstance(message, str) else message


def printable(text: str, kept: str = "") -> str:
    """The text with escapes for what a file or a peer may have put into it: ends of lines, codes
    that steer a terminal, halves of characters. kept: such characters that stay."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in kept else repr(c)[1:-1] for c in text)


def signal_name(number: int) -> str:
    """The name of a signal, also of one for real-time use, which Python does not name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"


def _shortened(message: object) -> object:
    if not isinstance(message, str) or len(message) <= _LONGEST:
        return message
    half = _LONGEST // 2
    return f"{message[:half]} ... {message[-half:]}"


def nearest(word: str, known: Iterable[str]) -> str:
    """` (did you mean a or b?)` for an unknown word, or an empty string if no word is near."""
    close = difflib.get_close_matches(word, list(known), n=3, cutoff=0.4)
    return f" (did you mean {' or '.join(close)}?)" if close else ""


class Stopped(KeyboardInterrupt):
    """Ctrl-C during long work. so_far: what had been finished, in the form of the whole result."""

    def __init__(self, so_far: object) -> None:
        super().__init__("stopped")
        self.so_far = so_far


@contextmanager
def keeping(so_far: Callable[[], object]) -> Iterator[None]:
    """Makes Ctrl-C carry what was finished until then; nothing if `so_far` gives None."""
    try:
        yield
    except Stopped:
        raise
    except KeyboardInterrupt:
        found = so_far()
        if found is None:
            raise
        raise Stopped(found) from None
