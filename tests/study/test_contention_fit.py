"""What the two numbers of contention are fitted to, and that the shipped pair holds."""

from __future__ import annotations

from math import sqrt

import pytest

from weft.machine import load
from weft.study.contention_fit import HALVES, TRIED, Try, attempt, with_contention

MI300X = load("mi300x")


def test_a_miss_is_in_points() -> None:
    ladder = {"dma": 70.0, "concurrent": 21.0}
    tried = Try(0.1, 1.5, {"fitted": ladder}, {"fitted": 1.57}, {"dma": 66.0, "concurrent": 21.0})
    assert tried.miss("fitted") == pytest.approx(sqrt((16 + 0 + 9) / 3))
    assert tried.mean("dma") == 70.0


def test_other_numbers_change_only_these() -> None:
    other = with_contention(MI300X, 0.1, 1.2)
    assert (other.links.interference, other.cores.memory_bytes_per_byte) == (0.1, 1.2)
    back = with_contention(other, MI300X.links.interference, MI300X.cores.memory_bytes_per_byte)
    assert back == MI300X


def test_the_shipped_numbers_hold_on_the_half_that_was_held_out() -> None:
    own = (MI300X.links.interference, MI300X.cores.memory_bytes_per_byte)
    assert own in TRIED
    found = attempt(MI300X, *own)
    assert max(found.miss(half) for half in HALVES) < 4.0
    assert found.miss("held out") < found.miss("fitted") + 0.5
    for name, known in found.published.items():
        assert abs(found.ladder["held out"][name] - known) < 5.0, name
    assert 1.5 <= found.largest["held out"] <= 1.65
