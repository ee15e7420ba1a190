"""Fluid sharing: the rates of all active flows, from what they draw from resources.

A flow is a stream of bytes with a maximum rate (its cap), and a draw from each resource that it
uses, per byte of its stream. Rates are max-min fair. All rates rise together until a flow reaches
its cap or a resource is full. These flows stop rising, and the others continue. Some resources
serve requests in the order of arrival (`queued`). If the demand on one exceeds its capacity, all of
its flows, small ones too, are then slowed by the same factor.

Only a resource whose flows could together exceed its capacity (a tight one) can slow a flow. So a
change affects only the flows that are connected through tight resources, and the cost of an event
does not depend on how many other flows there are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_ROUNDING = 1e-9


class Resource:
    """A resource that flows share: a link, a port, an engine, the memory of a device."""

    __slots__ = ("asked", "capacity", "flows", "name", "queued", "tight")

    def __init__(self, name: tuple[str, int, int], capacity: float, queued: bool = False) -> None:
        self.name = name
        self.capacity = capacity
        self.queued = queued
        self.flows: dict[Flow, float] = {}
        self.asked = 0.0
        self.tight = False

    def __repr__(self) -> str:
        return f"Resource({self.name}, {self.capacity:g}, {len(self.flows)} flows)"


class Flow:
    """`size` bytes at no more than `cap` bytes per second, with draws on resources."""

    __slots__ = ("cap", "draws", "left", "owner", "rate", "since", "version")

    def __init__(
        self,
        owner: Any,
        size: float,
        cap: float,
        draws: tuple[tuple[Resource, float], ...],
        now: float,
    ) -> None:
        self.owner = owner
        self.left = size
        self.cap = cap
        self.draws = draws
        self.rate = 0.0
        self.since = now
        self.version = 0


class Sharing:
    """The active flows. After changes, `settle` computes the new rates."""

    def __init__(self) -> None:
        self._changed: dict[Flow, None] = {}
        self._touched: dict[Resource, bool] = {}

    def start(self, flow: Flow) -> None:
        for resource, draw in flow.draws:
            self._touch(resource)
            resource.flows[flow] = draw
            resource.asked += flow.cap * draw
        self._changed[flow] = None

    def stop(self, flow: Flow) -> None:
        for resource, draw in flow.draws:
            self._touch(resource)
            del resource.flows[flow]
            # Rounding errors add up; an empty resource resets them.
            resource.asked = resource.asked - flow.cap * draw if resource.flows else 0.0
        self._changed.pop(flow, None)

    def set_cap(self, flow: Flow, cap: float) -> None:
        for resource, draw in flow.draws:
            self._touch(resource)
            resource.asked += (cap - flow.cap) * draw
        flow.cap = cap
        self._changed[flow] = None

    def set_capacity(self, resource: Resource, capacity: float) -> None:
        self._touch(resource)
        resource.capacity = capacity

    def settle(self, now: float) -> list[Flow]:
        """Computes all rates; returns the flows whose rate has changed."""
        affected = self._changed
        joined: dict[Resource, None] = {}
        queue: list[Resource] = []
        for resource, was_tight in self._touched.items():
            resource.tight = resource.asked > resource.capacity * (1.0 + _ROUNDING)
            if was_tight or resource.tight:
                joined[resource] = None
                queue.append(resource)
        for flow in affected:
            _join(flow.draws, joined, queue)
        while queue:
            for flow in queue.pop().flows:
                if flow not in affected:
                    affected[flow] = None
                    _join(flow.draws, joined, queue)
        tight = [resource for resource in joined if resource.tight]
        fair = [resource for resource in tight if not resource.queued]
        rates = _fill(affected, fair) if fair else {flow: flow.cap for flow in affected}
        if len(fair) < len(tight):
            _slow_alike(rates, [resource for resource in tight if resource.queued])
        moved = []
        for flow, rate in rates.items():
            if rate != flow.rate:
                flow.left -= flow.rate * (now - flow.since)
                flow.since = now
                flow.rate = rate
                flow.version += 1
                moved.append(flow)
        self._changed, self._touched = {}, {}
        return moved

    def _touch(self, resource: Resource) -> None:
        if resource not in self._touched:
            self._touched[resource] = resource.tight


def _join(
    draws: Iterable[tuple[Resource, float]], joined: dict[Resource, None], queue: list[Resource]
) -> None:
    for resource, _ in draws:
        if resource.tight and resource not in joined:
            joined[resource] = None
            queue.append(resource)


def _fill(flows: Iterable[Flow], tight: list[Resource]) -> dict[Flow, float]:
    """Max-min fair rates: raise all together; stop those at their cap or on a full resource."""
    pending = dict.fromkeys(flows)
    left = {resource: resource.capacity for resource in tight}
    weight = {resource: sum(resource.flows.values()) for resource in tight}
    count = {resource: len(resource.flows) for resource in tight}
    rates: dict[Flow, float] = {}
    level = 0.0
    while pending:
        levels = {r: left[r] / weight[r] for r in tight if count[r]}
        # Levels never fall. Enforcing this prevents rounding from stopping a flow at zero.
        level = max(level, min(levels.values(), default=float("inf")))
        stopping = {flow: flow.cap for flow in pending if flow.cap <= level}
        if not stopping:
            full = [r for r, at in levels.items() if at <= level * (1.0 + _ROUNDING)]
            stopping = {flow: level for r in full for flow in r.flows if flow in pending}
        for flow, rate in stopping.items():
            del pending[flow]
            rates[flow] = rate
            for resource, draw in flow.draws:
                if resource in left:
                    left[resource] -= rate * draw
                    weight[resource] -= draw
                    count[resource] -= 1
    return rates


def _slow_alike(rates: dict[Flow, float], queued: list[Resource]) -> None:
    """Lowers rates until no queued resource exceeds its capacity. Every flow on one keeps the same
    share of its rate. Begins with the fullest resource."""
    pending = dict.fromkeys(rates)
    left = {resource: resource.capacity for resource in queued}
    asked = {r: sum(rates[flow] * draw for flow, draw in r.flows.items()) for r in queued}
    while True:
        shares = {r: left[r] / asked[r] for r in queued if asked[r] > left[r] * (1.0 + _ROUNDING)}
        if not shares:
            return
        fullest = min(shares, key=lambda r: shares[r])
        share = shares[fullest]
        for flow in fullest.flows:
            if flow not in pending:
                continue
            del pending[flow]
            for resource, draw in flow.draws:
                if resource in left:
                    asked[resource] -= rates[flow] * draw
                    left[resource] = max(0.0, left[resource] - share * rates[flow] * draw)
            rates[flow] *= share
        del left[fullest], asked[fullest]
        queued = [resource for resource in queued if resource is not fullest]
