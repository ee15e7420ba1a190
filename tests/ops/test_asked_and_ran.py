"""`weft.explain()` names the schedule that was asked for and the one that ran, on every fabric."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from fabrics import FABRICS

import weft

FABRICS_OF_TWO = [(name, min(w for w in FABRICS[name].worlds if w > 1)) for name in FABRICS]


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, device=os.environ.get("WEFT_TEST_DEVICE") or "cpu")


def few_rows() -> tuple[str, str, str, str]:
    """A call of few rows that asks for adaptive; between machines auto would not overlap it."""
    weft.all_gather_matmul(ones(3, 4), ones(4, 2), schedule="adaptive@dma")
    said = weft.explain()
    return said.fabric, said.asked, said.schedule, said.why


def gradient() -> tuple[str, str, str]:
    """The gradient of w cannot be adaptive: its sums would follow the order of arrival."""
    x, w = ones(64, 4).requires_grad_(), ones(4, 2).requires_grad_()
    weft.all_gather_matmul(x, w, schedule="adaptive@dma").sum().backward()
    assert torch.equal(w.grad.cpu(), torch.full((4, 2), 64.0 * dist.get_world_size()))
    said = weft.explain()
    assert said.operation.startswith("gather_contract")
    assert said.asked in str(said)
    return said.asked, said.schedule, said.why


def chosen() -> tuple[str, str, str]:
    weft.all_gather_matmul(ones(3, 4), ones(4, 2))
    said = weft.explain()
    return said.asked, said.schedule, said.why


@pytest.mark.parametrize(("name", "world"), FABRICS_OF_TWO)
def test_what_was_asked_for_runs(pools, name, world):
    for fabric, asked, schedule, why in FABRICS[name].pool(pools, world).run(few_rows):
        assert fabric == (name if name in ("host", "loom") else "group")
        assert asked == "adaptive@dma"
        assert weft.Schedule.parse(schedule).fusion == "adaptive"
        assert why == "asked for"


@pytest.mark.parametrize(("name", "world"), FABRICS_OF_TWO)
def test_a_gradient_that_cannot_be_adaptive_says_so(pools, name, world):
    for asked, schedule, why in FABRICS[name].pool(pools, world).run(gradient):
        assert (asked, schedule) == ("adaptive@dma", "hetero-unfused-1d@dma")
        assert "the forward call asked for adaptive@dma" in why
        assert "the order of sums would depend on which rows arrive first" in why


@pytest.mark.parametrize(("name", "world"), FABRICS_OF_TWO)
def test_a_choice_is_told_from_a_wish(pools, name, world):
    found = FABRICS[name].pool(pools, world).run(chosen)
    assert len(set(found)) == 1, "all ranks run what rank 0 chose"
    asked, schedule, why = found[0]
    assert asked == "auto"
    if name != "host":
        assert schedule == "serial@dma"
        assert "rows are too few to cut" in why
