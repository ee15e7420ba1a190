"""One call of an operator, whichever it is: bind the arguments, decide, propose, run the plan.

`run` is the one function that carries out all operators. A known call (`known.py`) goes straight to
its program.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version

from weft import fabric as fabrics
from weft.errors import Error, interrupted_by
from weft.fabric import Fabric, KnownCalls, is_set
from weft.fabric.interface import NOTHING_EXPOSED, PeerOutput, QuickProgram
from weft.fabric.proposal import Items, proposal_of
from weft.ops import modes
from weft.ops.aliasing import any_aliased
from weft.ops.first_use import check_first_use
from weft.ops.known import Adapt, Again, Known, Operands, Output, key_of
from weft.plan.tasks import Plannable
from weft.run import record as recording
from weft.run import session as sessions
from weft.run.call import (
    CHOSEN,
    NO_SPANS,
    Combine,
    Request,
    Tensors,
    carry_out,
    check_modes,
    refusal,
    repeat,
)
from weft.run.ranges import NOTHING, profiled, range_of
from weft.run.results import empty, maker
from weft.run.session import Runner, Session
from weft.schedule import Schedule
from weft.select import auto
from weft.select.decide import AnySchedule, Decision, decide
from weft.strategy import Strategy

if TYPE_CHECKING:
    from weft.ops.operator import Operator


class Renew(Error):
    """The ranks agree, but one did not know the size of its result before. It does now, so the
    arguments must be bound again."""

    def __init__(self, size: Any) -> None:
        super().__init__(f"a result has the size {size}")
        self.size = size


class Bound(NamedTuple):
    """The arguments of a call on this rank, checked.

    same: the items that must be equal on all ranks, beside the schedule. own: those that may
    differ. key and expected: the sizes for which a schedule is chosen, and the operation if all
    ranks have these sizes. shared: the names of the inputs that peers may read. inputs, result,
    outputs and stored: see `Operands`. work: see `select.decide`. workspaces: bytes by name that
    peers may touch, for a schedule or, for None, for any that rank 0 may have chosen. adapt:
    converts the inputs for a schedule. after: called with the key (see `known.py`) when the call
    has ended. combine: replaces the operator's, to keep something for the next call. as_made: see
    `Known`.

    again: makes the operands from the arguments, in this call and in later ones whose arguments
    have the same layouts. No other function may then keep a tensor (except `after`).
    """

    same: Items
    own: Items
    key: Hashable | Callable[[], Hashable]
    expected: Callable[[], Plannable]
    inputs: Tensors | None = None
    result: Callable[[Tensors], Any] | None = None
    shared: tuple[str, ...] = ()
    outputs: Callable[[Plannable], Tensors] | None = None
    stored: Output | None = None
    work: int = 1
    workspaces: Callable[[AnySchedule | None], Mapping[str, int]] | None = None
    adapt: Adapt | None = None
    after: Callable[[Hashable | None, Request], None] | None = None
    combine: Combine | None = None
    again: Again | None = None
    as_made: bool = True


def session_for(group: dist.ProcessGroup | None, tensor: object) -> Session:
    """The session of a group for calls on the device of a tensor; if a rank has no tensor at all,
    on torch's default device. A device without a fabric is refused by the checks of the arguments,
    on every rank."""
    device = "cpu"
    if not isinstance(tensor, torch.Tensor):
        device = torch.get_default_device().type if tensor is None else device
    elif not tensor.is_cpu:
        device = tensor.device.type
    if device == "cpu" or device not in fabrics.devices():
        return sessions.of(fabrics.of(group))
    session = sessions.of(fabrics.of(group, device))
    check_first_use(session)
    return session


def run(
    operator: Operator,
    session: Session,
    schedule: object,
    *arguments: Any,
    output: PeerOutput | None = None,
    key: Hashable | None = None,
) -> Any:
    """One call of an operator. output: the memory with which this rank has already entered the
    call, if it has. key: see `known.key_of`, if the caller has it already."""
    if operator.repeats and key is None:
        key = key_of(operator.name, schedule, arguments)
    out = arguments[-1]  # or, for some operators, another argument that is no tensor
    for _ in range(3):
        try:
            known = session.known.get(key)
            again = (
                type(known) is Known
                and output is None
                and known.holds()
                # Layouts do not tell where `out` lies.
                and (out is None or not any_aliased(out, arguments[:-1]))
            )
            with range_of(operator.name) if profiled() else NOTHING:
                if again:
                    made = _run_known(session, cast(Known, known), schedule, arguments)
                else:
                    made = _bind_and_run(operator, session, schedule, arguments, output, key)
        except Renew:
            session.known.pop(key, None)
            continue
        if out is not None:
            written(out)
        return made
    raise AssertionError("sizes that all ranks know cannot be unknown again")


def written(out: object) -> None:
    """Tells autograd that a result, or a list of them, has new values, as torch does for `out`: a
    backward pass that needs the old ones raises. Native code that writes them does not."""
    made: list[Any] = out if type(out) is list else [out]
    if made and isinstance(made[0], torch.Tensor):
        increment_version(made)


def _run_known(session: Session, known: Known, schedule: object, arguments: tuple[Any, ...]) -> Any:
    assert known.again is not None
    started = time.perf_counter()
    fabric, proposal, why = session.fabric, known.proposal, known.decision.why
    runner = session.runners.get(proposal.signature)
    quick = runner is not None and runner.program.quick and recording.active is None
    output: PeerOutput | None = None
    try:
        operands = known.again(*arguments)
        if runner is not None and quick:
            inputs, _, outputs, stored = operands
            if known.adapt is not None:
                inputs = known.adapt(cast(Schedule, runner.plan.schedule), inputs)
            if stored is not None:
                placed = known.decision.placed if runner.program.shares else None
                outputs, output = _stored(fabric, placed, stored, None)
            assert outputs is not None
            results = outputs(runner.plan.operation)
    except Exception as error:
        fabric.refuse(proposal.operation, error)
        raise
    if runner is None or not quick:
        return operands.result(_carry_out(session, known, operands, None)[0])
    exposed = known.exposed(inputs, output) if runner.program.shares else NOTHING_EXPOSED
    tensors = {**inputs, **results}
    with fabric.lock:
        seconds: float | None = 0.0
        try:
            seconds = repeat(session, runner, proposal, why, tensors, exposed, started)
            if seconds is None:
                results = _carry_out(session, known, operands, output, entered=True)[0]
        except BaseException as error:
            if seconds is None:
                end_entered(fabric, error)
            _abandon(fabric, output)
            raise
        if seconds is not None and known.decision.observe is not None:
            known.decision.observe(seconds)
        made = operands.result(results)
        if seconds is not None and _stays(known, arguments):
            _make_native(session, runner, known, schedule, arguments, tensors, made)
    return made


def _stays(known: Known, arguments: tuple[Any, ...]) -> bool:
    """Whether nothing but the arguments decides about such a call, and it makes its own result."""
    return arguments[-1] is None and known.as_made and not is_set("WEFT_SCHEDULE")


def _make_native(
    session: Session,
    runner: Runner,
    known: Known,
    schedule: object,
    arguments: tuple[Any, ...],
    tensors: Tensors,
    made: Any,
) -> None:
    """Lets native code recognise a known call from now on, if it can repeat it. made: its result
    just now."""
    program, proposal = cast(QuickProgram, runner.program), known.proposal
    alone = program.alone(proposal, tensors)
    if alone is None:
        return
    y, (x, w, *_) = tensors[alone.y], arguments
    weight = w[0] if type(w) is list else w
    if tensors["x"] is not x or tensors[alone.w] is not weight or _only(made) is not y:
        return
    why, observe = known.decision.why or runner.why, known.decision.observe

    def ended(started: float) -> None:
        seconds = session.finished(runner, why, started, NO_SPANS)
        if observe is not None:
            observe(seconds)

    def otherwise(
        arguments: tuple[Any, ...], y: torch.Tensor, started: float, number: int, outcome: Any
    ) -> torch.Tensor:
        try:
            if alone.go_on(number, outcome):
                ended(started)
                return y
            operands = known.again(*arguments[2:])  # type: ignore[misc]
            results = _carry_out(session, known, operands, None, entered=True)[0]
        except BaseException as error:
            end_entered(session.fabric, error)
            raise
        return cast(torch.Tensor, _only(operands.result(results)))

    session.part(KnownCalls, _native_calls).remember(
        (proposal.operation, schedule, *arguments),
        torch.is_grad_enabled(),
        alone.call,
        alone.block,
        alone.between,
        maker(tuple(y.shape), y.dtype),
        None if known.still is None else known.holds,
        ended,
        otherwise,
        alone.break_off,
    )


def _native_calls(session: Session) -> KnownCalls:
    calls = KnownCalls(session.fabric, session.fabric.group_ref)
    session.fabric.on_close(calls.forget)
    return calls


def _only(made: Any) -> Any:
    """The one tensor that a caller gets."""
    if type(made) is tuple:  # with the gathered rows, if the caller asked for them
        gathered, made = made
        if gathered is not None:
            return None
    return made[0] if type(made) is list else made


def _bind_and_run(
    operator: Operator,
    session: Session,
    schedule: object,
    arguments: tuple[Any, ...],
    output: PeerOutput | None,
    key: Hashable | None,
) -> Any:
    fabric, name = session.fabric, operator.name
    try:
        check_modes(f"weft.{name}")
        modes.check_tangents(arguments)
        if operator.repeats:  # others take few kinds of tensors, and refuse these
            *given, out = arguments
            arguments = (*map(modes.without_negated, given), out)
        decision = operator.asked(schedule)
        bound = operator.bind(session, *arguments)
    except Exception as error:
        refused = _refused(fabric, name, error)
        raise refused from refused.__cause__
    still: Callable[[Hashable], Decision | None] | None = None
    sizes: Hashable = None
    if decision is None:
        chosen_for = bound.key() if callable(bound.key) else bound.key
        decision = decide(session, name, chosen_for, bound.expected, bound.work)
        still, sizes = auto.of(session).current, (name, chosen_for)
    try:
        call = _known(operator, fabric, decision, bound)._replace(still=still, sizes=sizes)
        operands = _operands(bound, arguments)
    except Exception as error:
        refused = _refused(fabric, name, error)
        raise refused from refused.__cause__
    results, request = _carry_out(session, call, operands, output)
    if key is not None and call.again is not None and call.holds():
        session.remember(key, call)
    if bound.after is not None:
        bound.after(key, request)
    return operands.result(results)


def _refused(fabric: Fabric, name: str, error: Exception) -> Error:
    """The error to raise for an exception before a call has begun. All ranks hear of it first."""
    refused = refusal(error)
    fabric.refuse(name, refused)
    return refused


def _operands(bound: Bound, arguments: tuple[Any, ...]) -> Operands:
    if bound.again is not None:
        return bound.again(*arguments)
    assert bound.inputs is not None
    assert bound.result is not None
    return Operands(bound.inputs, bound.result, bound.outputs, bound.stored)


def _known(operator: Operator, fabric: Fabric, decision: Decision, bound: Bound) -> Known:
    """The call without its operands."""
    schedule, own = decision.schedule, bound.own
    if decision.chosen is not None:
        own = (*own, (CHOSEN, decision.chosen))
    what = "the strategy" if isinstance(schedule, Strategy) else "the schedule"
    workspaces: Mapping[str, int] = {}
    if bound.workspaces is not None and fabric.world > 1:
        workspaces = bound.workspaces(decision.placed)
    return Known(
        proposal_of(operator.name, (*bound.same, (what, decision.header)), own),
        decision,
        bound.combine or operator.combine,
        bound.shared,
        workspaces,
        bound.adapt,
        bound.again,
        as_made=bound.as_made,
    )


def _carry_out(
    session: Session,
    call: Known,
    operands: Operands,
    output: PeerOutput | None,
    entered: bool = False,
) -> tuple[Tensors, Request]:
    """Runs a call with its operands; returns its outputs by buffer name, and the request. entered:
    this rank has already entered the call, with `output` if that is not None."""
    fabric, decision = session.fabric, call.decision
    inputs, _, outputs, stored = operands
    adapt, entered = call.adapt, entered or output is not None
    try:
        if adapt is not None and decision.fused is None:
            inputs, adapt = adapt(decision.schedule, inputs), None
        if stored is not None:
            outputs, output = _stored(fabric, decision.placed, stored, output)
    except Exception as error:
        if not entered:
            fabric.refuse(call.proposal.operation, error)
        raise
    assert outputs is not None
    request = Request(
        call.proposal,
        decision.asked,
        decision.schedule,
        decision.why,
        call.combine,
        inputs,
        call.exposed(inputs, output),
        outputs,
        decision.observe,
        entered,
        adapt,
    )
    try:
        return carry_out(session, request), request
    except BaseException:
        _abandon(fabric, output)
        raise


def end_entered(fabric: Fabric, error: BaseException) -> None:
    """After an error in a call that this rank has entered: ends the group, unless all ranks raise
    the error. The fabric does so itself, but for an interrupt between two of its steps."""
    if not isinstance(error, Error):
        fabric.give_up(interrupted_by(error, fabric.rank))


def _abandon(fabric: Fabric, output: PeerOutput | None) -> None:
    """After a call that raised: a peer may still store into its result if the group has failed."""
    if fabric.broken is not None and output is not None:
        fabric.memory.abandon(output)


def _stored(
    fabric: Fabric, schedule: AnySchedule | None, stored: Output, output: PeerOutput | None
) -> tuple[Callable[[Plannable], Tensors], PeerOutput | None]:
    """The function that makes the result `y`, and its memory if peers store into it."""
    shape, dtype, out = stored
    if not in_kernel(fabric, schedule):
        # Copy engines write contiguous rows.
        given = out if out is not None and out.is_contiguous() else None
        y = empty(shape, dtype, fabric.device) if given is None else given
        return (lambda _: {"y": y}), None
    if output is None:
        output = fabric.memory.output(shape, dtype, out)
    else:
        output = PeerOutput(output.tensor.view(shape), output.offset)
    tensor = output.tensor
    return (lambda _: {"y": tensor}), output


def in_kernel(fabric: Fabric, schedule: AnySchedule | None) -> bool:
    """Whether the kernel of a call stores into the outputs of peers."""
    return isinstance(schedule, Schedule) and schedule.fusion == "kernel" and fabric.world > 1


def into(out: torch.Tensor | None, y: torch.Tensor) -> torch.Tensor:
    """y, copied into `out` if peers have stored it elsewhere."""
    return y if out is None or out is y else out.copy_(y)
