"""The page of `weft explore --workload` in a real browser, on two widths."""

from __future__ import annotations

from pathlib import Path

import pytest
from chromium import LAPTOP, PHONE, needs_browser, opened, until
from playwright.sync_api import Browser

from weft.machine import load_cluster
from weft.models.workloads import load_workload
from weft.report.scaling_page import write_scaling_page
from weft.study.scaling import scale

pytestmark = needs_browser


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = scale(load_workload("moe"), load_cluster("mi300x"), (1, 2, 4))
    return write_scaling_page(tmp_path_factory.mktemp("page") / "scaling.html", found)


@pytest.mark.parametrize("size", [LAPTOP, PHONE], ids=["laptop", "phone"])
def test_figures_are_drawn_and_nothing_is_wider_than_the_screen(
    browser: Browser, page: Path, size: tuple[int, int]
) -> None:
    with opened(browser, page.as_uri(), size) as shown:
        until(shown, "Boolean(document.querySelector('.plot')._fullLayout)")
        assert shown.evaluate("document.documentElement.scrollWidth") <= size[0]
        lines = shown.evaluate("document.querySelector('.plot').data.length")
        assert lines == 3  # plain, fused, ideal
        shown.evaluate("document.querySelector('.overlay').scrollIntoView()")
        lanes = until(
            shown, "document.querySelector('[data-overlay]').layout?.yaxis?.ticktext?.join(' ')"
        )
        assert "compute" in lanes
        assert "network" in lanes
