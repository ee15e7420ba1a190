"""Collectives and whole training steps on clusters: one device stands for all of them."""

from weft.simulate.cluster.ask import ALGORITHMS, Answer, ask, together
from weft.simulate.cluster.bound import bound
from weft.simulate.cluster.engine import Kernel, Ran, Task, run
from weft.simulate.cluster.lowering import lower
from weft.simulate.cluster.plans import run_plan
from weft.simulate.cluster.wiring import Axes, Wiring

__all__ = [
    "ALGORITHMS",
    "Answer",
    "Axes",
    "Kernel",
    "Ran",
    "Task",
    "Wiring",
    "ask",
    "bound",
    "lower",
    "run",
    "run_plan",
    "together",
]
