"""Collectives as rounds: over one axis of a cluster (the devices of a node, or an axis of the
network), or flat over several axes. There are `n` ranks. A shard is a rank's part of the gathered
whole; a piece is what a rank sends to one other rank.

    direct            every rank sends to all others at once: one latency
    ring              half to each of the two neighbours: n - 1 rounds
    one-way           only to the next neighbour: n - 1 rounds
    halving-doubling  with partners n/2, n/4, ... 1 away, with growing sizes: log2 n rounds
    tree              all-reduce over two binary trees, pipelined: 2 log2 n latencies
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil, log2, prod

from weft.errors import Unsupported
from weft.simulate.cluster.rounds import Move, Round
from weft.simulate.cluster.wiring import Axes, Wiring

LEVEL = ("direct", "ring", "one-way", "halving-doubling", "tree")
"""The algorithms of a single level."""


def over_axis(wiring: Wiring, kind: str, total: float, axis: int, algorithm: str) -> list[Round]:
    """The rounds of a collective over one axis. `total`: the bytes of the gathered result, of the
    input of a reduce-scatter or all-to-all, or of the vector of an all-reduce."""
    n = wiring.shape[axis]
    if n == 1 or total <= 0.0:
        return []
    if kind == "all_to_all":
        return _exchange(wiring, axis, total / n, algorithm)
    if kind == "all_reduce" and algorithm == "tree":
        return _tree(wiring, axis, total)
    gathering = _gather(wiring, axis, total / n, algorithm)
    return _of_gather(kind, gathering)


def flat(wiring: Wiring, kind: str, total: float, axes: Axes, algorithm: str) -> list[Round]:
    """The rounds of a collective that treats the ranks along several axes as one line."""
    wide = tuple(axis for axis in axes if wiring.shape[axis] > 1)
    world = prod(wiring.shape[axis] for axis in wide)
    if world == 1 or total <= 0.0:
        return []
    if algorithm == "direct":
        return _of_gather(kind, [_to_all(wiring, wide, total / world)], exchange=True)
    if len(wide) == 1:
        return over_axis(wiring, kind, total, wide[0], algorithm)
    if algorithm in ("ring", "one-way") and kind != "all_to_all":
        return _of_gather(kind, _long_ring(wiring, wide, total / world, algorithm == "ring"))
    if algorithm == "halving-doubling" and kind != "all_to_all":
        gathering, held = [], total / world
        for axis in reversed(wide):
            gathering += _gather(wiring, axis, held, algorithm)
            held *= wiring.shape[axis]
        return _of_gather(kind, gathering)
    raise Unsupported(
        f"{kind} over several levels has no {algorithm}; "
        f"use direct, or hierarchical:{algorithm} which takes level after level"
    )


def _of_gather(kind: str, gathering: list[Round], exchange: bool = False) -> list[Round]:
    """A reduce-scatter is an all-gather backwards; an all-reduce is both."""
    if kind == "all_gather" or (kind == "all_to_all" and exchange):
        return gathering
    scattering = [
        replace(r, summed=sum(m.size * m.count for m in r.moves)) for r in reversed(gathering)
    ]
    return scattering if kind == "reduce_scatter" else [*scattering, *gathering]


def _gather(wiring: Wiring, axis: int, shard: float, algorithm: str) -> list[Round]:
    n = wiring.shape[axis]
    if algorithm == "direct":
        return [_to_all(wiring, (axis,), shard)]
    if algorithm == "one-way" or (algorithm == "ring" and n == 2):
        return [Round((Move(shard, wiring.at(axis, 1)),), n - 1)]
    if algorithm == "ring":
        return [Round(_both(wiring, axis, shard, shard), n - 1)]
    if algorithm == "halving-doubling":
        rounds = []
        for step in range(_power(n)):
            # On a ring, pairs load a link as if all ranks sent in the same direction.
            move = Move(shard * (1 << step), wiring.at(axis, n >> (step + 1)))
            rounds.append(Round((move,)))
        return rounds
    raise Unsupported(f"only all_reduce has the algorithm {algorithm}; use direct or ring")


def _exchange(wiring: Wiring, axis: int, piece: float, algorithm: str) -> list[Round]:
    n = wiring.shape[axis]
    if algorithm == "direct":
        return [_to_all(wiring, (axis,), piece)]
    if algorithm == "one-way" or (algorithm == "ring" and n == 2):
        # Pieces are passed on until they arrive, so each round sends fewer.
        return [Round((Move(piece * k, wiring.at(axis, 1)),)) for k in range(n - 1, 0, -1)]
    if algorithm == "ring":
        half, rounds = n // 2, []
        for step in range(1, half + 1):
            up = sum(0.5 if 2 * far == n else 1.0 for far in range(step, half + 1))
            rounds.append(Round(_both(wiring, axis, 2 * piece * up, 2 * piece * up)))
        return rounds
    if algorithm == "halving-doubling":
        distances = [n >> (step + 1) for step in range(_power(n))]
        return [Round((Move(piece * n / 2, wiring.at(axis, d)),)) for d in distances]
    raise Unsupported(f"only all_reduce has the algorithm {algorithm}; use direct or ring")


def _tree(wiring: Wiring, axis: int, total: float) -> list[Round]:
    """Two binary trees, each for half of the vector. An inner rank of one tree is a leaf of the
    other. Every rank sends as much as in a ring, up and down, in a stream of small parts."""
    if wiring.is_ring(axis):
        raise Unsupported("a tree needs a switch or a mesh; over the links of a ring use ring")
    n = wiring.shape[axis]
    size = 2.0 * total * (n - 1) / n
    return [Round((Move(size, wiring.at(axis, 1)),), 1, 2.0 * ceil(log2(n)), size / 2.0)]


def _long_ring(wiring: Wiring, axes: Axes, shard: float, both: bool) -> list[Round]:
    """Rings through all devices of all nodes, one for every device of a node. Each ring enters and
    leaves a node at another device, so of all rings through a device one crosses the network
    there, and the others continue inside the node."""
    world = prod(wiring.shape[axis] for axis in axes)
    inner, outer = axes[0], axes[1]
    n = wiring.shape[inner]
    moves = []
    for step, share in ((1, 0.5), (-1, 0.5)) if both else ((1, 1.0),):
        across = list(wiring.at(inner, step))
        across[outer] = step % wiring.shape[outer]
        moves.append(Move(share * shard * (n - 1) / n, wiring.at(inner, step)))
        moves.append(Move(share * shard / n, tuple(across)))
    return [Round(tuple(moves), world - 1)]


def _to_all(wiring: Wiring, axes: Axes, size: float) -> Round:
    others = prod(wiring.shape[axis] for axis in axes) - 1
    return Round((Move(size, axes=axes, count=others),))


def _both(wiring: Wiring, axis: int, up: float, down: float) -> tuple[Move, ...]:
    return (Move(up / 2, wiring.at(axis, 1)), Move(down / 2, wiring.at(axis, -1)))


def _power(n: int) -> int:
    if n & (n - 1):
        raise Unsupported(
            f"halving-doubling needs a power of two on every level, not {n}; use ring or direct"
        )
    return n.bit_length() - 1
