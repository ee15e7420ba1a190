"""Calls in graphs: captured once, replayed with other inputs, refused where it cannot be."""

from __future__ import annotations

import pytest
from device_calls import lone_capture, replays, two_in_one_graph, unknown_capture
from operators import OPERATORS

SCHEDULES = dict.fromkeys(OPERATORS, ("adaptive@dma", "uniform-fused-1d"))
SCHEDULES["embedding_all_to_all"] = ("serial@dma",)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("world", [2, 3])
def test_three_replays_with_other_inputs(loom, world, name):
    for schedule in SCHEDULES[name][: 4 - world]:
        loom(world, mode="late").run(replays, name, schedule)


@pytest.mark.parametrize("mode", ["eager", "random"])
def test_replays_without_waiting_between_them(loom, mode):
    loom(3, mode=mode).run(replays, "matmul_all_reduce", "adaptive@direct", eager=False)


def test_two_calls_in_one_graph(loom):
    loom(3, mode="late").run(two_in_one_graph)


def test_a_capture_without_a_call_before_is_refused(loom):
    told = loom(2).run(unknown_capture)
    for kind, text in told:
        assert kind == "Unsupported"
        assert "call it once before you capture it" in text
        assert "\n" not in text


def test_a_capture_of_one_rank_is_a_mismatch(loom):
    told = loom(2).pool.run(lone_capture)
    for own in told:
        assert "Mismatch" in [kind for kind, _ in own], told
        assert {kind for kind, _ in own} <= {"", "Mismatch"}
