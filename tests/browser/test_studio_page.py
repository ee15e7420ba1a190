"""`weft studio` in a real browser: dragged, typed into, exported from, reloaded, on a phone, in the
dark, and with the keyboard alone."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import PHONE, needs_browser, opened, until
from playwright.sync_api import Browser, Page

from weft.measure import busyness

pytestmark = needs_browser

REDRAWN = """(before) => new Promise((done) => {
  const look = () => (weftRedraws.length > before ? done() : setTimeout(look, 5));
  look();
})"""
PAINTED = """() => [...document.querySelectorAll("#live-result canvas")].map((one) =>
  one.getContext("2d").getImageData(0, 0, one.width, one.height).data.filter((v) => v).length)"""
LARGE = "?m=16384&n=28672&k=8192&world=8"
SMALL = "?m=4096&n=4096&k=4096&world=2"
CONFIG = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "intermediate_size": 5632,
}


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    command = [sys.executable, "-m", "weft", "studio", "--no-browser", "--json"]
    # Live runs of a user take turns; those of other tests have another folder for their lock.
    own = {**os.environ, "TMPDIR": str(tmp_path_factory.mktemp("studio"))}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=own)
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
    until(page, "document.querySelectorAll('#machines canvas').length >= 4")


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
        page.evaluate(REDRAWN, before)
    page.mouse.up()


def test_four_timelines_follow_a_dragged_slider(
    page: Page, link: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the movement of a slider to the frame with four new timelines: the clock is printed, and
    the time of the processors, which other programs hardly change, is bounded."""
    assert page.locator("#machines canvas").count() == 4
    for kept in ("", "&pinned=adaptive@dma"):  # all ranks of that one are simulated
        page.goto(link + LARGE + kept)
        ready(page)
        page.wait_for_selector("#curves:not(.waiting)")
        drag(page, "m", 2)  # caches are warm where somebody drags
        facts = page.locator("#machines .facts").inner_text()
        page.evaluate("weftRedraws.length = 0")
        load, own, clock = busyness.now(), processor_seconds(), time.monotonic()
        drag(page, "m", 16)
        own, clock = processor_seconds() - own, time.monotonic() - clock
        company = busyness.between(load, busyness.now())
        assert page.locator("#machines .facts").inner_text() != facts
        spent = page.evaluate("weftRedraws")
        median, used = statistics.median(spent), 1e3 * own / len(spent)
        others = None if company is None else company.others - own / clock
        with capsys.disabled():
            what = "with adaptive@dma kept" if kept else "as the page opens"
            said = "unknown" if others is None else f"{others:.1f} cores"
            print(
                f"\nslider to redraw, {what}: median {median:.0f} ms of {len(spent)}; processor "
                f"time of server and browser {used:.0f} ms each; used by others: {said}"
            )
        # The clock depends on what else the machine does: a quiet one of 2 cores showed 140-147 ms,
        # and 223-229 ms with adaptive@dma, of which all ranks are simulated.
        assert used < (250 if kept else 150), used


def processor_seconds() -> float:
    """What the processes below this one have used: the studio, its workers, and the browser."""
    times: dict[int, tuple[int, float]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            said = file.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        times[int(file.parent.name)] = (int(said[1]), float(said[11]) + float(said[12]))

    def ours(process: int) -> bool:
        while process in times and process != os.getpid():
            process = times[process][0]
        return process == os.getpid()

    ticks = sum(spent for one, (_, spent) in times.items() if one != os.getpid() and ours(one))
    return ticks / os.sysconf("SC_CLK_TCK")


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


def test_a_live_run_is_laid_over_the_prediction_of_this_computer(page: Page) -> None:
    page.select_option("[name=dtype]", "float8")
    page.click("#live-run")  # what cannot run here is refused, and what can is offered
    page.wait_for_selector("#live-fit:visible")
    assert "float32" in page.inner_text("#live-said")
    page.click("#live-fit")
    for name in "mnk":
        page.fill(f"#in-{name}", "256")
        page.press(f"#in-{name}", "Tab")
    page.select_option("#live-rounds", "7")
    page.evaluate(
        """() => {
          const line = document.getElementById("live-said");
          window.heard = [];
          new MutationObserver(() => heard.push(line.textContent)).observe(line,
            { childList: true, characterData: true, subtree: true });
        }"""
    )
    page.click("#live-run")
    page.wait_for_selector("#live-plot .main-svg")
    assert any(said.startswith("Round ") and "of 7" in said for said in page.evaluate("heard"))
    assert "float32" in page.inner_text("#live-case")
    assert "this computer" in page.inner_text("#live-where-said")
    bars = page.evaluate("document.getElementById('live-plot').data.map((one) => one.x.length)")
    assert bars == [6, 6]  # five schedules and auto, measured and predicted
    assert page.locator("#live-state").is_hidden()  # nothing went wrong while it was drawn
    assert min(page.evaluate(PAINTED)) > 100
    verdict = page.inner_text("#live-verdict")
    assert verdict.startswith(("Use ", "Overlap gains nothing", "Nothing is crowned: the machine"))
    assert page.locator("#live-stale").is_hidden()
    page.fill("#in-k", "512")
    page.press("#in-k", "Tab")
    page.wait_for_selector("#live-stale:visible")


def test_a_live_run_is_cancelled(page: Page) -> None:
    page.select_option("[name=dtype]", "float32")
    for name in "mnk":  # small enough for any machine, and its ranks take seconds to start
        page.fill(f"#in-{name}", "512")
        page.press(f"#in-{name}", "Tab")
    page.select_option("#live-rounds", "31")
    page.click("#live-run")
    page.wait_for_selector("#live-progress:visible")
    page.click("#live-cancel")
    until(page, "document.getElementById('live-said').textContent.startsWith('Cancelled')")
    assert page.locator("#live-cancel").is_hidden()
    assert page.locator("#live-result").is_hidden()


def test_a_map_is_cancelled_and_drawn_with_the_keyboard(page: Page) -> None:
    page.wait_for_selector("#curves:not(.waiting)")
    page.focus("#draw-map")
    page.keyboard.press("Enter")
    page.wait_for_selector("#cancel-map:visible")
    page.focus("#cancel-map")
    page.keyboard.press("Enter")
    page.wait_for_selector("#cancel-map", state="hidden")
    assert page.locator("#map").is_hidden()
    assert page.locator("#error").is_hidden()
    page.focus("#draw-map")
    page.keyboard.press("Enter")
    page.wait_for_selector("#map .main-svg")
    assert page.locator("#map .heatmaplayer").count() == 1
