"""`in-kernel` on a device: one persistent kernel takes tiles of chunks that have arrived."""

from __future__ import annotations

import pytest
import torch
from claim_calls import exact, refused, result
from device_calls import killed, replays
from test_device_mutations import ALL, check, sample

pytest.importorskip("triton")


@pytest.mark.parametrize(("world", "mode"), [(2, "late"), (3, "random")])
def test_it_is_exact(loom, world, mode):
    said = loom(world, mode).run(exact)[0]
    assert "in-kernel:3@dma (asked for in-kernel:3@direct)" in said
    assert "by dma" in said


def test_the_order_of_arrival_does_not_matter(loom):
    """To the last bit, on all ranks and however late the chunks come."""
    made = [y for mode in ("eager", "late", "random") for y in loom(3, mode).run(result)]
    made += loom(2, queues=1).run(result)[:1]
    assert all(torch.equal(y, made[0]) for y in made[:9])
    assert torch.equal(made[9], made[0][:48])


def test_three_replays_with_changed_inputs(loom):
    loom(2).run(replays, "all_gather_matmul", "in-kernel:2")


def test_a_dead_peer_ends_the_polling(spoiled_loom):
    outcomes = spoiled_loom(3).start(killed, "during", "in-kernel:2").outcomes()
    assert outcomes[2].died
    for outcome in outcomes[:2]:
        assert outcome.error is None, outcome.trace
        told, spent = outcome.value
        assert told[0][0] == "", told
        assert all(kind == "PeerLost" and "rank 2" in text for kind, text in told[1:]), told
        assert spent < 10


def test_what_has_no_kernel_is_refused(loom):
    for told in loom(2).run(refused):
        assert [kind for kind, _ in told] == ["Unsupported"] * 3
        assert (
            "no kernel of this operator stores into the memory of peers; use adaptive" in told[0][1]
        )
        assert "use in-kernel@dma" in told[1][1]
        assert "not float64; use adaptive" in told[2][1]


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_what_is_left_out_is_found(loom, captured):
    """Also a chunk that is said to have arrived before it has: the kernel logs what it touches at
    the moment it does."""
    ranks = loom(2, deadline=6) if captured else loom(2)
    some = sample("claims")

    def chosen(found):
        return found if ALL else [next(m for m in found if m[1].kind == "arrival"), *some(found)]

    tried = check(ranks, "all_gather_matmul", "in-kernel:2", chosen, captured=captured)
    assert tried["arrival"]
