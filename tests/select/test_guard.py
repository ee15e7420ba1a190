"""The guard: tries a choice against serial and rivals, keeps the fastest, and says so."""

from __future__ import annotations

import pytest

from weft.schedule import Schedule
from weft.select.guard import CALLS, MOST_CALLS, TURNS, UNCOUNTED, Guard
from weft.select.heuristic import MOST_RIVALS, Choice

SERIAL, ADAPTIVE, SHARDS, DIRECT = map(
    Schedule.parse, ("serial@dma", "adaptive@dma", "shard-p2p@dma", "adaptive@direct")
)
CHOICE = Choice(ADAPTIVE, "by the rule")
RIVALLED = Choice(ADAPTIVE, "by the rule", SERIAL, (SHARDS, DIRECT))


def settle(seconds: dict[Schedule, float], choice: Choice = CHOICE) -> Guard:
    guard, calls = Guard(choice), 0
    while not guard.settled:
        guard.observe(seconds[guard.next.schedule])
        calls += 1
        assert calls <= MOST_CALLS
    return guard


def test_the_faster_one_stays():
    assert settle({ADAPTIVE: 1.0, SERIAL: 2.0}).choice == CHOICE
    fallen = settle({ADAPTIVE: 2.0, SERIAL: 1.0}).choice
    assert fallen.schedule == SERIAL
    assert fallen.why == (
        "adaptive@dma was chosen, but measured slower here than serial: 2e+03 ms against 1e+03 ms"
    )


def test_a_rival_that_is_measured_fastest_takes_over():
    fastest = {ADAPTIVE: 1.2, SERIAL: 1.1, SHARDS: 1.3, DIRECT: 1.0}
    found = settle(fastest, RIVALLED).choice
    assert found.schedule == DIRECT
    assert "measured slower here than adaptive@direct" in found.why
    assert settle({**fastest, ADAPTIVE: 0.9}, RIVALLED).choice == RIVALLED
    assert len(RIVALLED.rivals) == MOST_RIVALS


def test_a_choice_of_serial_is_tried_where_it_has_rivals():
    choice = Choice(SERIAL, "by the rule", SERIAL, (SHARDS,))
    assert settle({SERIAL: 2.0, SHARDS: 1.0}, choice).choice.schedule == SHARDS
    assert settle({SERIAL: 1.0, SHARDS: 2.0}, choice).choice == choice


def test_what_is_faster_than_serial_by_noise_alone_gives_way_to_it():
    for adaptive in (0.98, 1.02):
        fallen = settle({ADAPTIVE: adaptive, SERIAL: 1.0}).choice
        assert fallen.schedule == SERIAL
        assert "measured no faster here than serial" in fallen.why
    assert settle({ADAPTIVE: 0.95, SERIAL: 1.0}).choice == CHOICE
    near = {ADAPTIVE: 1.2, SERIAL: 1.02, SHARDS: 1.3, DIRECT: 1.0}
    assert settle(near, RIVALLED).choice.schedule == SERIAL


def test_a_rival_within_noise_changes_nothing():
    near = {ADAPTIVE: 1.02, SERIAL: 1.2, SHARDS: 1.3, DIRECT: 1.0}
    assert settle(near, RIVALLED).choice == RIVALLED


@pytest.mark.parametrize(("slow_turns", "stays"), [(1, True), (2, False)])
def test_what_is_faster_in_one_turn_only_is_noise(slow_turns, stays):
    guard = Guard(CHOICE)
    for number in range(2 * TURNS * CALLS):
        serial = guard.next.schedule.serial
        slow = number < 2 * CALLS * slow_turns and not serial
        guard.observe(3.0 if slow else 1.2 if serial else 1.0)
    assert guard.settled
    assert (guard.choice == CHOICE) == stays


def test_a_slow_moment_of_serial_does_not_make_it_slow():
    """Serial is slow in two of its three turns, but for one call."""
    guard = Guard(CHOICE)
    for number in range(2 * TURNS * CALLS):
        slow = number < 4 * CALLS and number != CALLS + UNCOUNTED and guard.next.schedule.serial
        guard.observe(1.3 if slow else 1.0)
    assert guard.choice.schedule == SERIAL


def test_calls_that_make_plans_and_one_slow_moment_do_not_count():
    guard = Guard(CHOICE)
    for number in range(2 * TURNS * CALLS):
        seconds = 2.0 if guard.next.schedule.serial else 1.0
        slow = number % CALLS < UNCOUNTED or number == UNCOUNTED
        guard.observe(50.0 if slow else seconds)
    assert guard.settled
    assert guard.choice == CHOICE


def test_it_ends_after_a_few_calls_and_then_costs_nothing():
    guard = Guard(CHOICE)
    ran = []
    for _ in range(2 * TURNS * CALLS + 3):
        ran.append(guard.next.schedule.serial)
        guard.observe(2.0 if ran[-1] else 1.0)
    assert ran == ([False] * CALLS + [True] * CALLS) * TURNS + [False] * 3


def test_unwatched_choices_and_those_without_another_are_not_tried():
    assert Guard(Choice(SERIAL, "")).settled
    assert Guard(CHOICE, watch=False).settled
