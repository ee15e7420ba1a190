"""Peers that are late, die or disagree: the error comes at the next call or at `weft.check`, and
the device stays usable."""

from __future__ import annotations

import re
import time

import pytest
from device_calls import (
    changes_columns,
    device_fails,
    disagrees,
    killed,
    killed_in_rendezvous,
    killed_unwatched,
    late,
    late_to_a_known_call,
    never_opens,
    suspended,
    too_late,
)


def test_a_late_peer_is_waited_for(loom):
    loom(2).run(late, 0.4)


def test_a_late_peer_of_a_known_call_is_waited_for_by_the_device_alone(loom):
    loom(2).run(late_to_a_known_call)


def test_a_suspended_job_goes_on(spoiled_loom):
    pool = spoiled_loom(2)
    job = pool.start(suspended, 3.0)
    for turn in range(2):
        job.hear(f"calling {turn}")
        time.sleep(0.3)
        pool.suspend(4.0, last=1)
    job.values()


@pytest.mark.parametrize("known", [False, True], ids=["first", "known"])
def test_a_peer_that_is_too_late_is_a_timeout(spoiled_loom, known):
    told = spoiled_loom(2).run(too_late, known, 0.5, 2.0)
    kinds = [[kind for kind, _ in own] for own in told]
    # A first call waits on the host, and raises itself; a known call has returned by then.
    assert kinds[0] == ["" if known else "Timeout", "Timeout", "Timeout", "Timeout"]
    assert "rank 1 to enter the call" in told[0][1][1]
    assert kinds[1][-1] in ("PeerLost", "Timeout")
    assert all("\n" not in text for own in told for _, text in own)


def test_a_peer_that_never_opens_its_device_is_a_timeout(spoiled_loom):
    for told, spent in spoiled_loom(3).run(never_opens, 1.0)[:2]:
        assert told[0] == "Timeout", told
        assert "rank 2" in told[1]
        assert 1.0 <= spent < 20  # far from the deadline of the device itself, a minute


@pytest.mark.parametrize("when", ["first call", "known call", "during", "replay"])
def test_a_dead_peer(spoiled_loom, when):
    job = spoiled_loom(3).start(killed, when)
    outcomes = job.outcomes()
    assert outcomes[2].died
    for outcome in outcomes[:2]:
        assert outcome.error is None, outcome.trace
        told, spent = outcome.value
        # A known call returns; the error comes at `weft.check`, and at every call after that.
        assert told[0][0] == ("" if when in ("known call", "during") else "PeerLost"), told
        assert all(kind == "PeerLost" and "rank 2" in text for kind, text in told[1:]), told
        assert spent < 10


def test_a_dead_peer_is_named_also_if_the_device_fails_before_the_watchdog_looks(spoiled_loom):
    outcomes = spoiled_loom(3).start(killed_unwatched).outcomes()
    assert outcomes[2].died
    for outcome in outcomes[:2]:
        assert outcome.error is None, outcome.trace
        for kind, text in outcome.value:
            assert kind == "PeerLost", outcome.value
            assert "rank 2 died, and the device of rank" in text


@pytest.mark.parametrize("opened", [False, True], ids=["first memory", "more memory"])
def test_a_peer_that_dies_while_its_memory_is_waited_for(spoiled_loom, opened):
    outcomes = spoiled_loom(3).start(killed_in_rendezvous, opened).outcomes()
    assert outcomes[2].died
    for outcome in outcomes[:2]:
        assert outcome.error is None, outcome.trace
        told = outcome.value
        assert all(kind == "PeerLost" and "rank 2" in text for kind, text in told), told
        assert outcome.at - outcomes[2].at < 10


def test_a_device_that_fails(spoiled_loom):
    """Its peers name its rank; its own process is told by a weft.Error, and has no thread that died
    with a traceback."""
    (told, spent), (own, _) = spoiled_loom(2).run(device_fails)
    # Its kernel failed, so what the peer needed of it may have been there already.
    assert told[-1][0] == "PeerLost", told
    assert "rank 1" in told[-1][1]
    assert spent < 10
    # The watchdog sees it, or the call that was being enqueued.
    assert own[-1][0] in ("Error", "PeerLost"), own
    assert re.search("rank 1 (has )?failed in call .*a unit burnt out", own[-1][1]), own


@pytest.mark.parametrize("known", [False, True], ids=["first", "known"])
@pytest.mark.parametrize("how", ["operator", "sizes", "schedule", "refused"])
@pytest.mark.parametrize("world", [2, 3])
def test_a_disagreeing_peer(loom, world, how, known):
    if how == "refused" and known:
        pytest.skip("a refused call is never known")
    # Waits of a call that is not valid are released, so that the detector would report it.
    told = loom(world).pool.run(disagrees, how, known)
    for rank, own in enumerate(told):
        raised = [text for kind, text in own if kind]
        assert raised, f"rank {rank} was told nothing: {told}"
        assert {kind for kind, _ in own if kind} <= {"Mismatch", "Unsupported"}, own
        assert all("\n" not in text for text in raised)


@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_changes_its_columns(loom, first):
    """Whoever comes first, ranks agree on which calls were valid, and equal sizes always are."""
    told = loom(2).pool.run(changes_columns, first)
    valid = [[not text for text in own] for own in told]
    assert valid[0] == valid[1], told
    assert valid[0][1::2] == [True] * 3, told
    if first == 1:
        assert valid[0] == [True] * 6, told
    assert all("WEFT_AGREE=each" in text for own in told for text in own if text)
