"""The operators against plain code: `schedule="auto"` beside `torch.mm` and a collective, for few
rows and many. The caller who puts in a weft operator must not lose by it, whatever the size."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from weft.benchmarks import Check, Result, part
from weft.errors import keeping
from weft.fabric import of
from weft.measure.launch import Report, launch
from weft.measure.measurement import interleaved, timed
from weft.measure.plain_arms import NAMES, plain_arms
from weft.run import session as sessions
from weft.run.explain import explain_plan
from weft.select import auto
from weft.select.decision import AUTO
from weft.select.guard import CALLS

WORLD, N, K = 2, 1024, 1024
ROWS = (1, 2, 8, 33, 64, 128, 256, 1024, 4096)
LAYOUTS = ("w", "w.t()")
"""[K, N] with contiguous rows, and the transpose of a contiguous [N, K]."""
SAMPLE = 0.006
"""The seconds of one sample, about: as many calls as fit, so that the common start does not
matter."""
REPEAT, FEW_REPEAT, LONG = 13, 5, 0.01
"""The number of rounds, and the same if a call takes longer than LONG seconds."""
MOST = 1.05
"""The most that a call may take, in times of the faster of the plain compositions."""
QUICK_NAMES, QUICK_ROWS = ("all_gather_matmul", "matmul_all_reduce"), (2, 64)
SERIAL, GLOO, WEFT = "serial", "mm + gloo", "mm + weft"
HEADERS = ("operator", "w", "M", "auto is", "auto/plain", "middle half", "serial/plain", "plain is")


@dataclass(frozen=True)
class PlainCase:
    """One case: what `auto` chose, the faster plain composition, and ratios to it in each round."""

    name: str
    layout: str
    m: int
    chose: str
    plain: str
    auto: Sequence[float]
    serial: Sequence[float]

    @property
    def ratio(self) -> float:
        return statistics.median(self.auto)


def run(report: Report) -> Result:
    """Each operator on 2 ranks of one thread, fp32, N = K = 1024, at memory speed. M is the number
    of rows in all, or on every rank for all-to-all. `auto` has settled before it is measured."""
    found: list[PlainCase] = []
    with keeping(lambda: _result(found) if found else None):
        for number, name in enumerate(NAMES):
            progress = part(report, number, len(NAMES))
            found += launch(WORLD, _measure, name, ROWS, LAYOUTS, report=progress)[0]
    return _result(found)


def quick(report: Report) -> Result:
    """Two operators with few rows and one layout."""
    found: list[PlainCase] = []
    for number, name in enumerate(QUICK_NAMES):
        progress = part(report, number, len(QUICK_NAMES))
        found += launch(WORLD, _measure, name, QUICK_ROWS, LAYOUTS[1:], report=progress)[0]
    return _result(found)


def _result(found: Sequence[PlainCase]) -> Result:
    checks = []
    for name in dict.fromkeys(one.name for one in found):
        worst = max((one for one in found if one.name == name), key=lambda one: one.ratio)
        case = f"{name}, worst of all M ({worst.m}, {worst.layout})"
        checks.append(Check(f"{case}: auto / plain", worst.ratio, f"<= {MOST}"))
    return Result(HEADERS, [_row(one) for one in found], checks)


def _row(found: PlainCase) -> list[str | float | int | None]:
    low, _, high = statistics.quantiles(found.auto, n=4)
    auto, serial = f"{found.ratio:.2f}x", f"{statistics.median(found.serial):.2f}x"
    half = f"{low:.2f}-{high:.2f}"
    case: list[str | float | int | None] = [found.name, found.layout, found.m]
    return [*case, found.chose, auto, half, serial, found.plain]


def _measure(
    report: Report, name: str, all_rows: Sequence[int], layouts: Sequence[str]
) -> list[PlainCase]:
    found = []
    cases = [(m, layout) for m in all_rows for layout in layouts]
    for number, (m, layout) in enumerate(cases):
        part(report, number, len(cases))(0.0, f"{name}, {m} rows, {layout}")
        found.append(_compare(name, m, layout))
    return found


def _compare(name: str, m: int, layout: str) -> PlainCase:
    torch.manual_seed(dist.get_rank())
    w = torch.randn(K, N) if layout == LAYOUTS[0] else torch.randn(N, K).t()
    arms = plain_arms(name, m, w)
    chosen = arms.call(AUTO)
    once = _settle(chosen)
    said = explain_plan()
    assert said is not None
    calls = {AUTO: chosen, SERIAL: arms.call(SERIAL), GLOO: arms.gloo, WEFT: arms.weft}

    def several(count: int) -> dict[str, Callable[[], None]]:
        return {arm: partial(_repeat, call, count) for arm, call in calls.items()}

    repeat = FEW_REPEAT if once > LONG else REPEAT
    samples = interleaved(several(max(1, round(SAMPLE / once))), repeat, _silent)
    plain = min((GLOO, WEFT), key=lambda arm: statistics.median(samples[arm]))

    def ratios(arm: str) -> list[float]:
        return [one / other for one, other in zip(samples[arm], samples[plain], strict=True)]

    return PlainCase(name, layout, m, said[1].schedule, plain, ratios(AUTO), ratios(SERIAL))


def _settle(call: Callable[[], object]) -> float:
    """Calls `auto` until rank 0 has settled on a schedule; returns the seconds of a call."""
    guards = auto.of(sessions.of(of(None))).guards
    waiting = torch.ones(1)
    while waiting:
        for _ in range(CALLS):
            call()
        waiting[0] = any(not guard.settled for guard in guards.values())
        dist.broadcast(waiting, 0)
    call()  # the first with a choice that is final
    seconds = torch.tensor(min(timed(call) for _ in range(3)), dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def _repeat(call: Callable[[], object], count: int) -> None:
    for _ in range(count):
        call()


def _silent(share: float, text: str) -> None:
    """Rounds are too short to report."""
