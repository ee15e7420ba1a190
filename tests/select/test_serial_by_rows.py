"""An all-reduce of few rows is serial where chunks would read a large weight again."""

from __future__ import annotations

import pytest

from weft.fabric import Link
from weft.plan.matmul_all_reduce import MatmulAllReduce
from weft.plan.matmul_reduce_scatter import MatmulReduceScatter
from weft.select.fixed import serial_by_rows


@pytest.mark.parametrize(
    ("m", "n", "k", "link", "serial"),
    [
        (33, 2048, 1024, "memory", True),
        (256, 2048, 1024, "memory", True),
        (257, 2048, 1024, "memory", False),  # many rows: products hide what they send
        (64, 2048, 100, "memory", False),  # more is sent than read
        (64, 128, 256, "memory", False),  # the weight stays in a cache
        (64, 2048, 1024, "0.5GB/s", False),  # there is time to hide
    ],
)
def test_few_rows(m, n, k, link, serial):
    operation = MatmulAllReduce((m // 2, m - m // 2), n, (k, k), "float32")
    choice = serial_by_rows(Link.parse(link), operation)
    assert (choice is not None) == serial
    assert choice is None or (choice.schedule.serial and f"{m} rows" in choice.why)
    scattered = MatmulReduceScatter(operation.rows, n, (k, k), "float32")
    assert serial_by_rows(Link.parse(link), scattered) is None
