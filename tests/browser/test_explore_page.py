"""The page of `weft explore` in a real browser: hovered, clicked, picked from, on two widths."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import LAPTOP, PHONE, needs_browser, opened, until
from playwright.sync_api import Browser, Page

from weft.machine import load
from weft.report.explore_page import write_explore_page
from weft.study.exploration import explore
from weft.study.scenarios import Shape

pytestmark = needs_browser

SHAPES = (Shape(16384, 8192, 8192, "wide"), Shape(32768, 2048, 8192, "tall"), Shape(512, 512, 512))

HEAT_MAP = "document.querySelector('.plot')"
PANEL = "document.querySelector('[data-panel]:not([hidden])')"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = explore(load("mi300x"), "all_gather_matmul", SHAPES, 4)
    return write_explore_page(tmp_path_factory.mktemp("page") / "explore.html", found)


@pytest.fixture
def laptop(browser: Browser, page: Path) -> Iterator[Page]:
    with opened(browser, page.as_uri()) as shown:
        until(shown, f"Boolean({HEAT_MAP}._fullLayout)")
        yield shown


def cell(page: Page, schedule: str, scenario: int) -> tuple[float, float]:
    """Where a cell of the heat map is on the screen."""
    x, y = page.evaluate(
        f"""(() => {{
          const plot = {HEAT_MAP};
          plot.scrollIntoView({{ block: "center" }});
          const {{ xaxis, yaxis, _size }} = plot._fullLayout, box = plot.getBoundingClientRect();
          const row = yaxis.ticktext.indexOf("{schedule}");
          return [box.left + _size.l + xaxis.d2p({scenario}), box.top + _size.t + yaxis.d2p(row)];
        }})()"""
    )
    return x, y


def select(name: str) -> str:
    """The selector of a list: that of scenarios, or one of the scenario that is shown."""
    return ("" if name == "scenario" else "[data-panel]:not([hidden]) ") + f"select[name={name}]"


def chosen(page: Page, name: str) -> str:
    return page.locator(f"{select(name)} option:checked").inner_text()


def overlay_titles(page: Page) -> set[str]:
    """The schedules whose bars are in the overlay, by their hover texts."""
    page.evaluate(f"{PANEL}.querySelector('.overlay').scrollIntoView()")
    until(page, f"{PANEL}.querySelector('[data-overlay]').data?.length > 2")
    hovers = page.evaluate(
        f"{PANEL}.querySelector('[data-overlay]').data.map((trace) => trace.hovertemplate)"
    )
    return {hover.split("<br>")[0] for hover in hovers}


def test_a_hover_tells_speedup_and_losses(laptop: Page) -> None:
    laptop.mouse.move(*cell(laptop, "shard-p2p@dma", 1))
    said = until(laptop, "document.querySelector('.hoverlayer')?.textContent")
    assert "shard-p2p@dma in tall" in said
    assert "% of the possible gain" in said
    assert "exposed communication" in said


def test_a_click_picks_scenario_and_schedule(laptop: Page) -> None:
    assert chosen(laptop, "scenario").startswith("wide")
    laptop.mouse.click(*cell(laptop, "uniform-fused-1d@dma", 1))
    until(laptop, f"{PANEL}.dataset.panel === '1'")
    assert chosen(laptop, "scenario") == "tall: 32768 x 2048 x 8192"
    assert chosen(laptop, "lower") == "uniform-fused-1d@dma"
    assert overlay_titles(laptop) == {"serial@dma", "uniform-fused-1d@dma"}


def test_two_schedules_are_laid_over_each_other(laptop: Page) -> None:
    assert overlay_titles(laptop) == {"serial@dma", chosen(laptop, "lower")}
    assert "as fast" in laptop.evaluate(f"{PANEL}.querySelector('.overlay output').textContent")
    laptop.select_option(select("upper"), label="shard-p2p@dma")
    laptop.select_option(select("lower"), label="adaptive@dma")
    until(laptop, f"{PANEL}.querySelector('.overlay output').textContent.includes('lower is')")
    assert overlay_titles(laptop) == {"shard-p2p@dma", "adaptive@dma"}
    lanes = laptop.evaluate(f"{PANEL}.querySelector('[data-overlay]').layout.yaxis.ticktext")
    assert lanes[0] == "<b>rank 0</b>  compute"
    assert [lane for lane in lanes if "engine" in lane] == ["engine 1", "engine 2", "engine 3"]


def test_another_scenario_brings_its_own_figures(laptop: Page) -> None:
    laptop.select_option(select("scenario"), label="512 x 512 x 512")
    assert laptop.evaluate("document.querySelectorAll('[data-panel]:not([hidden])').length") == 1
    laptop.evaluate(f"{PANEL}.scrollIntoView()")
    bars = until(laptop, f"{PANEL}.querySelector('figure .plot').data?.length")
    assert bars == 5  # ideal and four losses
    assert "serial@dma" in overlay_titles(laptop)


def test_a_zoom_reaches_the_timelines_of_its_scenario_only(laptop: Page) -> None:
    overlay_titles(laptop)
    until(laptop, f"Boolean({PANEL}.querySelector('details[open] .plot')._fullLayout)")
    laptop.evaluate(
        f"Plotly.relayout({PANEL}.querySelector('[data-overlay]'), {{'xaxis.range': [0.1, 0.2]}})"
        ".then(() => true)"
    )
    until(laptop, f"{PANEL}.querySelector('details[open] .plot').layout.xaxis.range[1] === 0.2")
    laptop.select_option(select("scenario"), label="tall: 32768 x 2048 x 8192")
    overlay_titles(laptop)
    assert laptop.evaluate(f"{PANEL}.querySelector('[data-overlay]').layout.xaxis.range[0]") == 0


@pytest.mark.parametrize("size", [LAPTOP, PHONE], ids=["laptop", "phone"])
def test_nothing_is_wider_than_the_screen(
    browser: Browser, page: Path, size: tuple[int, int]
) -> None:
    with opened(browser, page.as_uri(), size) as shown:
        until(shown, f"Boolean({HEAT_MAP}._fullLayout)")
        overlay_titles(shown)
        assert shown.evaluate("document.documentElement.scrollWidth") <= size[0]
        inner = shown.evaluate(
            f"{PANEL}.querySelector('[data-overlay]').getBoundingClientRect().width"
        )
        assert inner <= size[0]
        assert inner > 0.7 * min(size[0], 1120)
