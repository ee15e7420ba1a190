"""Which cases run under a sanitizer, as a plugin of pytest; WEFT_SANITIZE=all takes all of them.

A test that runs on every fabric with several numbers of ranks does so with one of them: what
differs between worlds is how often native code runs, not which. The emulated device is left out:
its library links torch and is built elsewhere, without a sanitizer; `native/tests/loom` has its
runtime.
"""

from __future__ import annotations

import os

import pytest

WORLD = 3
"""The number of ranks that is taken, or the nearest one that the test has: with two, all peers are
neighbours."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("WEFT_SANITIZE") == "all":
        return
    chosen: dict[tuple[str, ...], tuple[int, pytest.Item]] = {}
    for item in items:
        parameters = dict(item.callspec.params) if hasattr(item, "callspec") else {}
        if "loom" in item.nodeid:
            continue
        key, far = (item.nodeid,), 0
        if "fabric" in parameters and "world" in parameters:
            far = abs(parameters.pop("world") - WORLD)
            key = (item.nodeid.split("[")[0], *map(str, parameters.items()))
        if key not in chosen or far < chosen[key][0]:
            chosen[key] = (far, item)
    kept = {id(item) for _, item in chosen.values()}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = [item for item in items if id(item) in kept]
