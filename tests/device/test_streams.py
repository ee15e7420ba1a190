"""Calls on streams: the host does not wait, memory may be freed at once, groups do not meet."""

from __future__ import annotations

import pytest
import stream_calls as calls


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
