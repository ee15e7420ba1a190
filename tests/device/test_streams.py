"""Calls on streams: the host does not wait, memory may be freed at once, groups do not meet."""

from __future__ import annotations

import pytest
import stream_calls as calls

import weft
from weft.fabric.device.program import words_of
from weft.plan.matmul_all_reduce import MatmulAllReduce


@pytest.mark.parametrize("mode", ["late", "random"])
def test_two_groups_interleaved(loom, mode):
    loom(3, mode=mode).run(calls.two_groups)


def test_calls_from_side_streams(loom):
    loom(2, mode="late").run(calls.side_streams)


def test_inputs_that_are_freed_right_after_the_call(loom):
    loom(2, mode="late").run(calls.freed_inputs)


def test_results_on_another_stream(loom):
    loom(2, mode="late").run(calls.results_elsewhere)


def test_backward_from_threads_of_autograd(loom):
    loom(2, mode="random").run(calls.backward_twice)


def test_many_calls_ahead_of_a_slow_peer(loom):
    loom(2).run(calls.far_ahead)


def test_programs_in_turn_with_a_slow_rank(loom):
    """Words of one program must not end waits of another."""
    loom(3).run(calls.programs_in_turn)


@pytest.mark.parametrize("schedule", ["adaptive@dma", "hetero-unfused-1d@dma"])
def test_the_host_does_not_wait_in_a_known_call(loom, schedule):
    """A paced link, so that a call takes some 130 ms."""
    for part in loom(2, pace="2MB/s").run(calls.host_blocks, schedule):
        assert part < 0.05


def test_a_word_has_one_poster_in_all_programs():
    """Two peers that post one word in two calls could overtake each other."""
    for schedule in ("serial@dma", "adaptive@dma", "hetero-unfused-1d@dma", "adaptive@direct"):
        plan = MatmulAllReduce.of(3, 12, 5, 7).lower(weft.Schedule.parse(schedule))
        found = words_of(plan)
        assert any(found)
        for own in found:
            assert len(set(own.values())) == len(own)
            posters = {word: plan.tasks[task].rank for (task, _), word in own.items()}
            assert all(word % plan.operation.world == rank for word, rank in posters.items())
