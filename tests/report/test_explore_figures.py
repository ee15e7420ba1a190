"""Figures and page of an exploration: every cell, bars that end where they should, all panels."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from weft.machine import load
from weft.report import page as page_module
from weft.report.explore_figures import axis_end, bars, heat_map, where
from weft.report.explore_page import MOST_CLOSELY, rows_of, summary_of, write_explore_page
from weft.schedule import Schedule
from weft.study.exploration import Exploration, explore
from weft.study.scenarios import Shape

SHAPES = (Shape(16384, 8192, 8192, "a <b>"), Shape(65536, 65536, 512, "sums", note="a note"))
AG = "all_gather_matmul"


@pytest.fixture(scope="module")
def found() -> Exploration:
    """On a machine whose memory is too small for the sums of one schedule in one scenario."""
    node = load("mi300x")
    small = replace(node, memory=replace(node.memory, capacity=1.6e9))
    return explore(small, AG, SHAPES, 8)


@pytest.fixture(autouse=True)
def small_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "plotly_js", lambda: "/* plotly */")


def figures(path: Path) -> list[dict[str, Any]]:
    found = re.findall(r'data-figure="[^"]+">(.*?)</script>', path.read_text("utf-8"), re.DOTALL)
    return [json.loads(text) for text in found]


def test_the_heat_map_has_every_cell_and_says_why_one_is_empty(found: Exploration) -> None:
    spec, height, width = heat_map(found)
    (trace,) = spec["data"]
    names = spec["layout"]["yaxis"]["ticktext"]
    assert len(names) == len(trace["z"]) == 21
    assert all(len(row) == 2 for row in trace["z"])
    assert height > 21 * 20
    assert width > 200
    refused = names.index("uniform-fused-2d@dma")
    assert trace["z"][refused][1] is None
    assert "needs" in trace["customdata"][refused][1][2]
    row, cell = names.index("adaptive@dma"), trace["customdata"][names.index("adaptive@dma")][0]
    assert cell[:2] == [0, "adaptive@dma"]
    assert "a &lt;b&gt;" in cell[2]
    speedup = found.scenarios[0].outcome("adaptive@dma").speedup
    assert trace["text"][row][0] == f"{speedup:.2f}"
    assert 2 ** trace["z"][row][0] == pytest.approx(speedup)
    assert spec["layout"]["meta"]["picks"] == "scenario"


def test_bars_of_losses_end_where_their_schedule_does(found: Exploration) -> None:
    scenario = found.scenarios[0]
    spec, _ = where(scenario)
    ordered = sorted(scenario.outcomes, key=lambda outcome: outcome.seconds)
    for number, outcome in enumerate(ordered):
        ends = [trace["base"][number] + trace["x"][number] for trace in spec["data"]]
        assert max(ends) == pytest.approx(1e3 * outcome.seconds, rel=1e-4)
        assert all(trace["x"][number] >= 0 for trace in spec["data"])
    said = [note["text"] for note in spec["layout"]["annotations"]]
    assert said[:2] == ["serial", "ideal"]
    assert len(said) == 2 + len(ordered)
    over = [o for o in ordered if o.seconds > axis_end(scenario)]
    assert over
    assert sum("▸" in text for text in said) == len(over)


def test_bars_compare_with_ideal(found: Exploration) -> None:
    spec, _ = bars(found)
    assert [len(trace["y"]) for trace in spec["data"]] == [2, 2, 2, 2]
    ideal = spec["data"][-1]["y"]
    assert all(best <= most for best, most in zip(spec["data"][0]["y"], ideal, strict=True))


def test_the_page_has_a_panel_for_every_scenario(found: Exploration, tmp_path: Path) -> None:
    path = write_explore_page(tmp_path / "page.html", found)
    text = path.read_text("utf-8")
    assert text.count('<div data-panel="') == 2
    assert text.count(" hidden>") == 1
    assert "<b>:" not in text  # the name of a scenario is never markup
    assert "a note" in text
    gantts = [f for f in figures(path) if f["layout"].get("meta", {}).get("gantt")]
    titles = [f["layout"]["meta"]["title"] for f in gantts]
    assert titles.count("adaptive@dma") == 2
    assert all(name.endswith("@dma") for name in titles if "cores" not in name)
    for figure in gantts:
        outcomes = [
            s.outcome(figure["layout"]["meta"]["title"])
            for s in found.scenarios
            if any(o.schedule.name == figure["layout"]["meta"]["title"] for o in s.outcomes)
        ]
        times = [1e3 * outcome.seconds for outcome in outcomes]
        assert any(figure["layout"]["meta"]["ms"] == pytest.approx(ms) for ms in times)


def test_one_scenario_has_no_heat_map_and_every_timeline(tmp_path: Path) -> None:
    one = explore(load("h100"), AG, SHAPES[:1], 2)
    path = write_explore_page(tmp_path / "page.html", one)
    drawn = figures(path)
    assert not any(f["data"][0]["type"] == "heatmap" for f in drawn)
    gantts = [f for f in drawn if f["layout"].get("meta", {}).get("gantt")]
    assert len(gantts) == len(one.scenarios[0].outcomes)


def test_many_scenarios_are_shown_closely_up_to_a_number(tmp_path: Path) -> None:
    shapes = [Shape(64 * (i + 1), 64, 64) for i in range(MOST_CLOSELY + 2)]
    many = explore(
        load("h100"), AG, shapes, 2, [Schedule.parse("serial"), Schedule.parse("adaptive")]
    )
    told: list[str] = []
    path = write_explore_page(tmp_path / "page.html", many, lambda share, text: told.append(text))
    assert path.read_text("utf-8").count('<div data-panel="') == MOST_CLOSELY
    assert f"The first {MOST_CLOSELY} scenarios are here" in path.read_text("utf-8")
    assert len(told) == MOST_CLOSELY
    assert rows_of(many)[0][8] is None  # shard-p2p was not explored
    assert "shard-p2p" not in summary_of(many)
