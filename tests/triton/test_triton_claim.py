"""The kernel that claims tiles of what has arrived: any order gives the same bits."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch

pytest.importorskip("triton", reason="weft.triton needs Triton")

from weft.triton import interpreting
from weft.triton.kernels.all_gather_gemm import all_gather_gemm
from weft.triton.kernels.all_gather_gemm_claim import all_gather_gemm_claim

ROWS, K, N, BLOCK = 40, 24, 20, 16
CHUNKS = [(0, 10, 0), (10, 7, 1), (17, 3, 1), (20, 5, 2), (25, 15, 2)]
"""First row, rows and rank; rank 0 is this one."""


def arguments(gathered, shard, w, counters, epoch=1):
    y = torch.full((ROWS, N), float("nan"))
    table = [(first, rows, rank, i) for i, (first, rows, rank) in enumerate(CHUNKS)]
    return y, {
        "shard": shard,
        "gathered": gathered,
        "w": w,
        "y": y,
        "chunks": torch.tensor(table, dtype=torch.int32),
        "counters": counters,
        "status": torch.zeros(8, dtype=torch.int64),
        "num_chunks": len(CHUNKS),
        "me": 0,
        "shard_first": 0,
        "N": N,
        "K": K,
        "shard_stride": K,
        "gathered_stride": K,
        "w_stride_k": N,
        "w_stride_n": 1,
        "counter_stride": 1,
        "epoch": epoch,
        "spins": 1 << 30,
        "BLOCK_M": BLOCK,
        "BLOCK_N": BLOCK,
        "BLOCK_K": BLOCK,
        "PRECISION": "ieee",
    }


def values():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, K, generator=generator), torch.randn(K, N, generator=generator)


def in_expected_order(x, w):
    y, given = arguments(x, x[:10].contiguous(), w, torch.ones(5, dtype=torch.int64))
    all_gather_gemm.interpreted[(3,)](**given)
    return y


@pytest.mark.parametrize("seed", range(6))
def test_chunks_that_arrive_in_any_order(seed):
    """Rows are not there until their counter is set: a tile that is read early would be NaN."""
    x, w = values()
    gathered = torch.full((ROWS, K), float("nan"))
    counters, claims = torch.zeros(5, dtype=torch.int64), torch.zeros(6, dtype=torch.int32)
    y, given = arguments(gathered, x[:10].contiguous(), w, counters)
    order, dice = [1, 2, 3, 4], random.Random(seed)
    dice.shuffle(order)
    made = []

    def engine():
        for chunk in order:
            time.sleep(dice.random() * 0.01)
            first, rows, _ = CHUNKS[chunk]
            gathered[first : first + rows] = x[first : first + rows]
            counters[chunk] = 1
            made.append(bool(torch.isnan(y).any()))

    thread = threading.Thread(target=engine)
    with interpreting.watched(lambda: True):
        thread.start()
        all_gather_gemm_claim.interpreted[(3,)](**given, claims=claims)
        thread.join()
    assert torch.equal(y, in_expected_order(x, w))
    assert made[0]  # it ran while chunks arrived
    tiles = [-(-rows // BLOCK) * -(-N // BLOCK) for _, rows, _ in CHUNKS]
    assert claims[:5].tolist() == tiles  # each was taken once; nobody asked for one too many
    assert given["status"].tolist() == [0] * 8


def test_a_chunk_that_never_arrives():
    x, w = values()
    counters, claims = torch.ones(5, dtype=torch.int64), torch.zeros(6, dtype=torch.int32)
    counters[3] = 0
    y, given = arguments(x, x[:10].contiguous(), w, counters)
    with interpreting.watched(lambda: False):
        all_gather_gemm_claim.interpreted[(2,)](**given, claims=claims)
    code, rank, *_ = given["status"].tolist()
    assert (code, rank) == (1, 2)
    missing = torch.zeros(ROWS, dtype=torch.bool)
    missing[20:25] = True
    assert torch.isnan(y).any(1).equal(missing)  # all else is made
