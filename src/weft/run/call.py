"""One call of an operator: the ranks agree on what it is, and its plan is run.

A rank predicts that its peers mean the same as when it last called with the same local sizes, so a
known call starts its local work at once; engines check the headers before anything moves. Where
the prediction fails (a peer's shard has another size now), the call is planned anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch

from weft.errors import Error, Unsupported
from weft.fabric import HostFabric
from weft.fabric.host import Shared
from weft.fabric.outcomes import OK
from weft.plan.tasks import Plan, Plannable
from weft.plan.verify import verify
from weft.run import record
from weft.run.executor import Runner
from weft.run.kernel import runner_of
from weft.run.proposal import Items, Proposal, check_same
from weft.schedule import Schedule
from weft.strategy import Strategy
from weft.timeline import Timeline

MAX_RUNNERS = 512
CHOSEN = "chosen"
"""What rank 0's header calls the schedule that it has chosen for all, and why."""

Tensors = dict[str, torch.Tensor]
Combine = Callable[[Sequence[Proposal]], Plannable]
Outputs = Callable[[Plannable, int], Tensors]


class Finished(NamedTuple):
    """What is known of a call once it is over; `weft.explain` puts it into words."""

    plan: Plan
    rank: int
    why: str
    seconds: float
    timeline: Timeline
    ended: float
    """By `time.perf_counter`."""


last: Finished | None = None
"""The last call of this process."""


def carry_out(
    fabric: HostFabric,
    proposal: Proposal,
    schedule: Schedule | Strategy | None,
    why: str,
    inputs: Mapping[str, torch.Tensor],
    shared: Sequence[str],
    combine: Combine,
    outputs: Outputs,
    workspaces: Mapping[str, int] = MappingProxyType({}),
    observe: Callable[[float], None] | None = None,
    landings: Mapping[str, int] = MappingProxyType({}),
    entered: bool = False,
) -> Tensors:
    """Carries out a call and gives its outputs by buffer name.

    shared: the inputs that peers may read. combine: the operation that the proposals of all ranks
    make, or `Mismatch`. outputs: makes the outputs of this rank for an operation. workspaces: the
    bytes of this rank's workspace that peers touch, by name; as headers say where it is, it is
    placed before the ranks have agreed, so its names are the same on all ranks, and its sizes
    follow from the rank's own arguments. schedule: None where rank 0's header has it, and why.
    observe: hears how long the call took. landings: where in this rank's part of the heap those
    outputs lie that peers store into, by name. entered: whether this rank is in the call already,
    with this proposal and these places, and has learnt that its peers mean another than expected.
    """
    global last
    with fabric.lock:
        started = time.perf_counter()
        call = fabric.call if entered else fabric.next_call()
        try:
            exposed = [inputs[name] for name in shared]
            placed, space = _place(fabric, call, proposal, exposed, workspaces)
            offsets = [offset for offset, _ in placed] + [s.offset for s in space.values()]
            slots = [*shared, *space]
            if fabric.world > 1:
                offsets += landings.values()
                slots += landings
            memory = {name: s.memory for name, s in space.items()}
            runner = None
            if not entered:
                runner = fabric.runners.get(proposal.signature)
                program = None if runner is None else runner.program
                fabric.enter(call, proposal.signature, offsets, proposal.blob, program, inputs)
            if runner is None:
                runner = _agree(fabric, call, proposal, schedule, combine, slots)
            while True:
                results = outputs(runner.plan.operation, fabric.rank)
                tensors = {**inputs, **results}
                timeline = runner.run(call, tensors, memory, record.active is not None)
                if timeline is not None:
                    break
                runner = _agree(fabric, call, proposal, schedule, combine, slots)
            outcome = fabric.native.done(call)
            if outcome[0] != OK:
                raise fabric.failure(outcome, runner.label, "its end")
            if placed and any(in_place for _, in_place in placed):
                # The caller may write its symmetric input as soon as the call returns.
                deadline = fabric.deadline_ns()
                fabric.wait(
                    lambda: fabric.native.wait_released(call, deadline),
                    runner.label,
                    "peers to finish reading this rank's symmetric memory",
                )
        except BaseException as error:
            break_off(fabric, call, error)
            raise
        if record.active is not None:
            record.active.timelines.append(timeline)
        ended = time.perf_counter()
        seconds = ended - started
        last = Finished(runner.plan, fabric.rank, why or runner.why, seconds, timeline, ended)
        if observe is not None:
            observe(seconds)
        return results


def break_off(fabric: HostFabric, call: int, error: BaseException) -> None:
    """Ends a call that an error has ended for this rank; the group is over unless all know why."""
    if not isinstance(error, Error):
        said = f"rank {fabric.rank} was interrupted by {type(error).__name__}"
        fabric.give_up(Error(said))
    fabric.native.done(call)


