"""A message is one sentence on one line, whatever it quotes."""

from __future__ import annotations

import pickle

from weft import Error, Mismatch, PeerLost
from weft.errors import RankFailed


def test_what_is_quoted_cannot_break_the_line_or_steer_the_terminal() -> None:
    error = Mismatch("unknown key a\nb\x1b[2J\udc80 in größe.toml")
    assert str(error) == r"unknown key a\nb\x1b[2J\udc80 in größe.toml"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert PeerLost("rank 1\tdied", 1).rank == 1
    assert Error("one", 2).args == ("one", 2)


def test_what_a_rank_raised_keeps_its_lines() -> None:
    error = RankFailed("AssertionError: not equal\nat 3", 1, "Traceback\n  here")
    kept = pickle.loads(pickle.dumps(error))
    assert str(kept) == "rank 1 raised AssertionError: not equal\nat 3\n\nTraceback\n  here"


def test_a_message_of_any_length_can_be_read() -> None:
    assert len(str(Error("x" * 200_000))) < 5000
