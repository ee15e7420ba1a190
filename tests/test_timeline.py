"""Timelines: what is computed from spans, checked on spans whose answers are plain to see."""

from __future__ import annotations

import random

import pytest

from weft.timeline import COMPUTE, Span, Timeline, covered, percent_of_ideal

#   compute   0--2   3----6
#   engine 1    1------4
#   engine 2             5--7
SPANS = (
    Span(0, COMPUTE, "a", "matmul", 0, 2, num_flops=20),
    Span(0, COMPUTE, "b", "permute", 3, 6, num_bytes=8),
    Span(0, "engine 1", "c", "copy", 1, 4, num_bytes=30),
    Span(0, "engine 2", "d", "copy", 5, 7, num_bytes=20),
    Span(1, COMPUTE, "e", "matmul", 10, 12, num_flops=20),
)


def test_metrics_of_one_rank():
    timeline = Timeline(SPANS)
    assert timeline.compute_seconds(0) == 5
    assert timeline.communication_seconds(0) == 5
    assert timeline.overlap_seconds(0) == 3
    assert timeline.exposed_communication(0) == 2
    assert timeline.matmul_seconds(0) == 2
    assert timeline.communication_seconds(1) == 0
    assert timeline.exposed_communication(1) == 0


def test_extent_lanes_and_parts():
    timeline = Timeline(SPANS, "title")
    assert (timeline.start, timeline.end, timeline.seconds) == (0, 12, 12)
    assert timeline.ranks == [0, 1]
    assert timeline.lanes() == [(0, COMPUTE), (0, "engine 1"), (0, "engine 2"), (1, COMPUTE)]
    assert timeline.of(1).spans == SPANS[4:]
    assert timeline.of(1).shifted().start == 0
    assert timeline.of(1).shifted().seconds == 2
    merged = Timeline.merge([timeline.of(1), timeline.of(0)])
    assert sorted(merged.spans, key=str) == sorted(SPANS, key=str)
    assert merged.title == "title"


def test_an_empty_timeline_has_no_length():
    empty = Timeline(())
    assert (empty.seconds, empty.ranks, empty.lanes()) == (0.0, [], [])
    assert empty.shifted() == empty
    assert empty.compute_seconds(0) == empty.overlap_seconds(0) == 0
    assert Timeline.merge([]) == empty


def test_covered_is_the_length_of_the_union():
    choice = random.Random(0)
    for _ in range(200):
        intervals = []
        for _ in range(choice.randrange(6)):
            start = choice.randrange(20)
            intervals.append((start, start + choice.randrange(8)))
        union = {moment for start, end in intervals for moment in range(start, end)}
        assert covered(intervals) == len(union)


def test_percent_of_ideal():
    assert percent_of_ideal(2.0, 1.0, 1.0, 1.0) == pytest.approx(100)
    assert percent_of_ideal(2.0, 2.0, 1.0, 1.0) == pytest.approx(0)
    assert percent_of_ideal(2.0, 4.0, 1.0, 1.0) == pytest.approx(-50)
    assert percent_of_ideal(3.0, 2.0, 2.0, 1.0) == pytest.approx(100)
    assert percent_of_ideal(3.0, 2.4, 2.0, 1.0) == pytest.approx(50)
    assert percent_of_ideal(1.0, 1.0, 1.0, 0.0) == 100
    assert percent_of_ideal(1.0, 1.5, 1.0, 0.0) == 0
