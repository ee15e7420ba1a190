"""One call of an operator: the ranks agree on what it is, and its plan runs.

A rank expects its peers to propose the same as in its last call with the same local sizes, so a
known call starts its local work at once. Engines compare the headers before anything moves. If the
expectation was wrong (the shard of a peer has another size now), the call is planned again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch

from weft import fabric as fabrics
from weft.errors import Error, Unsupported
from weft.fabric import Fabric
from weft.fabric.interface import (
    NOTHING_EXPOSED,
    Call,
    Disagree,
    Exposed,
    NotShared,
    QuickProgram,
    StepFlight,
)
from weft.fabric.proposal import Items, Proposal
from weft.plan.lane_parts import parts_of
from weft.plan.tasks import Plan, Plannable
from weft.plan.verify import verify
from weft.run import record
from weft.run.lane import run_lane
from weft.run.session import Runner, Session, tally_of
from weft.schedule import Schedule
from weft.strategy import Strategy
from weft.timeline import Timeline

CHOSEN = "chosen"
"""The item of rank 0's header with the schedule that it has chosen for all ranks, and the
reason."""

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""The types of tensors that are no subclass with a meaning of its own."""

in_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_FAKING = [torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.FUNCTIONAL]

Tensors = dict[str, torch.Tensor]
NO_SPANS = Timeline(())
Combine = Callable[[Sequence[Proposal]], Plannable]
Outputs = Callable[[Plannable], Tensors]


class Request(NamedTuple):
    """A call of an operator on this rank, ready to run.

    schedule: None if rank 0's header carries it. combine: makes the operation from the proposals of
    all ranks, or raises `Mismatch`. inputs: by buffer name; `exposed` has those that peers may
    read. outputs: makes this rank's outputs for an operation. observe: called with the seconds of
    the call. entered: this rank has already entered the call, with this proposal and this memory,
    and its peers propose another call than expected. adapt: converts the inputs for the schedule,
    if that is known only when the ranks have met.
    """

    proposal: Proposal
    asked: str
    schedule: Schedule | Strategy | None
    why: str
    combine: Combine
    inputs: Tensors
    exposed: Exposed
    outputs: Outputs
    observe: Callable[[float], None] | None = None
    entered: bool = False
    adapt: Callable[[Schedule | Strategy, Tensors], Tensors] | None = None


def carry_out(session: Session, request: Request) -> Tensors:
    """Carries out a call; returns its outputs by buffer name."""
    try:
        return _carry_out(session, request, expects=not request.entered)
    except NotShared:
        return _carry_out(session, request._replace(entered=False), expects=False)


def _carry_out(session: Session, request: Request, expects: bool) -> Tensors:
    """The same. expects: whether this rank expects the same plan as in the last such call."""
    fabric, proposal = session.fabric, request.proposal
    recording = record.active
    with fabric.lock:
        started = time.perf_counter()
        runner = session.runners.get(proposal.signature) if expects else None
        expected, exposed = None, request.exposed
        if runner is not None:
            expected = runner.program
            if not expected.shares:
                proposal, exposed = proposal.unshared, NOTHING_EXPOSED
        with fabric.call(proposal, exposed, expected, request.entered) as call:
            while True:
                if runner is None:
                    runner = _agree(session, call, request)
                results = request.outputs(runner.plan.operation)
                inputs, adapt = request.inputs, request.adapt
                if adapt is not None:
                    inputs = adapt(runner.plan.schedule, inputs)
                tensors = {**inputs, **results}
                try:
                    timeline = _run(runner, call, tensors, recording is not None)
                    break
                except Disagree:
                    runner = None
        why = request.why or runner.why
        seconds = session.finished(runner, why, started, timeline)
        if recording is not None:
            _note(recording, fabric, runner, why, seconds, timeline)
        if request.observe is not None:
            request.observe(seconds)
        return results


def repeat(
    session: Session,
    runner: Runner,
    proposal: Proposal,
    why: str,
    tensors: Tensors,
    exposed: Exposed,
    started: float,
) -> float | None:
    """Repeats a call whose program is quick; returns its seconds since `started`. None if the
    headers of the ranks differ from the last time: this rank has then entered the call, and it must
    be planned again. The caller holds the lock of the fabric."""
    program = cast(QuickProgram, runner.program)
    if not program.once(proposal, tensors, exposed):
        return None
    return session.finished(runner, why or runner.why, started, NO_SPANS)


def _note(
    recording: record.Recording,
    fabric: Fabric,
    runner: Runner,
    why: str,
    seconds: float,
    timeline: Timeline,
) -> None:
    plan = runner.plan
    layer, backward = recording.layers.now()
    called = record.Called(
        plan.operation.name,
        plan.operation.label,
        layer,
        backward,
        fabric.rank,
        str(plan.schedule),
        runner.asked,
        why,
        seconds,
        plan.bytes_by_engine(fabric.rank).get("direct", 0),
        fabric.link,
    )
    recording.add(called, timeline)


