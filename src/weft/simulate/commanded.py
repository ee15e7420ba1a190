"""The time of a collective that runs on copy engines, from the call until the host knows its end.

The plan (`plan/command_variants.py`) contains the commands and the copies. In addition the host
starts the collective, and at the end waits for the engines one after another.
"""

from __future__ import annotations

from weft.machine import Machine
from weft.plan.tasks import Copy, Plan
from weft.simulate.simulation import run


def commanded_seconds(plan: Plan, machine: Machine) -> float:
    """The seconds of the plan of a `CommandedCollective` on a machine."""
    engines = machine.engines
    flying = run(plan, machine).timeline().seconds
    prelaunched: dict[tuple[int, str], bool] = {}
    for task in plan.tasks:
        if isinstance(task, Copy):
            prelaunched[task.rank, task.lane] = task.prelaunched
    waits = [0.0] * plan.operation.world
    for (rank, _), ahead in prelaunched.items():
        waits[rank] += engines.collective_completion if ahead else engines.completion
    return engines.collective + flying + max(waits)
