"""Compares the simulator with measurements, and checks every promised error.

`weft bench fidelity --write docs` writes docs/fidelity.md and its plots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.benchmarks import Check, Result
from weft.measure.launch import Report
from weft.simulate.cost.fidelity import Fidelity, FidelityFigure, compare
from weft.study.ficco import FiccoEvaluation, evaluate

HEADERS = ("comparison", "measure", "value", "promised")
IDEAL = (1.7, 1.85)
"""The expected range of the largest ideal speedup; the paper puts it near 1.7x."""
BEST = (1.5, 1.65)
"""The expected range of the largest speedup over the 16 scenarios."""
SLOWER = 2.0
"""A schedule is `much slower` if it takes this many times as long as serial."""


@dataclass(frozen=True)
class FidelityFindings:
    """All comparisons, for docs/generate/fidelity.py."""

    costs: Fidelity
    ficco: FiccoEvaluation
    promises: Sequence[tuple[str, float, str, bool]]  # name, value, bounds, whether it is kept


def run(report: Report) -> Result:
    """Cost models against measurements, then FiCCO's scenarios on a mesh and on a switch."""
    report(0.0, "cost models against measurements")
    found = compare()
    ficco = evaluate(report)
    # FiCCO's ideal exists twice. The simulated one counts, not the one of the cost models.
    costs = [summary for summary in found.summaries if not summary.what.startswith("FiCCO")]
    summaries = [*costs, *_ficco(ficco)]
    promises = [(_name(s), s.value, _promised(s), s.reached) for s in summaries if _promised(s)]
    return Result(
        HEADERS,
        [[_what(s), s.measure, f"{s.value:.3g}", _promised(s)] for s in summaries],
        [check for summary in summaries for check in _checks(summary)],
        FidelityFindings(found, ficco, promises),
    )


def _ficco(ficco: FiccoEvaluation) -> list[FidelityFigure]:
    slow, what = ficco.shard_slowdowns, "FiCCO mi300x, simulated"
    return [
        FidelityFigure(what, "largest ideal speedup", ficco.largest_ideal, *IDEAL),
        FidelityFigure(
            what, "largest speedup of the best schedules", ficco.top.best.speedup, *BEST
        ),
        FidelityFigure(
            what, "fixed schedules that are best somewhere", float(len(ficco.winners)), 2.0
        ),
        FidelityFigure(what, "shard-p2p / serial, comm.-heavy, least", min(slow), SLOWER),
        FidelityFigure(what, "shard-p2p / serial, comm.-heavy, most", max(slow)),
        FidelityFigure(
            "FiCCO h100, simulated", "shard-p2p speedup, least", ficco.shard_on_switch, 1.0
        ),
        FidelityFigure(what, "best on dma / best on cores, least", ficco.engines_over_cores, 1.0),
    ]


def _what(summary: FidelityFigure) -> str:
    return summary.what.replace(" (error in points)", "")


def _name(summary: FidelityFigure) -> str:
    return f"{_what(summary)}: {summary.measure}"


def _checks(summary: FidelityFigure) -> list[Check]:
    bounds = ((">=", summary.least), ("<=", summary.most))
    return [
        Check(_name(summary), summary.value, f"{sign} {bound:.4g}")
        for sign, bound in bounds
        if bound is not None
    ]


def _promised(summary: FidelityFigure) -> str:
    if summary.least is None:
        return "" if summary.most is None else f"<= {summary.most:.4g}"
    return f">= {summary.least:.4g}" + ("" if summary.most is None else f", <= {summary.most:.4g}")
