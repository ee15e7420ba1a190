"""Lowers a collective to tasks of one device: one stage, or one per level in pipelined chunks.

With one stage per level, only the necessary bytes cross the network. A gather uses the network
first, while a device still holds little, and the links inside the node last; a scatter does the
opposite. With chunks, one level works on a chunk while the next level works on the chunk before. On
a torus, chunks begin with different axes in turn, so that all axes are always busy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from weft.errors import Unsupported, nearest
from weft.plan.collective import UNROOTED, find_kind
from weft.simulate.cluster.algorithms import LEVEL, flat, over_axis
from weft.simulate.cluster.engine import ClusterTask
from weft.simulate.cluster.rounds import Round, alone, busy, sent
from weft.simulate.cluster.wiring import Axes, Name, Wiring

FLAT = ("direct", "ring", "one-way", "halving-doubling")
BY_LEVEL = ("hierarchical", "in-order")
CHUNKED = (*BY_LEVEL, "mixed", "tree")
DEFAULT_CHUNKS = 8
WINDOW = 2
"""The largest number of chunks by which a level is ahead of the next. The memory between them is
limited, and levels that share network cards must not starve the level that all others wait for."""

LEAST_SHARE = 0.01
_LETTERS = "xyzuvw"


@dataclass(frozen=True)
class Algorithm:
    """A name, and for `hierarchical` and `in-order` the algorithm of every level: inside a node,
    then between nodes. Without one, the fastest is used."""

    name: str
    levels: tuple[str, ...] = ()
    outward: bool = False  # the network before the node, where the others have it after

    @classmethod
    def parse(cls, text: str) -> Algorithm:
        name, _, rest = text.partition(":")
        known = (*FLAT, *CHUNKED)
        if name not in known:
            raise Unsupported(
                f"there is no algorithm {name!r}{nearest(name, known)}; known: auto, "
                f"{', '.join(known)}, and e.g. hierarchical:direct+ring (inside + between nodes)"
            )
        levels = tuple(rest.split("+")) if rest else ()
        if levels and name not in BY_LEVEL:
            raise Unsupported(f"{name} takes no levels; hierarchical:{rest} does")
        for level in levels:
            if level not in LEVEL:
                raise Unsupported(
                    f"no level does {level!r}{nearest(level, LEVEL)}; one of {', '.join(LEVEL)}"
                )
        if len(levels) > 2:
            raise Unsupported("name one algorithm for all levels, or two: inside+between")
        return cls(name, levels)

    def __str__(self) -> str:
        return self.name + (f":{'+'.join(self.levels)}" if self.levels else "")

    def at(self, axis: int) -> str | None:
        """The algorithm of an axis, if one was given."""
        if self.name == "tree":
            return "tree" if axis else None
        if not self.levels:
            return None
        return self.levels[min(axis, len(self.levels) - 1, 1)]


def lower(
    wiring: Wiring,
    kind: str,
    total: float,
    algorithm: str | Algorithm = "hierarchical",
    *,
    axes: Axes | None = None,
    chunks: int = DEFAULT_CHUNKS,
    name: str = "",
    after: tuple[int, ...] = (),
    first: int = 0,
    start: float | None = None,
    units: int = 0,
    lanes: str = "",
) -> list[ClusterTask]:
    """The tasks of a collective over the ranks along some axes (by default along all).

    `total`: the bytes of the gathered result, of the input of a reduce-scatter or all-to-all on
    each rank, or of the vector of an all-reduce. `first`: the position of the first task in the
    list of all tasks. The last task ends last. `start`: the seconds that the library takes to start
    and end it, by default those of the cluster.
    """
    if find_kind(kind).name not in UNROOTED:
        raise Unsupported(
            f"{kind} has no algorithms on a cluster; those in which all ranks do the same have: "
            f"{', '.join(UNROOTED)}"
        )
    if not 0 <= total < float("inf"):
        raise Unsupported(f"a collective cannot move {total} bytes")
    if chunks < 1:
        raise Unsupported(f"there must be at least 1 chunk, not {chunks}")
    chosen = Algorithm.parse(algorithm) if isinstance(algorithm, str) else algorithm
    axes = tuple(range(len(wiring.shape))) if axes is None else axes
    overhead = wiring.cluster.start if start is None else start
    head = name or kind
    if chosen.name in FLAT:
        rounds = flat(wiring, kind, total, axes, chosen.name)
        lane = lanes + ("inside" if axes == (0,) else "network")
        return [_task(head, lane, rounds, after, overhead, units)]
    frame = _Frame(head, after, overhead, units, lanes, chosen.name != "in-order")
    if chosen.name == "mixed":
        return _mixed(wiring, kind, total, axes, chunks, frame, first)
    return _pipeline(wiring, _chunks(wiring, kind, total, axes, chosen, chunks), frame, first)


Stages = list[tuple[int, list[Round]]]
"""The (axis, rounds) of a chunk, in order."""


@dataclass(frozen=True)
class _Frame:
    """The common properties of all tasks of a collective."""

    name: str
    after: tuple[int, ...]
    start: float
    units: int
    lanes: str
    bounded: bool = True
    weights: Mapping[int, float] = field(default_factory=dict)  # by axis


def _pipeline(wiring: Wiring, chunks: list[Stages], frame: _Frame, first: int) -> list[ClusterTask]:
    """The tasks of all stages of all chunks, and one task at the end that joins them."""
    tasks: list[ClusterTask] = []
    ends: list[int] = []
    earlier: dict[int, list[list[int]]] = {}  # the tasks of the chunks with the same stages
    for number, stages in enumerate(chunks):
        before = frame.after
        alike = earlier.setdefault(id(stages), [])
        ahead = alike[-WINDOW] if frame.bounded and len(alike) >= WINDOW else []
        places: list[int] = []
        for level, (axis, rounds) in enumerate(stages):
            axis_name = _axis_name(wiring, axis)
            label = f"{frame.name} {axis_name}"
            label += f" {number + 1}/{len(chunks)}" if len(chunks) > 1 else ""
            if level + 1 < len(ahead):
                before = (*before, ahead[level + 1])
            places.append(first + len(tasks))
            tasks.append(
                _task(
                    label,
                    frame.lanes + axis_name,
                    rounds,
                    before,
                    frame.start if not tasks else 0.0,
                    frame.units,
                    frame.weights.get(axis, 1.0),
                )
            )
            before = (places[-1],)
        alike.append(places)
        ends += places[-1:]
    if len(ends) != 1:
        tasks.append(
            _task(frame.name, frame.lanes + "done", [], tuple(ends) or frame.after, 0.0, 0)
        )
    return tasks


def _chunks(
    wiring: Wiring, kind: str, total: float, axes: Axes, algorithm: Algorithm, chunks: int
) -> list[Stages]:
    """The stages of every chunk. Chunks with equal stages share one object."""
    cut = [
        _stages(wiring, kind, total / chunks, axes, algorithm, turn)
        for turn in range(min(chunks, max(1, len(wiring.shape) - 1)))
    ]
    return [cut[number % len(cut)] for number in range(chunks)]


def _mixed(
    wiring: Wiring, kind: str, total: float, axes: Axes, chunks: int, frame: _Frame, first: int
) -> list[ClusterTask]:
    """Sends a share of the bytes through the levels in the opposite order, which loads the network
    more and the node less. The share is such that both are busy for the same time."""
    if kind == "all_to_all":
        raise Unsupported("all_to_all is not mixed: direct sends every byte once already")
    orders = (Algorithm("hierarchical", outward=True), Algorithm("hierarchical"))
    whole = [_chunks(wiring, kind, total, axes, order, chunks) for order in orders]
    share = _balance(*(_busy(wiring, cut) for cut in whole))
    if min(share, 1.0 - share) < LEAST_SHARE:  # too little for a separate pipeline
        share = float(round(share))
    shares = (share, 1.0 - share)
    cuts = [
        _chunks(wiring, kind, part * total, axes, order, chunks)
        for part, order in zip(shares, orders, strict=True)
    ]
    # On every level each of the two gets the share that it needs, so that they end together.
    needs = [{axis: _axis_seconds(wiring, cut, axis) for axis in axes} for cut in cuts]
    tasks: list[ClusterTask] = []
    ends = []
    for number, cut in enumerate(cuts):
        if shares[number] <= 0.0:
            continue
        weights = {
            axis: max(LEAST_SHARE, needs[number][axis] / sum(need[axis] for need in needs))
            for axis in axes
            if needs[number][axis]
        }
        lanes = frame.lanes + ("" if number else "outward ")
        tasks += _pipeline(
            wiring, cut, replace(frame, lanes=lanes, weights=weights), first + len(tasks)
        )
        ends.append(first + len(tasks) - 1)
    return [*tasks, _task(frame.name, frame.lanes + "done", [], tuple(ends), 0.0, 0)]


def _busy(wiring: Wiring, chunks: list[Stages]) -> dict[Name, float]:
    return busy(wiring, [r for stages in chunks for _, rounds in stages for r in rounds])


def _axis_seconds(wiring: Wiring, chunks: list[Stages], axis: int) -> float:
    own = [r for stages in chunks for at, rounds in stages if at == axis for r in rounds]
    return max(busy(wiring, own).values(), default=0.0)


def _balance(one: dict[Name, float], other: dict[Name, float]) -> float:
    """The share of `one` for which the busiest resource of both together is least busy."""
    names = {*one, *other}
    shares = {0.0, 1.0}
    for a in names:
        for b in names:
            rise = one.get(a, 0.0) - other.get(a, 0.0) - one.get(b, 0.0) + other.get(b, 0.0)
            if rise:
                shares.add(min(1.0, max(0.0, (other.get(b, 0.0) - other.get(a, 0.0)) / rise)))

    def busiest(share: float) -> float:
        return max(share * one.get(n, 0.0) + (1.0 - share) * other.get(n, 0.0) for n in names)

    return min(sorted(shares), key=busiest) if names else 0.0


def _task(
    name: str,
    lane: str,
    rounds: list[Round],
    after: tuple[int, ...],
    start: float,
    units: int,
    weight: float = 1.0,
) -> ClusterTask:
    return ClusterTask(
        name,
        lane,
        after=after,
        rounds=tuple(rounds),
        start=start,
        units=units,
        weight=weight,
        num_bytes=round(sent(rounds)),
    )


def _axis_name(wiring: Wiring, axis: int) -> str:
    if axis == 0:
        return "inside"
    return "network" if len(wiring.shape) == 2 else f"network {_LETTERS[axis - 1]}"


def _stages(
    wiring: Wiring, kind: str, total: float, axes: Axes, algorithm: Algorithm, turn: int
) -> Stages:
    """The stages of a chunk, level by level. `turn`: the axis at which it begins on a torus."""
    wide = [axis for axis in axes if wiring.shape[axis] > 1]
    between = [axis for axis in wide if axis]
    if between and algorithm.name == "hierarchical" and all(map(wiring.is_ring, between)):
        turn %= len(between)
        between = [*between[turn:], *between[:turn]]
    inside = [axis for axis in wide if not axis]
    # A scatter begins inside the node; a gather is the reverse.
    inward = [*between, *inside] if algorithm.outward else [*inside, *between]
    if kind == "all_to_all":
        if len(between) > 1 and algorithm.at(1) is None and not wiring.is_ring(between[0]):
            # Levels of switches share the network cards, so one pass over them is enough.
            there = (between[-1], flat(wiring, kind, total, tuple(between), "direct"))
            return [
                *((axis, _level(wiring, kind, total, axis, algorithm)) for axis in inside),
                there,
            ]
        return [(axis, _level(wiring, kind, total, axis, algorithm)) for axis in inward]
    scattering, held = [], total
    sizes = {}
    for axis in inward:
        sizes[axis] = held
        held /= wiring.shape[axis]
    if kind != "all_gather":
        scattering = [
            (axis, _level(wiring, "reduce_scatter", sizes[axis], axis, algorithm))
            for axis in inward
        ]
    if kind == "reduce_scatter":
        return scattering
    gathering = [
        (axis, _level(wiring, "all_gather", sizes[axis], axis, algorithm))
        for axis in reversed(inward)
    ]
    if kind == "all_reduce" and inward:
        # The last axis of the scatter is the first of the gather: an all-reduce along it.
        last = inward[-1]
        middle = _level(wiring, "all_reduce", sizes[last], last, algorithm)
        return [*scattering[:-1], (last, middle), *gathering[1:]]
    return gathering


def _level(wiring: Wiring, kind: str, total: float, axis: int, algorithm: Algorithm) -> list[Round]:
    named = algorithm.at(axis)
    if named == "tree" and kind != "all_reduce":
        named = None
    if named is not None:
        return over_axis(wiring, kind, total, axis, named)
    size = wiring.shape[axis]
    able = ["direct", "ring", *(["halving-doubling"] if not size & (size - 1) else [])]
    options = [over_axis(wiring, kind, total, axis, one) for one in able]
    return min(options, key=lambda rounds: alone(wiring, rounds))
