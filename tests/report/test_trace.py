"""Traces: valid JSON with every span once, in microseconds, that viewers do not drop."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from weft.errors import Unsupported
from weft.report.perfetto import write_trace
from weft.timeline import COMPUTE, Span, Timeline


def read(path: Path) -> list[dict[str, Any]]:
    document = json.loads(path.read_text("utf-8"))
    events: list[dict[str, Any]] = document["traceEvents"]
    return events


def names(events: list[dict[str, Any]], what: str) -> dict[tuple[int, int], str]:
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == what}


def test_every_span_is_there_once_with_its_times(tmp_path: Path, wide_runs: list[Timeline]) -> None:
    events = read(write_trace(tmp_path / "t.json", wide_runs))
    processes, threads = names(events, "process_name"), names(events, "thread_name")
    found = Counter(
        (
            processes[event["pid"], 0],
            threads[event["pid"], event["tid"]],
            event["name"],
            round(event["ts"], 2),
            round(event["ts"] + event["dur"], 2),
        )
        for event in events
        if event["ph"] == "X"
    )
    wanted = Counter(
        (
            f"{timeline.title} · rank {span.rank}",
            span.lane,
            span.task,
            round((span.start - timeline.start) * 1e6, 2),
            round((span.end - timeline.start) * 1e6, 2),
        )
        for timeline in wide_runs
        for span in timeline.spans
    )
    assert found == wanted


def test_a_known_span_in_microseconds_from_the_timelines_start(tmp_path: Path) -> None:
    timeline = Timeline(
        (
            Span(0, COMPUTE, "first", "matmul", 1000.0, 1000.25, num_flops=10**9),
            Span(0, "engine 1", "second", "copy", 1000.1, 1000.2, num_bytes=10**8),
        )
    )
    events = read(write_trace(tmp_path / "t.json", [timeline]))
    first, second = (e for e in events if e["ph"] == "X")
    assert (first["ts"], first["dur"]) == (0.0, 250_000.0)
    assert first["args"] == {"kind": "matmul", "flops": 10**9, "GFLOP/s": 4.0}
    assert (second["ts"], second["dur"]) == (100_000.0, 100_000.0)
    assert second["args"] == {"kind": "copy", "bytes": 10**8, "GB/s": 1.0}
    assert names(events, "process_name") == {(1, 0): "rank 0"}


def test_processes_and_threads_have_names_and_an_order(
    tmp_path: Path, runs: list[Timeline]
) -> None:
    events = read(write_trace(tmp_path / "t.json", runs))
    used = {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    assert used == set(names(events, "thread_name"))
    assert {pid for pid, _ in used} == {pid for pid, _ in names(events, "process_name")}
    assert len({pid for pid, _ in used}) == sum(len(t.ranks) for t in runs)
    order = {(e["pid"], e["tid"]): e["args"]["sort_index"] for e in events if "sort" in e["name"]}
    for (process, thread), lane in names(events, "thread_name").items():
        is_first = order[process, thread] == 1
        assert (lane == COMPUTE) == is_first


def test_engines_come_by_number(tmp_path: Path) -> None:
    spans = tuple(Span(0, f"engine {p}", "c", "copy", 0.0, 1.0) for p in (10, 2, 1))
    events = read(write_trace(tmp_path / "t.json", [Timeline(spans)]))
    assert list(names(events, "thread_name").values()) == ["engine 1", "engine 2", "engine 10"]


def test_slices_of_a_thread_never_overlap(tmp_path: Path) -> None:
    third = 1e-3 / 3
    touching = [Span(0, COMPUTE, "p", "matmul", i * third, (i + 1) * third) for i in range(3000)]
    crossing = [Span(0, "engine 1", "c", "copy", i * 0.1, i * 0.1 + 0.25) for i in range(9)]
    events = read(write_trace(tmp_path / "t.json", [Timeline((*touching, *crossing))]))
    threads: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            threads[event["tid"]].append((event["ts"], event["dur"]))
    assert len(threads) == 1 + 3
    for slices in threads.values():
        reached = -math.inf
        for start, length in sorted(slices):
            assert start >= reached - 1e-6
            reached = start + length


def test_no_timelines_are_a_valid_trace(tmp_path: Path) -> None:
    assert read(write_trace(tmp_path / "t.json", [])) == []
    assert read(write_trace(tmp_path / "t.json", [Timeline(())])) == []


def test_a_failure_leaves_what_was_there_and_nothing_else(
    tmp_path: Path, runs: list[Timeline]
) -> None:
    path = tmp_path / "t.json"
    path.write_text("before")
    broken = Timeline((*runs[0].spans, Span(0, COMPUTE, "t", "matmul", 0.0, math.nan)))
    with pytest.raises(ValueError, match="NaN"):
        write_trace(path, [broken])
    assert path.read_text() == "before"
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]


def test_a_missing_folder_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="cannot write"):
        write_trace(tmp_path / "none" / "t.json", [])
