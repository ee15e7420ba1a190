"""`weft studio` in a real browser: dragged, typed into, exported from, reloaded, on a phone, in the
dark, and with the keyboard alone."""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import PHONE, needs_browser, opened, until
from playwright.sync_api import Browser, Page

pytestmark = needs_browser

SMALL = "?m=4096&n=4096&k=4096&world=2"
CONFIG = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "intermediate_size": 5632,
}


@pytest.fixture(scope="module")
def link() -> Iterator[str]:
    command = [sys.executable, "-m", "weft", "studio", "--no-browser", "--json"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    said = ""
    while not said.rstrip().endswith("}"):
        line = server.stdout.readline()
        assert line, "the studio ended before it said its link"
        said += line
    yield json.loads(said)["link"]
    server.send_signal(signal.SIGINT)
    assert server.wait(60) == 0  # Ctrl-C ends it cleanly


@pytest.fixture
def page(browser: Browser, link: str) -> Iterator[Page]:
    with opened(browser, link + SMALL) as page:
        ready(page)
        yield page


def ready(page: Page) -> None:
    page.wait_for_selector("#curves .plot .main-svg")
    page.wait_for_selector("#tables tr.best")


def drag(page: Page, name: str, steps: int) -> None:
    """Moves a slider with the mouse, waiting for the redraw of every step as an eye does."""
    box = page.locator(f"#range-{name}").bounding_box()
    assert box is not None
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 0.4 * box["width"], y)
    page.mouse.down()
    for step in range(1, steps + 1):
        before = page.evaluate("weftRedraws.length")
        page.mouse.move(box["x"] + (0.4 + 0.02 * step) * box["width"], y)
        until(page, f"weftRedraws.length > {before}")
    page.mouse.up()


def test_four_timelines_follow_a_dragged_slider(page: Page) -> None:
    assert page.locator("#machines canvas").count() == 4
    before = page.locator("#machines .facts").inner_text()
    page.evaluate("weftRedraws.length = 0")
    drag(page, "m", 12)
    assert page.locator("#machines .facts").inner_text() != before
    spent = page.evaluate("weftRedraws")
    # Bounds a stall only: the time depends on the load of the machine, which a test cannot choose.
    assert statistics.median(spent) < 1500, spent


def test_what_is_typed_survives_a_reload(page: Page) -> None:
    page.fill("#in-k", "2048")
    page.press("#in-k", "Tab")
    until(page, "location.search.includes('k=2048')")
    page.reload()
    ready(page)
    assert page.input_value("#in-k") == "2048"
    page.fill("#in-k", "0")
    page.press("#in-k", "Tab")
    page.wait_for_selector("#error:visible")
    assert "k must be from 1" in page.inner_text("#error")
    page.fill("#in-k", "1024")
    page.press("#in-k", "Tab")
    page.wait_for_selector("#error", state="hidden")


def test_exports_and_copies(page: Page) -> None:
    with page.expect_download() as trace:
        page.click("#trace")
    events = json.loads(Path(trace.value.path()).read_text())["traceEvents"]
    assert any(event["ph"] == "X" for event in events)
    with page.expect_download() as picture:
        page.click("#png")
    assert Path(picture.value.path()).read_bytes().startswith(b"\x89PNG")
    page.click("[data-copy=command]")
    until(page, "document.getElementById('snippet').textContent.includes('--m 4096')")
    page.click("[data-copy=link]")
    until(page, "document.getElementById('snippet').textContent.includes('m=4096')")


def test_a_dropped_config_gives_layers(page: Page, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    page.set_input_files("#file", file)
    until(page, "document.getElementById('in-k').value === '2048'")
    assert "QKV" in page.locator("#layer option:checked").inner_text()


def test_two_machines_side_by_side(page: Page) -> None:
    page.select_option("[name=beside]", "h100")
    until(page, "document.querySelectorAll('#machines article').length === 2")
    until(page, "document.querySelectorAll('#tables table').length === 2")
    until(page, "document.getElementById('verdict').textContent.includes('as fast as')")


def test_the_keyboard_alone_moves_zooms_and_goes_back(page: Page) -> None:
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    before = page.input_value("#in-m")
    page.focus("#range-m")
    page.keyboard.press("ArrowRight")
    until(page, f"document.getElementById('in-m').value !== '{before}'")
    page.locator("#machines canvas").first.focus()
    page.keyboard.press("+")
    assert page.locator("#zoom-out").is_enabled()
    page.keyboard.press("Escape")
    assert page.locator("#zoom-out").is_disabled()
    names = page.evaluate(
        "[...document.querySelectorAll('input, select, canvas, button')].filter((one) =>"
        " !(one.getAttribute('aria-label') || one.labels?.length || one.textContent.trim()))"
        ".map((one) => one.outerHTML)"
    )
    assert names == []  # everything has a name for a screen reader


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_needs_no_sideways_scrolling(browser: Browser, link: str, scheme: str) -> None:
    with opened(browser, link + SMALL, PHONE, color_scheme=scheme) as page:
        ready(page)
        until(page, "document.documentElement.scrollWidth <= 390")
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == ("rgb(20, 23, 27)" if scheme == "dark" else "rgb(251, 251, 250)")


def test_two_tabs_at_once(browser: Browser, link: str, page: Page) -> None:
    with opened(browser, link + SMALL) as other:
        ready(other)
        for tab, k in ((page, "1024"), (other, "512")):
            tab.fill("#in-k", k)
            tab.press("#in-k", "Tab")
        for tab, k in ((page, "1024"), (other, "512")):
            until(tab, f"location.search.includes('k={k}')")
            tab.wait_for_selector("#tables:not(.waiting)")
            assert tab.locator("#error").is_hidden()
