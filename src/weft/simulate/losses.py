"""Divides the loss of an overlapped run (its time minus the ideal time) into causes.

The ideal is the longer of compute and communication, each alone. The compute lane of the rank that
ends last spends its time in the fixed parts of pieces, in their bodies, or waiting:

    overlapped = fixed parts + bodies + waiting

Let `compute` be the time of the whole GEMM alone, which has a fixed part and a body. Then

    decomposition          the bodies of the pieces, each alone with local operands, minus the body
                           of the whole: the cost of cutting, with gather and scatter
    contention             the bodies as they ran, minus the same bodies alone (remote operands
                           read over idle links): the cost of communication beside them
    launch                 the fixed parts of the pieces minus that of the whole: kernel starts,
                           gaps between kernels, adaptive decisions
    exposed_communication  waiting (with signals), plus the time that reading remote operands over
                           idle links adds to a body, minus the waiting that the ideal has too:
                           max(0, communication - compute); at least 0
    hidden                 the same difference if it is negative: part of the other losses fell
                           into time in which the ideal waits, too

and the five add up exactly to overlapped - ideal.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.simulate.result import Simulation


@dataclass(frozen=True)
class Losses:
    """The seconds lost against the ideal, by cause. The docstring of the module explains each."""

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
