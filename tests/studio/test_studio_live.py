"""Live runs without a browser: what is refused, what is measured, and that nothing is left of a run
that nobody listens to any more."""

from __future__ import annotations

import asyncio
import json
import os
import re
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from weft.errors import Unsupported
from weft.studio.live import OTHER, LiveRuns
from weft.studio.live_case import MOST_SCHEDULES, Limits, LiveCase
from weft.studio.state import State

SMALL = State(m=128, n=128, k=128, world=2, dtype="float32")
LIMITS = Limits(cores=2, memory=4e9, rate=5e10)
HUGE = replace(SMALL, m=1 << 20, n=1 << 16)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (replace(SMALL, world=8), "8 ranks would share 2 cores.*up to 2 ranks"),
        (replace(SMALL, m=8192, n=8192, k=8192), "about .* min here; .* may take 4.0 GB and 30 s"),
        (HUGE, "GB of memory and about"),
        (replace(SMALL, dtype="float8"), "this computer multiplies float64, float32"),
        (replace(SMALL, op="embedding_all_to_all"), "not measured by itself; choose one of all_g"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(state: State, said: str) -> None:
    case = LiveCase(state)
    assert re.search(said, case.refused(LIMITS))
    fits = case.fitting(LIMITS)
    if state.op != SMALL.op:
        assert fits is None
        return
    assert fits is not None
    assert not LiveCase(fits).refused(LIMITS)
    assert fits.m * fits.n * fits.k <= state.m * state.n * state.k


def test_a_case_survives_its_query_and_wrong_ones_are_refused() -> None:
    for case in (
        LiveCase(SMALL),
        LiveCase(replace(SMALL, pinned="adaptive@dma"), "loom", "memory", 7),
    ):
        assert LiveCase.from_query(case.to_query()) == case
    for wrong in ({"where": "moon"}, {"pace": "fast"}, {"rounds": "1000"}, {"rounds": "-1"}):
        with pytest.raises(Unsupported):
            LiveCase.from_query(wrong)


def test_serial_and_the_kept_schedule_are_among_the_few_that_run() -> None:
    kept = replace(SMALL, pinned="hetero-fused-2d@dma")
    names = [one.name for one in LiveCase(kept).schedules(("uniform-fused-1d@cores",))]
    assert names[:3] == ["serial@dma", "hetero-fused-2d@dma", "uniform-fused-1d@cores"]
    assert len(names) == MOST_SCHEDULES
    assert {one.engine for one in LiveCase(kept, "loom").schedules(("serial@cores",))} == {"dma"}


def test_one_run_at_a_time_and_nothing_is_left_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run, from its first rank to its end: another tab is refused, a second run of the same tab
    ends it, and no process and no memory of it stay."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # that of the lock

    async def asked() -> None:
        runs, shared_memory = LiveRuns(), set(os.listdir("/dev/shm"))
        case = LiveCase(replace(SMALL, m=1024, n=1024), rounds=31)
        first = runs.stream("a", case)
        async for message in messages(first):
            assert "progress" in message, message
            if message["text"] == "warming up":  # the ranks are there
                break
        (run,) = runs._running.values()
        group = run.process.pid
        assert len(members(group)) == 1 + case.state.world
        assert [one async for one in messages(runs.stream("b", case))] == [{"error": OTHER}]
        (refused,) = [one async for one in messages(runs.stream("a", LiveCase(HUGE)))]
        assert refused["fits"]["m"] < HUGE.m
        assert members(group) == []
        assert [one async for one in messages(first) if "result" in one or "error" in one] == []
        # Whoever stops listening ends a run, too.
        third = runs.stream("a", case)
        async for _ in third:
            break
        (run,) = runs._running.values()
        await third.aclose()
        await runs.close()
        assert members(run.process.pid) == []
        left = set(os.listdir("/dev/shm")) - shared_memory
        assert [name for name in left if "weft" in name or "loom" in name] == []

    asyncio.run(asked())


async def messages(lines: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    async for line in lines:
        if line.strip():
            yield json.loads(line)


def members(group: int) -> list[str]:
    """The living processes of a group."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            said = file.read_text()
        except OSError:
            continue  # it has ended meanwhile
        state, _, own = said.rpartition(")")[2].split()[:3]
        if int(own) == group and state != "Z":
            found.append(said)
    return found
