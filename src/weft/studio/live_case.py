"""What a live run measures: the case that is asked about, on this computer, and whether it fits."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import parse_qsl

import torch

from weft.dtype import ITEM_BYTES, ON_HOST
from weft.errors import Unsupported
from weft.loom.build import library_path, why_not
from weft.measure.arms import measurable
from weft.measure.link_spec import LinkSpec
from weft.measure.measurement import RECORDED, WARM_UP
from weft.schedule import Schedule
from weft.select.guard import MOST_CALLS
from weft.studio.answers import FIRST_SHOWN
from weft.studio.state import SHARED_SIZE, State

PLACES = ("host", "loom")
PACES = ("balanced", "0.5x", "2x", "memory")
ROUNDS = (7, 15, 31)
MOST_SCHEDULES = 5
"""Schedules of a live run, serial among them; `auto` is one more."""
MOST_SECONDS = 30.0
LEAST_SIZE = 64
_RANK_BYTES = 400 << 20
"""What a process takes that has imported torch."""
_PROBE = 0.15
"""Seconds in which the rate of products is measured."""
_SLOW_LINK = 1e9
"""Bytes per second at which ranks surely pass bytes through memory."""


@dataclass(frozen=True)
class Limits:
    """What this computer has for a live run. rate: multiplications and additions per second of one
    core, with the dtype that is asked for."""

    cores: int
    memory: float
    rate: float
    seconds: float = MOST_SECONDS

    @property
    def ranks(self) -> int:
        return max(2, self.cores)


@dataclass(frozen=True)
class LiveCase:
    """One live run. where: `host` or `loom`. pace: of the links, as `weft run --link` takes it."""

    state: State
    where: str = "host"
    pace: str = "balanced"
    rounds: int = 15

    def __post_init__(self) -> None:
        if self.where not in PLACES:
            raise Unsupported(f"a live run is on one of {', '.join(PLACES)}, not {self.where!r}")
        if self.pace not in PACES:
            raise Unsupported(f"links are one of {', '.join(PACES)}, not {self.pace!r}")
        if self.rounds not in ROUNDS:
            raise Unsupported(f"rounds are one of {', '.join(map(str, ROUNDS))}")

    @classmethod
    def from_query(cls, query: Mapping[str, str]) -> LiveCase:
        """The case of a query: a state, and `where`, `pace` and `rounds`."""
        rest = dict(query)
        where, pace = rest.pop("where", "host"), rest.pop("pace", "balanced")
        rounds = rest.pop("rounds", "15")
        if not rounds.isdecimal() or len(rounds) > 3:
            raise Unsupported(f"rounds are a number, not {rounds[:20]!r}")
        return cls(State.from_query(rest), where, pace, int(rounds))

    def to_query(self) -> dict[str, str]:
        """What `from_query` reads."""
        rest = {"where": self.where, "pace": self.pace, "rounds": str(self.rounds)}
        return dict(parse_qsl(self.state.to_query())) | rest

    @property
    def link(self) -> LinkSpec:
        return LinkSpec.parse(self.pace)

    def schedules(self, wanted: tuple[str, ...] = ()) -> list[Schedule]:
        """Serial, the schedule that is kept, those in `wanted`, and some of each kind."""
        names = ["serial@dma", *((self.state.pinned,) if self.state.pinned else ()), *wanted]
        chosen = dict.fromkeys(map(Schedule.parse, [*names, *FIRST_SHOWN]))
        possible = set(Schedule.space(self.state.operation()))
        if self.where == "loom":  # it gives a speed to the copies of engines only
            possible = {s for s in possible if s.fusion != "kernel" and s.engine == "dma"}
        return [one for one in chosen if one in possible][:MOST_SCHEDULES]

    def num_bytes(self) -> float:
        """The memory of all ranks, estimated from above: inputs, outputs and staged copies."""
        m, n, k = self._of_a_rank()
        parts = (m * k, k * n, m * n)
        item = ITEM_BYTES[self.state.dtype]
        # Random inputs are made in float32, one at a time.
        return self.state.world * (3.0 * item * sum(parts) + 4.0 * max(parts) + _RANK_BYTES)

    def seconds(self, limits: Limits) -> float:
        """About how long the calls take, without the start of the ranks."""
        state = self.state
        busy = min(state.world, limits.cores)
        compute = 2.0 * state.m * state.n * state.k / (limits.rate * busy)
        if self.pace == "memory":
            m, n, k = self._of_a_rank()
            moved = max(m * k, m * n) * ITEM_BYTES[state.dtype] / _SLOW_LINK
        else:
            moved = compute * (self.link.multiple or 1.0)
        arms = len(self.schedules()) + 3  # auto, compute alone, communication alone
        return (arms * (self.rounds + WARM_UP + RECORDED) + MOST_CALLS) * (compute + moved)

    def refused(self, limits: Limits) -> str:
        """Why this case is not run, in one sentence that says what is allowed; empty if it is."""
        state = self.state
        if state.op not in measurable():
            return f"{state.op} is not measured by itself; choose one of {', '.join(measurable())}"
        if state.dtype not in ON_HOST:
            return f"this computer multiplies {', '.join(ON_HOST)}, not {state.dtype}"
        if self.where == "loom" and not has_loom():
            return f"loom cannot run here: {why_not() or 'it is not built; `weft loom build` does'}"
        if state.world > limits.ranks:
            return (
                f"{state.world} ranks would share {limits.cores} cores, and nothing could overlap; "
                f"a live run takes up to {limits.ranks} ranks here"
            )
        memory, seconds = self.num_bytes(), self.seconds(limits)
        wants = []
        if memory > limits.memory:
            wants.append(f"{_size(memory)} of memory")
        if seconds > limits.seconds:
            wants.append(f"about {_time(seconds)}")
        if not wants:
            return ""
        return (
            f"{state.m} x {state.n} x {state.k} would take {' and '.join(wants)} here; a live run "
            f"may take {_size(limits.memory)} and {_time(limits.seconds)}"
        )

    def fitting(self, limits: Limits) -> State | None:
        """The nearest state that fits: fewer ranks, and the longest size halved as often as needed.
        None if there is none."""
        state = self.state
        if state.op not in measurable() or (self.where == "loom" and not has_loom()):
            return None
        dtype = state.dtype if state.dtype in ON_HOST else "float32"
        state = replace(state, world=min(state.world, limits.ranks), dtype=dtype)
        while replace(self, state=state).refused(limits):
            m, n, k = state.m, state.n, state.k
            longest = max(m, n, k)
            if longest <= LEAST_SIZE:
                return None
            if longest == m:
                state = replace(state, m=m // 2)
            elif longest == n:
                state = replace(state, n=n // 2)
            else:
                state = replace(state, k=k // 2)
        return state

    def _of_a_rank(self) -> tuple[int, int, int]:
        state = self.state
        sizes = {"m": state.m, "n": state.n, "k": state.k}
        axis = SHARED_SIZE[state.op]
        sizes[axis] = -(-sizes[axis] // state.world)
        return sizes["m"], sizes["n"], sizes["k"]


def has_loom() -> bool:
    """Whether the emulated device is built here."""
    return not why_not() and library_path().exists()


def limits_here(dtype: str) -> Limits:
    """The limits of this computer: half of the memory that is free, and a measured rate."""
    return Limits(len(os.sched_getaffinity(0)), 0.5 * _free_memory(), _rate(dtype))


def _rate(dtype: str) -> float:
    """From small products during some time, so that other programs count: some dtypes are far
    slower than others on a CPU."""
    if dtype not in ON_HOST:
        return 1e9  # refused before it matters
    size = 256
    a = torch.ones(size, size, dtype=getattr(torch, dtype))
    out = torch.empty_like(a)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        torch.mm(a, a, out=out)
        calls, start = 0, time.perf_counter()
        while (seconds := time.perf_counter() - start) < _PROBE:
            torch.mm(a, a, out=out)
            calls += 1
    finally:
        torch.set_num_threads(threads)
    return 2.0 * size**3 * max(calls, 1) / seconds


def _free_memory() -> float:
    """Bytes that can be had without swapping, also within a container."""
    found = [float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))]
    for line in _text("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            found = [float(line.split()[1]) * 1024.0]
    most, used = (_text(f"/sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    if most.isdecimal() and used.isdecimal():
        found.append(float(most) - float(used))
    return max(0.0, min(found))


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB"


def _time(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.0f} h"
