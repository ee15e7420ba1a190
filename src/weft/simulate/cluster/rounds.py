"""A collective as rounds: in each, every rank sends to ranks at the same distance.

A round ends when all of its bytes have arrived; then the next one begins. Equal moves are one move
with a count, and equal rounds are one round that repeats. So a collective of a thousand ranks is
only a few objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft.simulate.cluster.wiring import Axes, Draws, Name, Shift, Wiring

MOST_STEPS = 64
"""A stage with more equal rounds than this is simulated in this many steps of several rounds."""


@dataclass(frozen=True)
class Move:
    """Every rank sends `size` bytes to the rank at distance `shift`, or to each of the `count`
    other ranks along `axes`."""

    size: float
    shift: Shift = ()
    axes: Axes = ()
    count: int = 1


@dataclass(frozen=True)
class Round:
    """Moves that happen at once, repeated `repeat` times.

    `trips`: how many latencies follow each other (a tree has one for every level). `summed`: the
    bytes that are added when they have arrived.
    """

    moves: tuple[Move, ...]
    repeat: int = 1
    trips: float = 1.0
    summed: float = 0.0


@dataclass(frozen=True)
class Stream:
    """Equal flows of a round: the bytes that they draw together from each resource, after
    `latency` seconds."""

    latency: float
    amounts: Draws


def streams(wiring: Wiring, round_: Round) -> list[Stream]:
    """The flows of a round; equal flows are one."""
    found: dict[tuple[object, ...], Stream] = {}
    for move in round_.moves:
        if move.size <= 0.0:
            continue
        ways = wiring.ways(move.shift, move.axes)
        # The time of a network card for a message counts as the bytes it could have sent meanwhile.
        more = wiring.message_bytes
        for way in ways:
            key = (way.latency, *way.per_byte)
            stream = found.get(key)
            if stream is None:
                stream = found[key] = Stream(way.latency * round_.trips, {})
            for name, draw in way.per_byte.items():
                amount = move.size * draw + more * way.per_message.get(name, 0.0)
                stream.amounts[name] = stream.amounts.get(name, 0.0) + amount
    return list(found.values())


def alone(wiring: Wiring, rounds: Sequence[Round]) -> float:
    """The seconds of the rounds if nothing else runs: latency, then the busiest resource."""
    total = 0.0
    for round_ in rounds:
        moving = max(busy(wiring, [replace(round_, repeat=1)]).values(), default=0.0)
        latency = max((stream.latency for stream in streams(wiring, round_)), default=0.0)
        total += round_.repeat * (latency + moving + summing(wiring, round_))
    return total


def busy(wiring: Wiring, rounds: Sequence[Round]) -> dict[Name, float]:
    """The seconds for which the rounds use each resource."""
    load: dict[Name, float] = {}
    for round_ in rounds:
        for stream in streams(wiring, round_):
            for name, amount in stream.amounts.items():
                seconds = round_.repeat * amount / wiring.resource(name).capacity
                load[name] = load.get(name, 0.0) + seconds
    return load


def summing(wiring: Wiring, round_: Round) -> float:
    """The seconds of adding what has arrived: two reads and one write per byte."""
    rate = wiring.cluster.sum_bandwidth
    return 0.0 if rate is None else 3.0 * round_.summed / rate


def sent(rounds: Sequence[Round]) -> float:
    """The bytes that a rank sends."""
    return sum(r.repeat * sum(m.size * m.count for m in r.moves) for r in rounds)


def coarse(rounds: Sequence[Round]) -> list[tuple[Round, int]]:
    """The same rounds in fewer steps: (round, the number of its repetitions in one step).

    A step takes as long as its rounds one after another. Only other flows on the same links have
    their effect a little later.
    """
    found: list[tuple[Round, int]] = []
    for round_ in rounds:
        size = -(-round_.repeat // MOST_STEPS)
        whole, rest = divmod(round_.repeat, size)
        found.append((replace(round_, repeat=whole), size))
        if rest:
            found.append((replace(round_, repeat=1), rest))
    return found
