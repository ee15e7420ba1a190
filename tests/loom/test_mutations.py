"""The detector against the corpus: a wait that is left out is found, in every mode, every time; the
correct programs are said to be correct."""

from __future__ import annotations

import os

import pytest
from loom_corpus import PROGRAMS

MODES = ("eager", "late", "random")
RUNS = int(os.environ.get("WEFT_LOOM_RUNS", "6"))
"""Seeded runs of each correct program; the 1,005 runs of docs/loom.md are 67 of each."""


def test_the_corpus_is_large_enough():
    assert len(PROGRAMS) >= 12


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_missing_wait_is_found_in_every_mode(loom_pools, name):
    world, _ = PROGRAMS[name]
    pool = loom_pools(world)
    ranks, findings = pool.check(name)
    assert findings == []
    waits = sorted(set().union(*ranks))
    assert waits
    for wait in waits:
        for mode in MODES:
            pool = loom_pools(world)
            _, findings = pool.check(name, wait, mode, seed=len(wait))
            assert findings, f"{name} without {wait!r} was not found in mode {mode}"


@pytest.mark.parametrize("name", PROGRAMS)
def test_correct_programs_are_never_accused(loom_pools, name):
    world, _ = PROGRAMS[name]
    pool = loom_pools(world)
    for seed in range(RUNS):
        _, findings = pool.check(name, None, MODES[seed % 3], seed)
        assert findings == [], [f.text for f in findings]


@pytest.mark.parametrize("queues", [1, 2, 4])
@pytest.mark.parametrize("name", PROGRAMS)
def test_shared_queues_neither_hide_nor_make_findings(loom_pools, name, queues):
    world, _ = PROGRAMS[name]
    pool = loom_pools(world, queues=queues)
    ranks, findings = pool.check(name, None, "late")
    assert findings == [], [f.text for f in findings]
    wait = sorted(set().union(*ranks))[0]
    _, findings = pool.check(name, wait, "late")
    assert findings, f"{name} without {wait!r} was not found on {queues} queues"
