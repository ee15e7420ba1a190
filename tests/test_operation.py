"""Operations: splits, the registry, and what an operation says of itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft import Unsupported, operation
from weft.plan.all_gather_matmul import AllGatherMatmul

sizes = st.integers(0, 1000)
parts = st.integers(1, 64)


@given(sizes, parts)
def test_split_is_tensor_split(total, count):
    expected = [len(part) for part in torch.arange(total).tensor_split(count)]
    assert list(operation.split(total, count)) == expected


@given(sizes, parts)
def test_even_splits_of_torch_are_recognised(total, count):
    assert operation.is_split([len(p) for p in torch.arange(total).tensor_split(count)])
    chunks = [len(p) for p in torch.arange(total).chunk(count)] if total else []
    assert operation.is_split(chunks + [0] * (count - len(chunks)))


@pytest.mark.parametrize("uneven", [(1, 3), (0, 1), (4, 0, 4), (2, 3, 3), (5, 3)])
def test_other_cuts_are_not(uneven):
    assert not operation.is_split(uneven)


def test_operations_are_found_by_name():
    assert "all_gather_matmul" in operation.names()
    assert operation.find("all_gather_matmul") is AllGatherMatmul
    with pytest.raises(Unsupported, match="did you mean all_gather_matmul"):
        operation.find("all_gather_matmull")


def test_flops_and_bytes():
    op = AllGatherMatmul((3, 2), ((5, 7), (5, 7)), 11, "bfloat16")
    assert (op.world, op.m, op.offsets) == (2, 5, (0, 3))
    assert op.num_flops(0) == 2 * 5 * 12 * 11
    assert op.num_bytes(0, 1) == 3 * 11 * 2
    assert op.num_bytes(1, 0) == 2 * 11 * 2
    assert op.num_bytes(1, 1) == 0
    alone = op.compute_only()
    assert alone.world == 1
    assert alone.num_flops(0) == op.num_flops(0)
    assert "5x5+7x11 bfloat16" in op.label