def refuse(fabric: HostFabric, operation: str, error: Exception) -> None:
    """Enters the call only to say why this rank cannot take part, so that every rank hears it."""
    with fabric.lock:
        if fabric.world == 1 or fabric.broken is not None:
            return
        _say(fabric, fabric.next_call(), operation, error)


def _place(
    fabric: HostFabric,
    call: int,
    proposal: Proposal,
    tensors: Sequence[torch.Tensor],
    workspaces: Mapping[str, int],
) -> tuple[list[tuple[int, bool]], dict[str, Shared]]:
    """Puts tensors where peers can read them, and provides workspace that they may touch; where
    that does not fit, every rank hears it."""
    if fabric.world == 1:
        return [], {}
    try:
        placed = [fabric.share(tensor) for tensor in tensors]
        space = {n: fabric.shared_workspace(n, size) for n, size in workspaces.items()}
        return placed, {**space, **fabric.standing()}
    except Error as error:
        _say(fabric, call, proposal.operation, error)
        raise


def _say(fabric: HostFabric, call: int, operation: str, error: Exception) -> None:
    """Enters a call with an error in place of a proposal, and waits until all ranks can hear it."""
    # Cut so that it always fits into a header: a character takes up to six bytes there.
    said = str(error)[:600] or type(error).__name__
    proposal = Proposal(operation, error=said)
    fabric.native.enter(call, proposal.signature, [], proposal.blob)
    deadline = fabric.deadline_ns()
    fabric.wait(lambda: fabric.native.agree(call, [], deadline), operation, "all ranks to enter")
    fabric.native.done(call)


def meet(fabric: HostFabric, what: str, own: Items) -> list[Items]:
    """What every rank brings to a call in which nothing moves; `Mismatch` if one is elsewhere."""
    with fabric.lock:
        call = fabric.next_call()
        proposal = Proposal(what, own=own).checked()
        fabric.native.enter(call, proposal.signature, [], proposal.blob)
        try:
            return [met.own for met in _proposals(fabric, call, what)]
        finally:
            fabric.native.done(call)


def _agree(
    fabric: HostFabric,
    call: int,
    proposal: Proposal,
    schedule: Schedule | Strategy | None,
    combine: Combine,
    slots: Sequence[str],
) -> Runner:
    """Reads what every rank means, and makes the runner for it (or finds the one made before)."""
    doing = proposal.operation if schedule is None else f"{proposal.operation}, {schedule}"
    proposals = _proposals(fabric, call, doing)
    signatures = tuple(p.signature for p in proposals)
    runner = fabric.runners.get(signatures)
    if runner is None:
        why = ""
        if schedule is None:
            name, why = dict(proposals[0].own)[CHOSEN]
            schedule = Schedule.parse(name)
        plan = fabric.lower(combine(proposals), schedule)
        verify(plan)
        runner = runner_of(plan, fabric, signatures, slots, why)
        _keep(fabric, signatures, runner)
    _keep(fabric, proposal.signature, runner)
    return runner


def _proposals(fabric: HostFabric, call: int, doing: str) -> list[Proposal]:
    """What every rank means to do in a call, once all have entered it and mean the same."""
    deadline = fabric.deadline_ns()
    fabric.wait(
        lambda: fabric.native.agree(call, [], deadline), doing, "all ranks to enter the call"
    )
    proposals = [Proposal.read(fabric.native.header(call, r)) for r in range(fabric.world)]
    check_same(proposals, call)
    return proposals


def _keep(fabric: HostFabric, key: object, runner: Runner) -> None:
    """Remembers a runner; the oldest goes when there are too many (every batch size makes one)."""
    runners = fabric.runners
    runners.pop(key, None)
    if len(runners) >= MAX_RUNNERS:
        del runners[next(iter(runners))]
    runners[key] = runner


def check_tensor(name: str, tensor: object, dimensions: Sequence[int]) -> torch.Tensor:
    """A CPU tensor with an allowed number of dimensions, or one sentence."""
    if not isinstance(tensor, torch.Tensor):
        raise Unsupported(f"{name} must be a tensor, not {type(tensor).__name__}")
    if tensor.device.type != "cpu":
        raise Unsupported(f"{name} is on {tensor.device}; the host fabric takes CPU tensors")
    if tensor.dim() not in dimensions:
        allowed = " or ".join(str(d) for d in dimensions)
        raise Unsupported(
            f"{name} must have {allowed} dimensions, not {tensor.dim()} (shape "
            f"{tuple(tensor.shape)})"
        )
    return tensor
