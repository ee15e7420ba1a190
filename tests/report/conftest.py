"""Timelines to draw: runs as they could be, about 100 ms long, made without any randomness."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from weft.timeline import COMPUTE, Span, Timeline

GEMM = 0.050
LINK = 0.050
NUM_FLOPS = 8_589_934_592
NUM_BYTES = 8_388_608


def serial(world: int = 2) -> Timeline:
    """Everything arrives, then one GEMM."""
    spans = []
    for rank in range(world):
        for peer in (p for p in range(world) if p != rank):
            spans.append(_copy(rank, peer, "shard", 0.0, LINK, NUM_BYTES))
        spans.append(_wait(rank, 0.0, LINK))
        spans.append(_matmul(rank, "all rows", LINK + 0.0004, LINK + 0.0004 + GEMM, NUM_FLOPS))
    return Timeline(tuple(spans), "serial@dma")


def shard_p2p(world: int = 2) -> Timeline:
    """One peer at a time, the local shard first."""
    spans = []
    piece = GEMM / world
    slice_ = LINK * 0.9
    for rank in range(world):
        spans.append(_matmul(rank, "shard local", 0.0002, piece * 1.03, NUM_FLOPS // world))
        free = piece * 1.03
        for step in range(1, world):
            peer = (rank + step) % world
            spans.append(_copy(rank, peer, "shard", slice_ * (step - 1), slice_ * step, NUM_BYTES))
            start = max(free, slice_ * step)
            spans.append(_wait(rank, free, start))
            free = start + piece * 1.05
            spans.append(_matmul(rank, f"shard {peer}", start, free, NUM_FLOPS // world))
    return Timeline(tuple(spans), "shard-p2p@dma")


def fused(world: int = 2, steps: int = 4) -> Timeline:
    """All peers in every step; rows are permuted together and multiplied as one GEMM."""
    spans = []
    piece = GEMM / steps
    for rank in range(world):
        free = 0.0
        for step in range(steps):
            begin, end = LINK * step / steps, LINK * (step + 1) / steps
            for peer in (p for p in range(world) if p != rank):
                spans.append(_copy(rank, peer, f"chunk {step}", begin, end, NUM_BYTES // steps))
            start = max(free, end)
            spans.append(_wait(rank, free, start))
            spans.append(Span(rank, COMPUTE, f"gather {step}", "permute", start, start + 0.0018))
            free = start + 0.0018 + piece * 1.08
            spans.append(_matmul(rank, f"step {step}", start + 0.0018, free, NUM_FLOPS // steps))
    return Timeline(tuple(spans), "uniform-fused-1d@dma")


def adaptive(world: int = 2, chunks: int = 8) -> Timeline:
    """The local shard, then whatever has arrived."""
    spans = []
    for rank in range(world):
        for chunk in range(chunks):
            for peer in (p for p in range(world) if p != rank):
                begin, end = LINK * chunk / chunks, LINK * (chunk + 1) / chunks
                spans.append(_copy(rank, peer, f"chunk {chunk}", begin, end, NUM_BYTES // chunks))
        free = GEMM / world
        spans.append(_matmul(rank, "shard local", 0.0, free, NUM_FLOPS // world))
        rest, done = GEMM * (world - 1) / world, 0
        while done < chunks:
            start = max(free, LINK * (done + 1) / chunks)
            ready = min(chunks, int(start / LINK * chunks + 1e-9))
            free = start + rest * (ready - done) / chunks * 1.01
            label = f"chunks {done}..{ready - 1}"
            flops = NUM_FLOPS * (ready - done) // chunks
            spans.append(_matmul(rank, label, start, free, flops))
            done = ready
    return Timeline(tuple(spans), "adaptive@dma")


def many_pieces(num_spans: int, world: int = 2, gap: float = 0.0) -> Timeline:
    """A compute lane of very many short matmuls, each followed by a gap of that share."""
    each = 0.1 / num_spans
    return Timeline(
        tuple(
            _matmul(rank, f"piece {i}", i * each, (i + 1 - gap) * each, 1000)
            for rank in range(world)
            for i in range(num_spans)
        ),
        f"{num_spans} pieces",
    )


def _matmul(rank: int, task: str, start: float, end: float, num_flops: int) -> Span:
    return Span(rank, COMPUTE, task, "matmul", start, end, num_flops=num_flops)


def _wait(rank: int, start: float, end: float) -> Span:
    return Span(rank, COMPUTE, "wait", "wait", start, max(end, start))


def _copy(rank: int, peer: int, task: str, start: float, end: float, num_bytes: int) -> Span:
    return Span(rank, f"engine {peer}", f"{task} of {peer}", "copy", start, end, num_bytes)


def _later(timeline: Timeline, by: float = 1024.0) -> Timeline:
    moved = (replace(s, start=s.start + by, end=s.end + by) for s in timeline.spans)
    return replace(timeline, spans=tuple(moved))


@pytest.fixture
def runs() -> list[Timeline]:
    """Four schedules on two ranks, at times as a clock gives them."""
    return [_later(t) for t in (serial(), shard_p2p(), fused(), adaptive())]


@pytest.fixture
def wide_runs() -> list[Timeline]:
    """Four schedules on eight ranks."""
    return [_later(t) for t in (serial(8), shard_p2p(8), fused(8, 8), adaptive(8, 8))]


@pytest.fixture
def pieces() -> Callable[..., Timeline]:
    """Makes a timeline of very many short spans."""
    return many_pieces
