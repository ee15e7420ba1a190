"""Simulates a plan on a machine: all ranks, or only rank 0 if all ranks mirror it."""

from __future__ import annotations

from weft.errors import Unsupported
from weft.machine import Machine
from weft.plan.tasks import Plan
from weft.simulate.beside import BesideEvents
from weft.simulate.events import Events
from weft.simulate.host import HostEvents
from weft.simulate.result import Simulation
from weft.simulate.symmetry import is_symmetric, ranks_of
from weft.strategy import Strategy
from weft.timeline import Timeline


def simulate(plan: Plan, machine: Machine) -> Timeline:
    """The timeline of the plan on the machine. All ranks make the call at time 0."""
    return run(plan, machine).timeline()


def run(plan: Plan, machine: Machine, *, fold: bool = True) -> Simulation:
    """Simulates the plan. `fold=False` simulates every rank even if one can represent all. On a
    host none can, because ranks may share a core. Nor can one if kernels wait for each other's
    signals, because its own signals would reach it at once."""
    check_fits(plan, machine)
    if machine.host is not None:
        pieces = HostEvents(plan, machine, machine.host).run(machine.launch.host)
        return Simulation(plan, machine, tuple(pieces), False)
    events = BesideEvents if isinstance(plan.schedule, Strategy) else Events
    ranks = ranks_of(plan)
    if fold and not plan.one_launch and len(ranks) > 1 and is_symmetric(plan, ranks):
        place = {task.id: index for tasks in ranks for index, task in enumerate(tasks)}
        first = ranks[0]
        after = [[first[place[other]].id for other in task.after] for task in first]
        pieces = events(plan, machine, first, after, True).run()
        return Simulation(plan, machine, tuple(pieces), True)
    after_all = [task.after for task in plan.tasks]
    pieces = events(plan, machine, plan.tasks, after_all, False).run()
    return Simulation(plan, machine, tuple(pieces), False)


def check_fits(plan: Plan, machine: Machine) -> None:
    """Raises if a plan has more ranks than the machine has devices, or needs more memory."""
    world = plan.operation.world
    if world > machine.links.world:
        raise Unsupported(
            f"{plan.operation.label} needs {world} devices; "
            f"{machine.name} has {machine.links.world}"
        )
    needed = [0] * world
    for buffer in plan.buffers:
        needed[buffer.rank] += buffer.num_bytes
    most = max(needed, default=0)
    if most > machine.memory.capacity:
        raise Unsupported(
            f"{plan.operation.label} with {plan.schedule} needs {most / 1e9:.1f} GB on each rank; "
            f"a device of {machine.name} has {machine.memory.capacity / 1e9:.1f} GB"
        )
