"""Where the time went that overlap did not save: overlapped minus ideal, taken apart.

Ideal is the longer of compute and communication, each alone. The rank that ends last is looked at,
and its compute lane, where time is spent in the fixed parts of pieces, in their bodies, or waiting:

    overlapped = fixed parts + bodies + waiting

Let `compute` be the whole GEMM alone, in a fixed part and a body of its own. Then

    decomposition          bodies of the pieces, each alone with its operands at hand, minus the
                           body of the whole: what cutting costs, gather and scatter included
    contention             bodies as they ran, minus the same bodies alone (remote operands read
                           over idle links): what running beside communication costs
    launch                 fixed parts of the pieces minus that of the whole: kernel starts, gaps
                           between kernels, adaptive decisions
    exposed_communication  waiting (signals included), and what reading remote operands over idle
                           links adds to a body, minus the waiting that ideal has too:
                           max(0, communication - compute); no less than 0
    hidden                 where that difference is negative, it is here instead: part of the
                           other losses fell into time in which even ideal waits

and the five add up to overlapped - ideal exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.simulate.result import Simulation


@dataclass(frozen=True)
class Losses:
    """Seconds lost against ideal, by cause; see the module's first lines for each."""

    exposed_communication: float
    decomposition: float
    contention: float
    launch: float
    hidden: float

    @property
    def total(self) -> float:
        return (
            self.exposed_communication
            + self.decomposition
            + self.contention
            + self.launch
            + self.hidden
        )


def losses(overlapped: Simulation, compute: Simulation, communication: float) -> Losses:
    """The losses of a simulation against the simulated whole GEMM and `communication` seconds."""
    pieces = overlapped.compute_pieces(overlapped.last_rank)
    whole = compute.compute_pieces(0)
    launch = sum(p.launch for p in pieces)
    ran = sum(p.end - p.body for p in pieces)
    alone = sum(p.alone for p in pieces)
    local = sum(p.local for p in pieces)
    waited = overlapped.seconds - launch - ran + alone - local
    exposed = waited - max(0.0, communication - compute.seconds)
    return Losses(
        exposed_communication=max(0.0, exposed),
        decomposition=local - sum(p.end - p.body for p in whole),
        contention=ran - alone,
        launch=launch - sum(p.launch for p in whole),
        hidden=min(0.0, exposed),
    )
