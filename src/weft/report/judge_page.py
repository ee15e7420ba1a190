"""The page of `weft judge`: the distance of choices from the best, and every missed scenario."""

from __future__ import annotations

import os
from pathlib import Path

from weft.machine import calibrated
from weft.report import cells
from weft.report.figures import Spec
from weft.report.page import Page
from weft.study.judgement import IN_SET, Judgement, Verdict

NAMES = {
    "heuristic": "all candidates",
    "fixed": "without adaptive",
    "paper": "FiCCO's four schedules, its kind of rule",
}
COLOURS = {"heuristic": "#0072b2", "fixed": "#009e73", "paper": "#d55e00"}
MOST_MISSES = 100


def judged(judgement: Judgement) -> str:
    """How good the choices are, in one sentence."""
    score = judgement.score("heuristic")
    what = "The schedule chosen from static sizes"
    near, share = 2, score.within_2_percent
    if judgement.machine == calibrated.NAME:  # measured: 2 % are noise
        what = "The schedule on which auto settles in its first calls, measured,"
        near, share = 10, score.within_10_percent
    return (
        f"{what} is within {near} % of the best in {share:.1f} % of {score.count} scenarios, on "
        f"average {score.mean_regret:.2f} % slower than best, and {score.slower_than_serial} are "
        f"slower than serial by more than {100 * judgement.tolerance:.0f} %."
    )


def judgement_page(path: str | os.PathLike[str], judgement: Judgement) -> Path:
    """Writes the page atomically."""
    title = f"How good schedule=auto chooses on {judgement.machine}, seed {judgement.seed}"
    page = Page(title, judged(judgement))
    page.section(
        "Slower than best",
        "For each set of candidates, the share of scenarios in which the choice takes at most this "
        "much longer than the best of the set.",
    )
    page.legend({NAMES[kind]: COLOURS[kind] for kind in IN_SET})
    page.figure(_regrets(judgement), height=360)
    rows: list[list[cells.Cell]] = []
    for kind in IN_SET:
        one = judgement.score(kind)
        rows.append(
            [
                NAMES[kind],
                f"{one.exact:.1f} %",
                f"{one.within_2_percent:.1f} %",
                f"{one.within_10_percent:.1f} %",
                f"{one.mean_regret:.2f} %",
                f"{one.worst_regret:.1f} %",
                one.slower_than_serial,
            ]
        )
    page.table(
        (
            "chosen from",
            "exact",
            "within 2 %",
            "within 10 %",
            "slower than best, mean",
            "worst",
            "slower than serial",
        ),
        rows,
    )
    _misses(page, judgement)
    return page.write(path)


def _regrets(judgement: Judgement) -> Spec:
    lines = []
    for kind in IN_SET:
        regrets = sorted(100.0 * verdict.regret(kind) for verdict in judgement.verdicts)
        shares = [100.0 * (number + 1) / len(regrets) for number in range(len(regrets))]
        lines.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": NAMES[kind],
                "x": [0.0, *regrets],
                "y": [0.0, *shares],
                "line": {"shape": "hv", "color": COLOURS[kind]},
                "hovertemplate": f"{NAMES[kind]}: within %{{x:.1f}} % in %{{y:.1f}} %"
                "<extra></extra>",
            }
        )
    return {
        "data": lines,
        "layout": {
            "showlegend": False,
            "margin": {"l": 50, "r": 10, "t": 10, "b": 45},
            "xaxis": {"title": {"text": "slower than the best, %"}, "range": [0, 20]},
            "yaxis": {"title": {"text": "scenarios, %"}, "range": [0, 101]},
        },
    }


def _misses(page: Page, judgement: Judgement) -> None:
    missed = [verdict for verdict in judgement.verdicts if verdict.regret("heuristic") > 0.02]
    missed.sort(key=lambda verdict: -verdict.regret("heuristic"))
    if not missed:
        page.section("Misses", "No choice is more than 2 % slower than the best.")
        return
    text = "Scenarios in which the choice is more than 2 % slower than the best."
    if len(missed) > MOST_MISSES:
        text += f" The worst {MOST_MISSES} of {len(missed)} are here."
    page.section("Misses", text)
    page.table(
        ("scenario", "links", "chosen", "best", "slower than best", "against serial"),
        [_miss(verdict) for verdict in missed[:MOST_MISSES]],
    )


def _miss(verdict: Verdict) -> list[cells.Cell]:
    drawn = verdict.drawn
    return [
        drawn.operation.label.removeprefix(f"{drawn.operation.name} "),
        drawn.link or f"{drawn.link_speed:g}x",
        verdict.chosen["heuristic"].name,
        verdict.best("heuristic").name,
        f"{100 * verdict.regret('heuristic'):.1f} %",
        f"{100 * verdict.lost_to_serial('heuristic'):+.1f} %",
    ]
