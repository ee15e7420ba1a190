"""Command variants of copy engines: which is best for a size on a machine, and what it takes."""

from __future__ import annotations

from weft.machine import Machine
from weft.plan.collective import COMMANDS, Collective, Kind, Variant, lower
from weft.plan.tasks import Copy, Plan
from weft.plan.verify import verify
from weft.simulate import run
from weft.simulate.cost.collective import VARIANTS, dma_variants


def plan_of(operation: Collective, variant: Variant, chunks: int = 1) -> Plan:
    """The plan of a variant, proved right."""
    plan = lower(operation, variant, chunks)
    verify(plan)
    return plan


def best(machine: Machine, kind: Kind, num_bytes: int, world: int) -> Variant:
    """The quickest variant for a size by the machine's description. num_bytes: of the gathered
    result, or of the input that is shared out."""
    like = "all_gather" if kind in ("broadcast", "gather") else "all_to_all"
    seconds = dma_variants(machine, kind if kind in VARIANTS else like, num_bytes, world)
    allowed = {
        Variant(command, prelaunch): seconds[command, prelaunch]
        for command in COMMANDS[kind]
        for prelaunch in (False, True)
        if (command, prelaunch) in seconds
    }
    return min(allowed, key=lambda variant: allowed[variant])


def simulated_seconds(plan: Plan, machine: Machine) -> float:
    """How long a collective takes on a machine, from the call until the host knows that it is over:
    the host waits for its engines one after the other."""
    engines = machine.engines
    flying = run(plan, machine).timeline().seconds
    lanes: dict[tuple[int, str], bool] = {}
    for task in plan.tasks:
        if isinstance(task, Copy):
            lanes[task.rank, task.lane] = task.prelaunched
    most = 0.0
    for rank in range(plan.operation.world):
        own = [prelaunched for (owner, _), prelaunched in lanes.items() if owner == rank]
        waits = (engines.collective_completion if p else engines.completion for p in own)
        most = max(most, sum(waits))
    return engines.collective + flying + most
