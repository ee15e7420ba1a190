"""What a measurement makes of its rounds."""

from __future__ import annotations

import pytest

from weft.measure.measurement import percent_by_round


def test_a_machine_that_slows_down_between_rounds_does_not_lift_a_schedule_above_the_ideal():
    # Serial, overlapped, compute and communication of a call that hides 90 % of what it can.
    calls = (2.0, 1.0526315789, 1.0, 1.0)
    speeds = (1.0, 1.0, 1.5, 1.5, 1.5)
    rounds = [[seconds * speed for speed in speeds] for seconds in calls]
    assert percent_by_round(*rounds) == pytest.approx(90.0, abs=0.1)
    # By medians over all rounds, arms that were measured in other rounds do not belong together.
    late = [rounds[0], rounds[1], [1.5, 1.5, 1.5, 1.5, 1.5], rounds[3]]
    assert percent_by_round(*late) == pytest.approx(90.0, abs=0.1)


def test_no_gain_is_zero_and_a_call_as_long_as_compute_is_all():
    assert percent_by_round([2.0], [2.0], [1.0], [1.0]) == 0.0
    assert percent_by_round([2.0], [1.0], [1.0], [1.0]) == 100.0