def _run(runner: Runner, call: Call, tensors: Tensors, recorded: bool) -> Timeline:
    program = runner.program
    flight = program.start(call, tensors, recorded)
    try:
        if program.computes:
            run_lane(runner.parts, cast(StepFlight, flight), tensors, recorded)
        return flight.end().timeline()
    except Disagree:
        raise
    except BaseException:
        flight.cancel()
        raise


def _agree(session: Session, call: Call, request: Request) -> Runner:
    """Reads the proposals of all ranks, and prepares their plan unless it is prepared already."""
    fabric = session.fabric
    if request.schedule is not None:
        call.label = f"{request.proposal.operation}, {request.schedule}"
    proposals = call.proposals()
    signatures = tuple(proposal.signature for proposal in proposals)
    runner = session.runners.get(signatures)
    if runner is None:
        schedule, why = request.schedule, ""
        if schedule is None:
            name, why = dict(proposals[0].own)[CHOSEN]
            schedule = Schedule.parse(name)
        plan = fabric.lower(request.combine(proposals), schedule)
        verify(plan)
        runner = prepared(fabric, plan, request.exposed, signatures, why, request.asked)
        session.keep(signatures, runner)
    if runner.program.shares and not all(proposal.shares for proposal in proposals):
        raise NotShared("a rank has not exposed its memory")
    session.keep(request.proposal.signature, runner)
    runner.tally.why = request.why or runner.why
    return runner


def prepared(
    fabric: Fabric,
    plan: Plan,
    exposed: Exposed,
    signatures: Sequence[int],
    why: str,
    asked: str,
) -> Runner:
    """A plan prepared for this rank."""
    program = fabric.prepare(plan, fabric.slots(exposed), signatures)
    parts = parts_of(plan, fabric.rank) if program.computes else []
    return Runner(plan, program, parts, why, asked, tally_of(plan, asked))


def meet(fabric: Fabric, what: str, own: Items) -> list[Items]:
    """Exchanges one item of every rank in a call in which nothing moves. Raises `Mismatch` if a
    rank makes another call."""
    with fabric.call(Proposal(what, own=own).checked()) as call:
        return [proposal.own for proposal in call.proposals()]


def refusal(error: Exception) -> Error:
    """What a caller gets, and its peers hear, if checks of arguments raised an exception."""
    if isinstance(error, Error):
        return error
    refused = Unsupported(str(error).partition("\n")[0] or type(error).__name__)
    refused.__cause__ = error
    return refused


def no_transforms(what: str) -> Unsupported:
    """The error of a call inside a transform of torch.func."""
    return Unsupported(
        f"{what} was called inside vmap, grad, jvp or another transform of torch.func; call it "
        "outside of them (operators have gradients by torch.autograd)"
    )


def check_modes(what: str) -> None:
    """Raises if tensors have no values now: in transforms of torch.func, and in modes that make
    fake tensors."""
    if in_transform():
        raise no_transforms(what)
    if dispatch_modes() and any(map(torch._C._get_dispatch_mode, _FAKING)):
        raise Unsupported(f"{what} was called in a mode of fake tensors; call it outside of it")


def check_memory(name: str, tensor: torch.Tensor) -> None:
    """Raises unless the values of a tensor are in memory. Fake tensors and wrappers of others have
    none there, although they may say that they are on the CPU."""
    try:
        storage = tensor.untyped_storage()
        fake = type(tensor) not in PLAIN and storage.device != tensor.device
        if not fake and (storage.data_ptr() or not tensor.numel()):
            return
    except RuntimeError:  # it has no storage
        pass
    raise Unsupported(
        f"{name} has no values in memory: it is fake, it wraps other tensors, or its storage was "
        "freed; pass a plain tensor"
    )


def check_tensor(name: str, tensor: object, dimensions: Sequence[int]) -> torch.Tensor:
    """Raises unless `tensor` is in memory that has a fabric, with an allowed number of dimensions;
    returns it."""
    if not isinstance(tensor, torch.Tensor):
        raise Unsupported(f"{name} must be a tensor, not {type(tensor).__name__}")
    fabrics.check_device(name, tensor)
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise Unsupported(f"{name} is sparse or nested; pass a dense tensor")
    check_memory(name, tensor)
    if tensor.is_neg():
        raise Unsupported(f"{name} is a negated view; pass {name}.resolve_neg()")
    if tensor.dim() not in dimensions:
        allowed = " or ".join(str(d) for d in dimensions)
        raise Unsupported(
            f"{name} must have {allowed} dimensions, not {tensor.dim()} (shape "
            f"{tuple(tensor.shape)})"
        )
    return tensor
