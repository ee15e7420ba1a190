"""Pages in a headless Chromium of this system, driven by Playwright.

with opened(browser, link, LAPTOP) as page:
    page.click("#run")

A page that reports an error, or asks any other host for something, fails its test.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page

NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
PROGRAM = next((found for name in NAMES if (found := shutil.which(name))), None)
needs_browser = pytest.mark.skipif(PROGRAM is None, reason=f"none of {', '.join(NAMES)} is here")

LAPTOP, PHONE = (1366, 900), (390, 844)
WAIT = 300_000  # ms, on a machine with much else to do
OWN = ("file:", "data:", "blob:", "about:", "http://127.0.0.1:")


@contextmanager
def opened(
    browser: Browser, link: str, size: tuple[int, int] = LAPTOP, **options: Any
) -> Iterator[Page]:
    """The page at this link, in a window of this size and a profile of its own."""
    width, height = size
    phone = size == PHONE
    context = browser.new_context(
        viewport={"width": width, "height": height}, is_mobile=phone, has_touch=phone, **options
    )
    page, wrong = context.new_page(), []
    page.set_default_timeout(WAIT)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if _is_error(said) else None)
    page.on("request", lambda asked: None if asked.url.startswith(OWN) else wrong.append(asked.url))
    page.goto(link)
    yield page
    context.close()
    assert wrong == [], wrong


def until(page: Page, expression: str) -> Any:
    """Waits until an expression is true, and gives its value. Playwright's own wait evaluates a
    string in the page, which the studio's policy forbids."""
    end = time.monotonic() + WAIT / 1e3
    while not (value := page.evaluate(expression)):
        assert time.monotonic() < end, expression
        page.wait_for_timeout(20)
    return value


def _is_error(said: ConsoleMessage) -> bool:
    """What a page should not say. That the server refuses a wrong size is no error of the page."""
    return said.type == "error" and "400 (Bad Request)" not in said.text
