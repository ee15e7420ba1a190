"""Tests of the device fabric run on loom, with the operators that the conformance tests have."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from loom_fabric import LoomPools, LoomRanks

sys.path.append(str(Path(__file__).parents[1] / "ops"))


def built() -> None:
    """Builds loom here, where no deadline runs; skips the test where it cannot be had."""
    from weft.loom import build

    reason = build.why_not()
    if reason:
        pytest.skip(reason)
    build.library()


@pytest.fixture
def loom(pools):
    """`loom(2, mode="late")`: two ranks on the emulated device, shared by tests that ask for the
    same; the detector looks at every run."""
    built()

    def get(world: int, mode: str = "eager", **settings) -> LoomRanks:
        own = pools.others.setdefault("loom", LoomPools(pools))
        return own.get(world, mode, **settings)

    return get


@pytest.fixture
def spoiled_loom(pools):
    """`spoiled_loom(2)`: ranks that a test may spoil, so that they are its own."""
    built()
    own = LoomPools(pools)
    yield lambda world: own.get(world).pool
    own.close()
