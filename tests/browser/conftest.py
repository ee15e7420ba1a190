"""One browser for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from chromium import PROGRAM
from playwright.sync_api import Browser, sync_playwright


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=PROGRAM, args=["--no-sandbox"])
        yield started
        started.close()
