"""The page of `weft explore --workload` in a real browser, on two widths."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import NAMES, Chromium, find

from weft.machine import load_cluster
from weft.models.workloads import load_workload
from weft.report.scaling_page import write_scaling_page
from weft.study.scaling import scale

pytestmark = pytest.mark.skipif(
    find() is None, reason=f"no browser here: none of {', '.join(NAMES)} is installed"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with Chromium.start() as started:
        yield started


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = scale(load_workload("moe"), load_cluster("mi300x"), (1, 2, 4))
    return write_scaling_page(tmp_path_factory.mktemp("page") / "scaling.html", found)


@pytest.mark.parametrize("size", [(1366, 900), (390, 844)], ids=["laptop", "phone"])
def test_figures_are_drawn_and_nothing_is_wider_than_the_screen(
    browser: Chromium, page: Path, size: tuple[int, int]
) -> None:
    browser.messages.clear()
    browser.open(page, *size, phone=size[0] < 500)
    browser.until("Boolean(document.querySelector('.plot')._fullLayout)")
    assert browser.evaluate("document.documentElement.scrollWidth") <= size[0]
    lines = browser.evaluate("document.querySelector('.plot').data.length")
    assert lines == 3  # plain, fused, ideal
    browser.evaluate("document.querySelector('.overlay').scrollIntoView()")
    lanes = browser.until(
        "document.querySelector('[data-overlay]').layout?.yaxis?.ticktext?.join(' ')"
    )
    assert "compute" in lanes
    assert "network" in lanes
    assert browser.messages == []  # no errors, and no request to anywhere
