"""The fixed rules by which an all-reduce of few and of some more rows is chosen."""

from __future__ import annotations

import pytest

from weft.fabric import Capabilities, Link
from weft.plan.matmul_all_reduce import MatmulAllReduce
from weft.plan.matmul_reduce_scatter import MatmulReduceScatter
from weft.select.fixed import fixed, fused

HOST = Capabilities("host", direct=True, adaptive=True, in_kernel=True)


@pytest.mark.parametrize(
    ("m", "n", "dtype", "link", "chosen"),
    [
        (32, 2048, "float32", "memory", "in-kernel@direct"),
        (33, 2048, "float32", "memory", "in-kernel:1@direct"),
        (256, 2048, "float32", "memory", "in-kernel:1@direct"),
        (257, 2048, "float32", "memory", None),  # many rows: products hide what they send
        (64, 100, "float32", "memory", None),  # the columns of an owner are too few for a GEMM
        (64, 2048, "bfloat16", "memory", None),  # native sums of products take float32
        (64, 2048, "float32", "0.5GB/s", None),  # there is time to hide
    ],
)
def test_rows_of_an_all_reduce(m, n, dtype, link, chosen):
    operation = MatmulAllReduce((m // 2, m - m // 2), n, (1024, 1024), dtype)
    choice = fused(HOST, Link.parse(link), operation)
    assert (None if choice is None else str(choice.schedule)) == chosen
    assert choice is None or f"{m} rows" in choice.why
    assert fused(Capabilities("flat"), Link.parse(link), operation) is None
    assert fixed(HOST, operation) is None  # the guard compares it with serial
    scattered = MatmulReduceScatter(operation.rows, n, (1024, 1024), dtype)
    assert fused(HOST, Link.parse(link), scattered) is None
