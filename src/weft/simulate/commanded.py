"""How long a collective of copy engines takes, from the call until the host knows that it is over.

The plan (`plan/command_variants.py`) has the commands and the copies. Around them, the host starts
the collective, and in the end waits for its engines one after the other.
"""

from __future__ import annotations

from weft.machine import Machine
from weft.plan.tasks import Copy, Plan
from weft.simulate.simulation import run


def commanded_seconds(plan: Plan, machine: Machine) -> float:
    """Seconds of the plan of a `CommandedCollective` on a machine."""
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
