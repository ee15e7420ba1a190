"""The guard: tries a choice against serial, keeps the faster, and says so."""

from __future__ import annotations

from weft.schedule import Schedule
from weft.select.guard import BLOCK, Guard
from weft.select.heuristic import Choice

SERIAL = Schedule.parse("serial")
CHOICE = Choice(Schedule.parse("adaptive@dma"), "by the rule")


def settle(overlapped: float, serial: float, noise: float = 0.0) -> Guard:
    guard = Guard(CHOICE)
    while not guard.settled:
        is_serial = guard.next.schedule.serial
        guard.observe((serial if is_serial else overlapped) + noise)
        noise = 0.0
    return guard


def test_the_faster_one_stays():
    assert settle(1.0, 2.0).choice == CHOICE
    fallen = settle(2.0, 1.0).choice
    assert fallen.schedule == SERIAL
    assert "slower" in fallen.why
    assert "adaptive@dma" in fallen.why


def test_a_difference_within_noise_changes_nothing():
    assert settle(1.02, 1.0).choice == CHOICE


def test_a_first_call_that_makes_plans_does_not_count():
    assert settle(1.0, 2.0, noise=100.0).choice == CHOICE


def test_one_slow_moment_does_not_count():
    guard = Guard(CHOICE)
    for number in range(2 * BLOCK):
        seconds = 2.0 if guard.next.schedule.serial else 1.0
        guard.observe(50.0 if number == 2 else seconds)
    assert guard.settled
    assert guard.choice == CHOICE


def test_it_ends_after_a_few_calls_and_then_costs_nothing():
    guard = Guard(CHOICE)
    ran = []
    for _ in range(3 * BLOCK):
        ran.append(guard.next.schedule.serial)
        guard.observe(1.0)
    assert ran == [False] * BLOCK + [True] * BLOCK + [False] * BLOCK


def test_serial_and_unwatched_choices_are_not_tried():
    assert Guard(Choice(SERIAL, "")).settled
    assert Guard(CHOICE, watch=False).settled
