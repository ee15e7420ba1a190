"""One browser for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from chromium import Chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with Chromium.start() as started:
        yield started
