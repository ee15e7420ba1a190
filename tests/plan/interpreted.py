"""What tests of plans share: every point of the design space, and plans proved and interpreted."""

from __future__ import annotations

import itertools

import numpy as np

from weft import Schedule
from weft.plan.interpret import interpret
from weft.plan.verify import verify
from weft.schedule import ENGINES

POSSIBLE = [
    schedule
    for point in itertools.product(
        (None, 0, 1, 2, 5, 64),
        ("peer", "all"),
        ("rows", "columns"),
        ("uniform", "local"),
        ("fused", "unfused", "adaptive"),
        ENGINES,
    )
    if (schedule := Schedule(*point)).impossible() is None
]


def proved(plan, seed: int):
    """Proves a plan and runs it in a random order: its inputs, small integers, and its outputs."""
    verify(plan)
    values = np.random.default_rng(seed)
    inputs = {
        (b.rank, b.name): values.integers(-4, 5, (b.rows, b.columns)).astype(float)
        for b in plan.buffers
        if b.kind == "input"
    }
    return inputs, interpret(plan, inputs, seed)
