"""The page of `weft judge`: the distance of choices from the best, and every missed scenario."""

from __future__ import annotations

import os
from collections.abc import Mapping
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
MISSED = 0.02
"""A choice that is slower than the best by more than this share counts as a miss."""
FEWEST = 10
"""With fewer scenarios, nothing is said about a kind of shape."""


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


def score_rows(judgement: Judgement, names: Mapping[str, str]) -> list[list[cells.Cell]]:
    """The figures of every set of candidates. names: what the sets are called."""
    return [
        [
            names[kind],
            f"{score.exact:.1f} %",
            f"{score.within_2_percent:.1f} %",
            f"{score.within_10_percent:.1f} %",
            f"{score.mean_regret:.2f} %",
            f"{score.worst_regret:.1f} %",
            score.slower_than_serial,
        ]
        for kind in IN_SET
        for score in (judgement.score(kind),)
    ]


def judgement_page(path: str | os.PathLike[str], judgement: Judgement) -> Path:
    """Writes the page atomically."""
    title = f"How close auto's choice comes to the best schedule on {judgement.machine}"
    page = Page(title, judged(judgement))
    page.section(
        "Slower than best",
        "For each set of candidates, the share of scenarios in which the choice takes at most this "
        "much longer than the best of the set.",
    )
    page.legend({NAMES[kind]: COLOURS[kind] for kind in IN_SET})
    page.figure(_regrets(judgement), height=360)
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
        score_rows(judgement, NAMES),
    )
    page.text(
        f"Scenarios are random layers, drawn with seed {judgement.seed}: the same seed draws the "
        "same ones."
    )
    _kinds(page, judgement)
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


def kind_rows(judgement: Judgement) -> list[list[cells.Cell]]:
    """Per kind of shape: how many there are, how many are missed by more than 2 %, their share, and
    the mean distance from the best. Each scenario is in one kind of each sort."""
    members: dict[str, list[float]] = {}
    for verdict in judgement.verdicts:
        for kind in _kinds_of(verdict):
            members.setdefault(kind, []).append(verdict.regret("heuristic"))
    return [
        [
            kind,
            len(found),
            sum(regret > MISSED for regret in found),
            f"{100 * sum(regret > MISSED for regret in found) / len(found):.0f} %",
            f"{100 * sum(found) / len(found):.2f} %",
        ]
        for kind, found in sorted(members.items())
    ]


def most_missed(judgement: Judgement) -> str:
    """In which kind of shape misses are the most frequent, in one sentence."""
    rows = [row for row in kind_rows(judgement) if int(row[1] or 0) >= FEWEST and row[2]]
    if not rows:
        return f"No kind of shape with {FEWEST} scenarios or more is missed."
    kind, count, missed, *_ = max(rows, key=lambda row: int(row[2] or 0) / int(row[1] or 1))
    return f"Most often missed by more than 2 %: {kind}, in {missed} of {count} scenarios."


def _kinds_of(verdict: Verdict) -> list[str]:
    drawn = verdict.drawn
    rows = sum(drawn.operation.rows)
    size = "fewer than 1,024" if rows < 1024 else "1,024 to 16,383" if rows < 16384 else "16,384 up"
    world = drawn.operation.world
    best = verdict.seconds[verdict.best("heuristic")]
    length = "under 0.1 ms" if best < 1e-4 else "0.1 to 1 ms" if best < 1e-3 else "1 ms up"
    return [
        f"rows of A: {size}",
        f"ranks: {'2 to 4' if world <= 4 else '5 up'}",
        f"links: {drawn.link or f'{drawn.link_speed:g}x'}",
        f"time of the best: {length}",
    ]


def _kinds(page: Page, judgement: Judgement) -> None:
    page.section("Which kinds of shape miss", most_missed(judgement))
    page.table(
        ("kind", "scenarios", "missed by more than 2 %", "share", "slower than best, mean"),
        kind_rows(judgement),
    )


def _misses(page: Page, judgement: Judgement) -> None:
    missed = [verdict for verdict in judgement.verdicts if verdict.regret("heuristic") > MISSED]
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
