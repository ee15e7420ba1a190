"""Tests of loom share one build, which is kept between runs of the tests, and rank processes."""

from __future__ import annotations

import pytest
from loom_ranks import LoomPool

from weft.loom import build


@pytest.fixture(scope="session", autouse=True)
def library():
    """The library, built if this machine has not yet; without it there is nothing to test."""
    reason = build.why_not()
    if reason:
        pytest.skip(reason)
    return build.library()


@pytest.fixture(scope="session")
def loom_pools(library, pools):
    """`loom_pools(2, queues=1)`: ranks with loom loaded, shared by tests that ask for the same."""
    made: dict[tuple, LoomPool] = {}

    def get(world: int, **settings) -> LoomPool:
        key = (world, *sorted(settings.items()))
        if key in made and made[key].pool.broken:
            made.pop(key).close()
        if key not in made:
            made[key] = LoomPool(world, **settings)
        return made[key]

    yield get
    for pool in made.values():
        pool.close()
