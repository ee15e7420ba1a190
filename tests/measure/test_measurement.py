"""Figures of a measurement: ratios are taken within a round."""

from __future__ import annotations

import pytest

from weft.measure.measurement import percent_over_rounds
from weft.timeline import percent_of_ideal


def test_a_machine_that_changes_its_speed_does_not_distort_the_percent_of_ideal() -> None:
    speeds = (1.0, 1.0, 2.0, 2.0, 1.5)
    samples = {
        "serial@dma": [2.0 * speed for speed in speeds],
        "adaptive@dma": [1.25 * speed for speed in speeds],
        "compute": [1.0 * speed for speed in speeds],
        "communication": [1.0 * speed for speed in speeds],
    }
    truth = percent_of_ideal(2.0, 1.25, 1.0, 1.0)
    assert percent_over_rounds(samples, "adaptive@dma", "serial@dma") == pytest.approx(truth)
    # Another process disturbs compute in one round: its median is from a slower moment then.
    samples["compute"][0] *= 3.0
    medians = {name: sorted(values)[2] for name, values in samples.items()}
    assert percent_of_ideal(*medians.values()) > 100.0
    assert percent_over_rounds(samples, "adaptive@dma", "serial@dma") == pytest.approx(truth)
