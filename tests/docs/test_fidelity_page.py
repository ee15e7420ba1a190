"""The document of `weft bench fidelity`: every part filled in, every plot there and well-formed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from generate import cluster_section, contention_section, host_section
from generate.fidelity import documents
from generate.svg import Axis, Series, bars, chart
from weft.benchmarks.fidelity import FidelityFindings
from weft.machine import load
from weft.simulate.cost.fidelity import Fidelity
from weft.study.contention_fit import attempts
from weft.study.exploration import explore
from weft.study.ficco import FiccoEvaluation
from weft.study.prediction import keep_results
from weft.study.scenarios import ficco

PAIRS = ((0.0, 1.45), (0.3, 1.45))
"""Two numbers of contention with what was published between them."""


@pytest.fixture(scope="module")
def evaluation() -> FiccoEvaluation:
    """Two of the scenarios are enough to fill every part."""
    some = [shape for shape in ficco() if shape.id in ("g4", "g6")]
    return FiccoEvaluation(
        *(explore(load(m), "all_gather_matmul", some, 8) for m in ("mi300x", "h100"))
    )


@pytest.fixture(scope="module")
def written(fidelity: Fidelity, evaluation: FiccoEvaluation) -> dict[str, str]:
    promises = [("a", 0.051, "<= 0.1", True), ("b", 1.8, "<= 1.75", False)]
    with pytest.MonkeyPatch.context() as patch:  # the sections that take long
        patch.setattr(host_section, "section", lambda: "## Here\n\nmeasured\n")
        patch.setattr(cluster_section, "section", lambda: "## Clusters\n")
        patch.setattr(contention_section, "attempts", lambda machine: attempts(machine, PAIRS))
        return documents(FidelityFindings(fidelity, evaluation, promises))


def test_every_part_is_filled_in(written: dict[str, str]) -> None:
    text = written["fidelity.md"]
    assert "<!--" not in text
    assert "| a | 0.051 | <= 0.1 | yes |" in text
    assert "| b | 1.8 | <= 1.75 | **no** |" in text
    assert "## Here\n\nmeasured\n" in text
    for heading in ("GEMM", "FiCCO's story", "Contention: one model", "What the model leaves out"):
        assert f"## {heading}\n" in text


def test_tables_are_rectangles(written: dict[str, str]) -> None:
    for table in re.findall(r"(?:^\|.*\n)+", written["fidelity.md"], re.MULTILINE):
        assert len({line.count("|") for line in table.splitlines()}) == 1, table


def test_every_plot_is_there_and_shown(written: dict[str, str]) -> None:
    shown = set(re.findall(r"\]\((images/[^)]+)\)", written["fidelity.md"]))
    assert shown == set(written) - {"fidelity.md"}
    assert len(shown) == 10
    for name in shown:
        ElementTree.fromstring(written[name])
        assert "nan" not in written[name]
        assert len(written[name]) < 40_000


def test_the_section_of_this_host_needs_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "Not measured where this was written" in host_section.section()
    check = {"name": "median error", "value": 7.123, "bar": "<= 10", "ok": True}
    keep_results(json.dumps({"rows": [{"case": "a", "median error %": 7}], "checks": [check]}))
    text = host_section.section()
    assert "| a | 7 |" in text
    assert "7.12 (target: <= 10, kept)" in text
    keep_results("{")
    assert "Not measured where this was written" in host_section.section()


def test_the_evaluation_counts_winners_and_twins(evaluation: FiccoEvaluation) -> None:
    assert sum(evaluation.winners.values()) == 2
    assert evaluation.top.shape.id == "g6"
    assert [s.shape.id for s in evaluation.heavy] == ["g6"]
    assert evaluation.shard_slowdowns[0] > 2
    assert evaluation.shard_on_switch > 1
    assert evaluation.engines_over_cores > 1
    assert set(evaluation.cores_ahead) <= {
        "uniform-fused-2d",
        "hetero-fused-2d",
        "hetero-unfused-2d",
    }


def test_charts_put_points_where_they_belong() -> None:
    points = [(1.0, 1.0), (10.0, 100.0), (100.0, 10.0)]
    svg = chart([Series("dots & <more>", "#123456", points)], Axis("x", True), Axis("y", True))
    root = ElementTree.fromstring(svg)
    (dots,) = (p for p in root.iter() if p.get("stroke") == "#123456")
    places = [tuple(map(float, p)) for p in re.findall(r"M([\d.]+) ([\d.]+)h0", dots.get("d", ""))]
    assert places[0][0] < places[1][0] < places[2][0]
    assert places[0][1] > places[2][1] > places[1][1]  # up is less
    assert any(text.text == "dots & <more>" for text in root.iter())


def test_bars_stand_on_the_ground() -> None:
    groups = [("a", "#111111", [1.0, 2.0]), ("b", "#222222", [0.5, 0.25])]
    marks = ("m", "#333333", [2, 2])
    svg = bars(["one", "two"], groups, Axis("y"), marks=marks, line=1.0)
    root = ElementTree.fromstring(svg)
    rects = [
        r for r in root.iter() if r.get("fill") in ("#111111", "#222222") and r.get("rx") is None
    ]
    heights = [float(r.get("height", 0)) for r in rects]
    feet = {round(float(r.get("y", 0)) + float(r.get("height", 0)), 1) for r in rects}
    assert len(rects) == 4
    assert len(feet) == 1
    assert heights[2] == pytest.approx(2 * heights[0], rel=0.01)
