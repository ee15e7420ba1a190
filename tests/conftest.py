"""What tests with real ranks share: the pools, and the check that nothing is left behind."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile

import pytest
from rank_pools import Pool, Pools

# What weft keeps about this machine is the user's: tests, and ranks they start, have a place of
# their own, and choose by the default description of a host unless they say otherwise.
_CACHE = tempfile.mkdtemp(prefix="weft-tests-")
# The build of loom is the same for all tests and runs: it need not be made again.
_BUILDS = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
os.environ.setdefault("WEFT_LOOM_CACHE", os.path.join(_BUILDS, "weft", "loom"))
os.environ["XDG_CACHE_HOME"] = _CACHE
os.environ["WEFT_CALIBRATE"] = "0"


def pytest_unconfigure() -> None:
    shutil.rmtree(_CACHE, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def forked_launch():
    """Measurements in this process fork their ranks."""
    import forked_launch

    from weft.measure import rank_processes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_processes, "_start", forked_launch.start)
        yield


@pytest.fixture(scope="session")
def pools():
    """Pools of rank processes, one per world size and environment, for all tests."""
    shared_memory = set(os.listdir("/dev/shm"))
    pools = Pools()
    yield pools
    pools.close()
    assert multiprocessing.active_children() == []
    assert [f for f in set(os.listdir("/dev/shm")) - shared_memory if "weft" in f] == []


@pytest.fixture
def ranks(pools):
    """`ranks(3)`: the pool of three ranks that all tests share; `ranks(3, WEFT_FABRIC="flat")`:
    that of all tests with this environment."""

    def get(world: int, **environment: str) -> Pool:
        return pools.get(world, environment)

    return get


@pytest.fixture
def renewed_ranks(pools):
    """`renewed_ranks(3)`: three ranks in a group of this test alone, which it may spoil."""
    return lambda world: pools.get(world, {"WEFT_TESTS": "renewed"}).renew()


@pytest.fixture
def fresh_ranks(pools):
    """`fresh_ranks(3)`: three ranks of this test alone, closed after it."""

    def make(world: int, **environment: str) -> Pool:
        return pools.fresh(world, environment)

    yield make
    pools.close_fresh()


@pytest.fixture(scope="session")
def fidelity():
    """The simulator beside all measurements that are shipped, compared once for all tests."""
    from weft.simulate.cost.fidelity import compare

    return compare()
