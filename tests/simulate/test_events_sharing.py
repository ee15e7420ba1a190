"""Rates are max-min fair, whatever came and went before."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.simulate.sharing import Flow, Resource, Sharing


def _check(active: list[Flow], resources: list[Resource]) -> None:
    """Nobody could go faster without slowing someone who is no faster."""
    for resource in resources:
        used = sum(flow.rate * draw for flow, draw in resource.flows.items())
        assert used <= resource.capacity * (1 + 1e-6)
    for flow in active:
        assert 0.0 < flow.rate <= flow.cap * (1 + 1e-9)
        if flow.rate >= flow.cap * (1 - 1e-9):
            continue
        assert any(
            sum(f.rate * d for f, d in resource.flows.items()) >= resource.capacity * (1 - 1e-6)
            and flow.rate >= max(f.rate for f in resource.flows) * (1 - 1e-6)
            for resource, _ in flow.draws
        )


@given(st.integers(0, 10_000))
def test_rates_are_fair_after_any_sequence(seed: int) -> None:
    choice = random.Random(seed)
    resources = [Resource(("r", i, 0), choice.choice([1.0, 2.0, 5.0, 20.0])) for i in range(6)]
    sharing, active, now = Sharing(), [], 0.0
    for _ in range(30):
        now += choice.random()
        for _ in range(choice.randint(1, 3)):
            what = choice.random()
            if active and what < 0.35:
                sharing.stop(active.pop(choice.randrange(len(active))))
            elif active and what < 0.45:
                sharing.set_cap(choice.choice(active), choice.uniform(0.1, 4.0))
            elif what < 0.5:
                sharing.set_capacity(choice.choice(resources), choice.uniform(0.5, 10.0))
            else:
                used = choice.sample(resources, choice.randint(0, 3))
                draws = tuple((resource, choice.choice([0.25, 1.0, 2.0])) for resource in used)
                flow = Flow(None, 100.0, choice.uniform(0.1, 4.0), draws, now)
                active.append(flow)
                sharing.start(flow)
        sharing.settle(now)
        _check(active, resources)


def test_a_change_far_away_changes_nothing() -> None:
    near, far = Resource(("near", 0, 0), 1.0), Resource(("far", 0, 0), 1.0)
    sharing = Sharing()
    flows = [Flow(None, 1.0, 1.0, ((near, 1.0),), 0.0) for _ in range(2)]
    for flow in flows:
        sharing.start(flow)
    assert sharing.settle(0.0) == flows
    assert [flow.rate for flow in flows] == [0.5, 0.5]
    other = Flow(None, 1.0, 3.0, ((far, 1.0),), 0.0)
    sharing.start(other)
    assert sharing.settle(0.5) == [other]
    assert other.rate == 1.0


def test_what_was_done_before_a_change_counts() -> None:
    port = Resource(("port", 0, 0), 1.0)
    sharing = Sharing()
    first = Flow(None, 2.0, 1.0, ((port, 1.0),), 0.0)
    sharing.start(first)
    sharing.settle(0.0)
    second = Flow(None, 2.0, 1.0, ((port, 1.0),), 1.0)
    sharing.start(second)
    sharing.settle(1.0)
    assert first.left == pytest.approx(1.0)
    assert first.rate == second.rate == 0.5
