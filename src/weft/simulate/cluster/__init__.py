"""Simulates collectives and whole training steps on clusters: one device represents all."""

from weft.simulate.cluster.ask import ALGORITHMS, CollectiveAnswer, ask, together
from weft.simulate.cluster.bound import bound
from weft.simulate.cluster.engine import ClusterKernel, ClusterTask, Ran, run
from weft.simulate.cluster.lowering import lower
from weft.simulate.cluster.plan_runs import run_plan
from weft.simulate.cluster.wiring import Axes, Wiring

__all__ = [
    "ALGORITHMS",
    "Axes",
    "ClusterKernel",
    "ClusterTask",
    "CollectiveAnswer",
    "Ran",
    "Wiring",
    "ask",
    "bound",
    "lower",
    "run",
    "run_plan",
    "together",
]
