"""Bad input is one sentence on every rank; late and lost peers are named, in seconds."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import weft


def refusals():
    """Bad input of one rank, then a good call on the same operator: what each rank heard."""
    from weft.triton import EmbeddingAllToAll, GemmAllToAll, GemvAllReduce, Host

    rank = dist.get_rank()
    host = Host()
    heard = []

    def hear(function, *arguments):
        try:
            function(*arguments)
            heard.append("")
        except weft.Error as error:
            heard.append(f"{type(error).__name__}: {error}")

    gemv = GemvAllReduce(host, 2, 5, torch.float32)
    x, w = torch.ones(2, 3), torch.ones(3, 5)
    hear(gemv, x[:, : 3 - rank], w)
    hear(gemv, x, w.half() if rank else w)
    good = bool((gemv(x, w) == 6).all())
    gemm = GemmAllToAll(host, 4, 5, 3, torch.float32)
    hear(gemm, x, w, [[1 + rank, 1], [1, 1]])
    hear(gemm, torch.ones(6, 3), w, [[3, 3], [3, 3]])
    table = torch.ones(4, 2)
    lookups = EmbeddingAllToAll(host, [table], 2)
    offsets = torch.tensor([0, 1, 2])
    hear(lookups, torch.tensor([0, 4 * rank]), offsets)
    hear(lookups, torch.tensor([0, 1]), torch.tensor([0, 3 - rank, 2]))
    hear(lambda: EmbeddingAllToAll(host, [table, table.half()][: rank + 1], 2))
    hear(lambda: GemvAllReduce(host, 2, 5 + rank, torch.float32))
    good &= bool((lookups(torch.tensor([0, 1]), offsets) == 1).all())
    return good, heard


def test_bad_input_is_one_sentence_on_every_rank(ranks):
    (good, first), (_, second) = ranks(2).run(refusals)
    assert good
    assert first == second
    for said, words in zip(
        first,
        [
            "refused by rank 1: w must have the shape [2, 5], not [3, 5]",
            "refused by rank 1: w is torch.float16, but was said to be torch.float32",
            "splits is ((1, 1), (1, 1)) on rank 0 and ((2, 1), (1, 1)) on rank 1",
            "would receive 6 rows, but was made for up to 4",
            "refused by rank 1: table 0 has 4 rows, but indices go from 0 to 4",
            "refused by rank 0: offsets must begin with 0, never decrease",
            "refused by rank 1: table 1 is torch.float16, but was said to be torch.float32",
            "columns is 5 on rank 0 and 6 on rank 1",
        ],
        strict=True,
    ):
        assert said.startswith("Mismatch: ")
        assert words in said
        assert "\n" not in said


def in_kernel_check_of_indices():
    """A GPU's indices are not read before the launch: the kernel reads nothing for a bad one."""
    from weft.triton import EmbeddingAllToAll, Host

    op = EmbeddingAllToAll(Host(), [torch.ones(4, 2)], 2, grid=1)
    op._check_values = lambda indices, offsets: None
    with pytest.raises(weft.Unsupported) as caught:
        op(torch.tensor([0, -(10**12)]), torch.tensor([0, 1, 2]))
    return str(caught.value)


def test_the_kernel_itself_refuses_an_index(fresh_ranks):
    (said,) = fresh_ranks(1).run(in_kernel_check_of_indices)
    assert said == (
        "index -1000000000000 of table 0 of rank 0 is not below its 4 rows; nothing was read for it"
    )


