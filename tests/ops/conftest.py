"""On loom a call takes longer than on the host, so `make test` runs a part of the conformance tests
there: every operator with every schedule, the gradients of every operator, and one case of every
other test. WEFT_TEST_LOOM=all runs all of them."""

from __future__ import annotations

import os

ALWAYS = {
    "test_every_schedule_equals_plain_torch": (2, 3, 4),
    "test_gradients_equal_plain_torch": (3,),
}
"""Tests of which loom runs every operator, with the worlds."""


def pytest_collection_modifyitems(config, items) -> None:
    if os.environ.get("WEFT_TEST_LOOM", "") == "all":
        return
    others: dict[str, list] = {}
    dropped = set()
    for item in items:
        given = getattr(getattr(item, "callspec", None), "params", {})
        if getattr(given.get("fabric"), "name", "") != "loom":
            continue
        test = item.originalname
        if test not in ALWAYS:
            others.setdefault(test, []).append(item)
        elif given["world"] not in ALWAYS[test]:
            dropped.add(item)
    for number, test in enumerate(sorted(others)):  # another operator for every test
        cases = others[test]
        dropped.update(case for case in cases if case is not cases[7 * number % len(cases)])
    if dropped:
        config.hook.pytest_deselected(items=list(dropped))
        items[:] = [item for item in items if item not in dropped]
