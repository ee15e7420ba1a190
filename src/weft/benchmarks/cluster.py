"""Checks of simulated clusters: collectives against the bound of the slowest link, fair sharing,
numbers of another simulator, the time of a simulation, and the saving of a fused DLRM step."""

from __future__ import annotations

import time

from weft.benchmarks import Check, Result, part
from weft.machine import load_cluster
from weft.measure.launch import Report
from weft.models.workloads import load_workload
from weft.report.units import duration
from weft.simulate.cluster import CollectiveAnswer
from weft.study.clusters import against_astra_sim, fairness, how_long, near_the_bound
from weft.study.scaling import scale

HEADERS = ("what", "where", "how", "figure")
DLRM = (0.14, 0.28)
"""The expected saving of a fused DLRM step on 128 nodes; arXiv 2305.06942 reports 21 %."""
CLUSTERS = 3 * (1 + 3 * 3) * 4  # the number of results of `near_the_bound`


def run(report: Report) -> Result:
    """Everything is simulated; only the time of the simulation is measured."""
    rows: list[list[str | float]] = []
    checks: list[Check] = []
    answers: list[CollectiveAnswer] = []
    progress = part(report, 0, 3)
    for number, answer in enumerate(near_the_bound()):
        progress(number / CLUSTERS, f"{answer.kind} on {answer.cluster.title}")
        answers.append(answer)
    for title in dict.fromkeys(answer.cluster.title for answer in answers):
        here = [answer for answer in answers if answer.cluster.title == title]
        worst = max(here, key=_over)
        how = f"{worst.kind}, {worst.cluster.nodes} nodes: {worst.algorithm}"
        rows.append(["farthest from bound", title, how, f"{worst.over_bound:.3f}x"])
    for kind in dict.fromkeys(answer.kind for answer in answers):
        over = max(answer.over_bound for answer in answers if answer.kind == kind)
        checks.append(Check(f"{kind}, 1-16 nodes of 8: most over the bound", over, "<= 1.05"))
    progress = part(report, 1, 3)
    progress(0.0, "two collectives at once")
    shared = fairness()
    for one in shared:
        times = " and ".join(f"{1e3 * seconds:.1f}" for seconds in one.seconds)
        rows.append([one.what, "16 nodes", f"{times} ms", f"{one.error:.2%} off"])
    checks.append(
        Check(
            "two at once: largest error against half a link each",
            max(s.error for s in shared),
            "<= 0.02",
        )
    )
    progress(0.3, "another simulator's numbers")
    compared = against_astra_sim()
    for row in compared:
        ours, theirs = duration(row.ours), duration(row.theirs)
        rows.append([row.what, "ASTRA-sim", f"{ours}, there {theirs}", f"{row.error:+.2%}"])
    largest = max(abs(row.error) for row in compared)
    checks.append(Check("against ASTRA-sim: largest error", largest, "<= 0.01"))
    progress(0.6, "how long it takes")
    for nodes, bar in ((128, 10), (1024, 60)):
        seconds = how_long(nodes)
        rows.append(
            [
                "4 collectives, all algorithms",
                f"{nodes} nodes of 8",
                "simulated in",
                f"{seconds:.1f} s",
            ]
        )
        checks.append(
            Check(f"{nodes} nodes: seconds to simulate 4 collectives", seconds, f"<= {bar}")
        )
    _workloads(rows, checks, part(report, 2, 3))
    return Result(HEADERS, rows, checks)


def _over(answer: CollectiveAnswer) -> float:
    return answer.over_bound


def _workloads(rows: list[list[str | float]], checks: list[Check], report: Report) -> None:
    for number, (model, name) in enumerate(
        (model, name) for model in ("dlrm", "dlrm-mlperf") for name in ("mi300x", "h100")
    ):
        report(number / 4, f"{model} on {name}")
        start = time.process_time()
        found = scale(load_workload("dlrm", model), load_cluster(name), (128,), ("weak",))
        took = time.process_time() - start
        (point,) = found.points
        how = f"{1e3 * point.plain.seconds:.2f} to {1e3 * point.fused.seconds:.2f} ms"
        rows.append(
            [f"a step of {model}", f"128 nodes of 8 {name}", how, f"saves {point.saving:.1%}"]
        )
        if model == "dlrm":
            for sign, bound in ((">=", DLRM[0]), ("<=", DLRM[1])):
                checks.append(
                    Check(
                        f"{model}, 128 nodes of {name}: share saved",
                        point.saving,
                        f"{sign} {bound}",
                    )
                )
            checks.append(
                Check(f"{model}, 128 nodes of {name}: seconds to simulate", took, "<= 30")
            )