def stuck(what):
    """Rank 1 stops in the middle of its kernel; what rank 0 says, and after how long."""
    from triton.runtime.interpreter import interpreter_builder

    from weft.triton import GemmAllToAll, Host, Tiles

    # Two tiles for every owner: the second is the work of program 1.
    op = GemmAllToAll(Host(), 64, 16, 16, torch.float32, tiles=Tiles(16, 16, 16), grid=3)
    x, w = torch.ones(64, 16), torch.ones(16, 16)
    op(x, w)
    if what == "sleep":
        weft.configure(deadline=1)
    inner, store = interpreter_builder.set_grid_idx, dist.distributed_c10d._get_default_store()

    def stop(*place):
        if place[0] == 1:
            os._exit(1) if what == "die" else store.wait(["heard"], timedelta(seconds=30))
        inner(*place)

    if dist.get_rank() == 1:
        interpreter_builder.set_grid_idx = stop
    began = time.monotonic()
    try:
        op(x, w)
    except weft.Error as error:
        again = ""
        try:
            op(x, w)
        except weft.Error as second:
            again = str(second)
        store.set("heard", "")
        return type(error).__name__, str(error), time.monotonic() - began, again
    return "", "", time.monotonic() - began, ""


def test_a_rank_that_is_stuck_in_its_kernel_is_named(fresh_ranks):
    kind, said, seconds, again = fresh_ranks(2).outcomes(stuck, "sleep")[0].value
    assert kind == "Timeout"
    assert "for rank 1 to send its tiles of the product" in said
    assert 0.9 < seconds < 10  # the deadline was a second; ours would be twenty
    assert "is over since call 2" in again


def test_a_rank_that_dies_in_its_kernel_is_named(fresh_ranks):
    first, second = fresh_ranks(2).outcomes(stuck, "die")
    assert second.died
    kind, said, seconds, _ = first.value
    assert kind == "PeerLost"
    assert said.startswith("rank 1 died")
    assert seconds < 10


def alone():
    """On plain pointers nobody says that rank 1 will not come; the deadline does."""
    from weft.triton import Pointers
    from weft.triton.checks import KernelCase, gemv_all_reduce

    memory = torch.zeros(2**17, dtype=torch.uint8)
    start = -memory.data_ptr() % 256
    memory = memory[start : start + 2**16]
    other = torch.zeros(2**17, dtype=torch.uint8)
    bases = [memory.data_ptr(), other.data_ptr() + -other.data_ptr() % 256]
    space = Pointers(memory, bases, 0, lambda said: [said, said], deadline=0.3)
    with pytest.raises(weft.Timeout) as caught:
        gemv_all_reduce(space, KernelCase(torch.float32, calls=1))
    return str(caught.value)


def test_a_peer_that_never_comes(ranks):
    (said,) = ranks(1).run(alone)
    assert said.startswith("rank 0 waited 0.3 s in triton.gemv_all_reduce for rank 1 to send its")


def test_engines_need_a_fabric():
    from weft.triton import AllGatherGemm, Pointers

    memory = torch.zeros(2**12, dtype=torch.uint8)
    start = -memory.data_ptr() % 256
    space = Pointers(memory[start:], [memory.data_ptr() + start], 0, lambda said: [said])
    with pytest.raises(weft.Unsupported, match="no copy engines"):
        AllGatherGemm(space, 4, 4, torch.float32)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda t, s: t.GemvAllReduce(s, 129, 4, torch.float32), "129 rows"),
        (lambda t, s: t.GemvAllReduce(s, 1, -4, torch.float32), "columns must be from 0"),
        (lambda t, s: t.GemvAllReduce(s, 1, 4, torch.float64), "not torch.float64"),
        (lambda t, s: t.GemvAllReduce(s, 1, 4, torch.float32, grid=0), "at least one program"),
        (lambda t, s: t.GemvAllReduce(s, 1, 4, torch.float32, tiles=t.Tiles(8)), "power of two"),
        (lambda t, s: t.GemmAllToAll(s, 9**9, 9, 9, torch.float32), "bytes of symmetric memory"),
        (lambda t, s: t.EmbeddingAllToAll(s, [], 4, mode="max"), "sum or mean"),
        (lambda t, s: t.symmetric_memory(64), "needs a GPU"),
    ],
)
def test_what_cannot_be_made(make, words):
    import weft.triton as triton

    memory = torch.zeros(2**12, dtype=torch.uint8)
    start = -memory.data_ptr() % 256
    space = triton.Pointers(memory[start:], [memory.data_ptr() + start], 0, lambda said: [said])
    with pytest.raises(weft.Error, match=words):
        make(triton, space)
