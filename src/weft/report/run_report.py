"""A measurement in words and rows, for the terminal and for its page: the table, which schedules
cannot be told apart, and the verdict.

A schedule is crowned only if the rounds show it. Two schedules are compared within rounds, because
the arms of a round run close to each other. They are tied if the ratio of their times may be 1: if
1 lies inside its confidence interval (of at least 95 %, from the order of the ratios alone), or if
the difference is too small to matter.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from math import comb

from weft.measure.measurement import SERIAL, Arm, Measurement
from weft.report.cells import Cell
from weft.report.units import share
from weft.study.prediction import Prediction

SURE = 0.05
"""The most that a difference may be due to chance."""
SMALL = 0.01
"""Differences below this share do not matter."""
FEWEST = 6
"""With fewer rounds, no difference is sure."""
SHARE = (
    "Share of gain: the gain over serial (its speedup minus 1) as a share of what perfect overlap "
    "would gain; 0 % is serial, 100 % takes as long as the longer of compute and communication."
)


def headers_of(prediction: Prediction | None) -> list[str]:
    """The headers of `rows_of`."""
    said = ["schedule", "ms", "spread"]
    if prediction is not None:
        said += ["pre-\ndicted", "error"]
    return [*said, "speedup", "share of\ngain", "GEMM\nslowdown", "moved per rank"]


def drop_of(prediction: Prediction | None) -> tuple[int, ...]:
    """The columns of `rows_of` that go first where there is no room."""
    last = len(headers_of(prediction)) - 1
    return (last, last - 1, last - 2)


def rows_of(result: Measurement, prediction: Prediction | None = None) -> list[list[Cell]]:
    """One row per schedule, `auto` last."""
    forecasts = {} if prediction is None else {f.arm.name: f for f in prediction.forecasts}
    rows = []
    for arm in result.every:
        row: list[Cell] = [
            name_of(arm),
            round(arm.seconds * 1e3, 2),
            f"{arm.spread_percent:.0f} %",
        ]
        if prediction is not None:
            known = forecasts.get(arm.name)
            row += (
                [None, None]
                if known is None
                else [round(known.seconds * 1e3, 2), f"{known.error_percent:+.0f} %"]
            )
        row += [
            f"{arm.speedup:.2f}x",
            share(arm.percent_of_ideal),
            f"{arm.gemm_slowdown:.2f}x",
            ", ".join(f"{n / 1e6:.1f} MB {e}" for e, n in arm.bytes_by_engine.items()),
        ]
        rows.append(row)
    return rows


def name_of(arm: Arm) -> str:
    """The schedule; for `auto` also what it has chosen."""
    return f"{arm.name}: {arm.chose}" if arm.chose else arm.name


@dataclass(frozen=True)
class Standing:
    """The fastest schedules by name, in the order of their medians: one that is surely the fastest,
    or several that are tied. Empty if nothing can be said. why: the reason for that."""

    first: tuple[str, ...]
    why: str = ""


def standing(result: Measurement) -> Standing:
    """Which schedules are the fastest; `auto` takes part only by what it chooses."""
    company = result.company
    if result.busy and company is not None:
        return Standing(
            (),
            f"the machine was busy: other programs used {company.others:.1f} of its "
            f"{company.cores} cores meanwhile, so these times say little; measure again when it "
            "is idle",
        )
    rounds = len(result.best.samples)
    if rounds < FEWEST:
        number = "1 round" if rounds == 1 else f"{rounds} rounds"
        return Standing((), f"{number} cannot tell schedules apart; use --repeat 15")
    best = result.best
    others = sorted((arm for arm in result.arms if arm != best), key=lambda arm: arm.seconds)
    return Standing((best.name, *(arm.name for arm in others if not slower(arm, best))))


def slower(one: Arm, other: Arm) -> bool:
    """Whether the rounds show that `one` takes longer."""
    ratios = sorted(a / b for a, b in zip(one.samples, other.samples, strict=True))
    if statistics.median(ratios) <= 1.0 + SMALL:
        return False
    sure = _sure_rank(len(ratios))
    return sure > 0 and ratios[sure - 1] > 1.0


def _sure_rank(rounds: int) -> int:
    """The rank of the ratio below which the median lies by chance at most: the sign test."""
    tail, rank = 0.0, 0
    while rank < rounds:
        tail += comb(rounds, rank) / 2.0**rounds
        if 2.0 * tail > SURE:
            break
        rank += 1
    return rank


def verdict(result: Measurement) -> str:
    """Which schedule to use and what `auto` does, in one sentence."""
    found = standing(result)
    if not found.first:
        return f"Nothing is crowned: {found.why}."
    best, *ties = (result.arm(name) for name in found.first)
    if SERIAL in found.first:
        text = "Overlap gains nothing that can be measured here: serial is among the fastest"
    else:
        text = f"Use {best.name}: {best.speedup:.2f}x over serial"
        if best.percent_of_ideal > 0:
            text += f", {best.percent_of_ideal:.0f} % of the possible gain"
        if ties:
            text += f" ({_tied(ties)} as fast within the noise)"
    return f"{text}{_auto(result, found.first)}."


def _tied(ties: list[Arm]) -> str:
    names = [arm.name for arm in ties]
    if len(names) <= 2:
        return " and ".join(names) + (" is" if len(names) == 1 else " are")
    return f"{names[0]} and {len(names) - 1} others are"


def _auto(result: Measurement, first: tuple[str, ...]) -> str:
    auto = result.auto
    if auto is None:
        return ""
    if auto.chose == first[0]:
        return "; auto chooses it"
    best = result.arm(first[0])
    if auto.chose in first or not slower(auto, best):
        return f"; auto chooses {auto.chose}, which is as fast within the noise"
    behind = statistics.median(a / b for a, b in zip(auto.samples, best.samples, strict=True)) - 1
    return f"; auto chooses {auto.chose}, which is {100 * behind:.0f} % slower than best"
