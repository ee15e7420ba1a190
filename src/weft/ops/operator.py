"""The description of an operator, and the one function that runs all of them.

The file of an operator defines the function that users call and an `Operator`. Registration makes
it `torch.ops.weft.NAME`, with autograd and graph support on every device that has a fabric. The
command line, benchmarks and tests find operators with `operators()`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from weft import fabric as fabrics
from weft.errors import Error
from weft.fabric import Fabric
from weft.fabric.interface import Exposed, PeerOutput
from weft.fabric.proposal import Items, Proposal, proposal_of
from weft.plan.tasks import Plannable
from weft.run import session as sessions
from weft.run.call import CHOSEN, Request, Tensors, carry_out
from weft.run.ranges import profiled, range_of
from weft.run.session import Session
from weft.schedule import Schedule
from weft.select.decide import AnySchedule, Decision, decide, requested
from weft.strategy import Strategy

library = torch.library.Library("weft", "FRAGMENT")  # type: ignore[no-untyped-call]
"""The library of `torch.ops.weft.*`."""


class Renew(Error):
    """The ranks agree, but one did not know the size of its result before. It does now, so the
    arguments must be bound again."""


class Output(NamedTuple):
    """The result `y` of an operator, if peers may store into it. out: the caller's tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    out: torch.Tensor | None


class Bound(NamedTuple):
    """The arguments of a call on this rank, checked.

    same: the items that must be equal on all ranks, beside the schedule. own: those that may
    differ. key and expected: the sizes for which a schedule is chosen, and the operation if all
    ranks have these sizes. shared: the names of the inputs that peers may read. outputs: makes this
    rank's outputs. stored: used instead of `outputs` if peers may store into the one output `y`.
    result: makes the result for the caller. work: see `select.decide`. workspaces: bytes by name
    that peers may touch, for a schedule or, for None, for any that rank 0 may have chosen. adapt:
    converts the inputs for a schedule. after: called when the call has ended. combine: replaces the
    operator's, to keep something for the next call.
    """

    same: Items
    own: Items
    key: Hashable | Callable[[], Hashable]
    expected: Callable[[], Plannable]
    inputs: Tensors
    result: Callable[[Tensors], Any]
    shared: tuple[str, ...] = ()
    outputs: Callable[[Plannable], Tensors] | None = None
    stored: Output | None = None
    work: int = 1
    workspaces: Callable[[AnySchedule | None], Mapping[str, int]] | None = None
    adapt: Callable[[AnySchedule | None, Tensors], Tensors] | None = None
    after: Callable[[Request], None] | None = None
    combine: Callable[[Sequence[Proposal]], Plannable] | None = None


@dataclass(frozen=True)
class Operator:
    """Everything that distinguishes one operator from others.

    schema: of `torch.ops.weft.NAME`. bind: checks the arguments on this rank. combine: makes the
    operation from the proposals of all ranks, or raises `Mismatch`. kernel: takes the arguments of
    the schema; fake: returns their result without data. operation: the class of `weft.plan` that it
    runs. asked: the decision for a schedule argument; None if a schedule must be chosen.
    """

    name: str
    operation: type[Any]
    bind: Callable[..., Bound]
    combine: Callable[[Sequence[Proposal]], Plannable]
    schema: str = ""
    kernel: Callable[..., Any] | None = None
    fake: Callable[..., Any] | None = None
    setup_context: Callable[..., None] | None = None
    backward: Callable[..., Any] | None = None
    asked: Callable[[Any], Decision | None] = requested


_operators: dict[str, Operator] = {}


def register(operator: Operator) -> Operator:
    """Registers an operator with torch and with the rest of weft."""
    _operators[operator.name] = operator
    if operator.schema:
        name, define = operator.name, library.define
        define(operator.schema)  # type: ignore[no-untyped-call]
        # For tensors of any device: the fabric of the device carries out the call.
        library.impl(name, operator.kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"weft::{name}", operator.fake, lib=library)
        if operator.backward is not None:
            torch.library.register_autograd(
                f"weft::{name}",
                operator.backward,
                setup_context=operator.setup_context,
                lib=library,
            )
    return operator


def operators() -> dict[str, Operator]:
    """All operators by name."""
    package = importlib.import_module("weft.ops")
    for module in pkgutil.iter_modules(package.__path__, "weft.ops."):
        importlib.import_module(module.name)
    return dict(_operators)


def session_for(group: dist.ProcessGroup | None, tensor: object) -> Session:
    """The session of a group for calls on the device of a tensor; if a rank has no tensor at all,
    on torch's default device. A device without a fabric is refused by the checks of the arguments,
    on every rank."""
    device = "cpu"
    if not isinstance(tensor, torch.Tensor):
        device = torch.get_default_device().type if tensor is None else device
    elif not tensor.is_cpu:
        device = tensor.device.type
    return sessions.of(fabrics.of(group, device if device in fabrics.devices() else "cpu"))


def run(
    operator: Operator,
    session: Session,
    schedule: object,
    *arguments: Any,
    output: PeerOutput | None = None,
) -> Any:
    """One call of an operator. output: the memory with which this rank has already entered the
    call, if it has."""
    for _ in range(3):
        try:
            if profiled():
                with range_of(operator.name):
                    return _run(operator, session, schedule, arguments, output)
            return _run(operator, session, schedule, arguments, output)
        except Renew:
            continue
    raise AssertionError("sizes that all ranks know cannot be unknown again")


def _run(
    operator: Operator,
    session: Session,
    schedule: object,
    arguments: tuple[Any, ...],
    output: PeerOutput | None,
) -> Any:
    fabric, name = session.fabric, operator.name
    try:
        decision = operator.asked(schedule)
        bound = operator.bind(session, *arguments)
    except Exception as error:
        fabric.refuse(name, error)
        raise
    if decision is None:
        key = bound.key() if callable(bound.key) else bound.key
        decision = decide(session, name, key, bound.expected, bound.work)
    try:
        request = _request(operator, fabric, decision, bound, output)
    except Exception as error:
        fabric.refuse(name, error)
        raise
    try:
        results = carry_out(session, request)
    except BaseException:
        if fabric.broken is not None:
            for peer_output in request.exposed.outputs.values():
                fabric.memory.abandon(peer_output)
        raise
    if bound.after is not None:
        bound.after(request)
    return bound.result(results)


def _request(
    operator: Operator,
    fabric: Fabric,
    decision: Decision,
    bound: Bound,
    output: PeerOutput | None,
) -> Request:
    """The call as a request."""
    schedule, own, inputs = decision.schedule, bound.own, bound.inputs
    if decision.chosen is not None:
        own = (*own, (CHOSEN, decision.chosen))
    what = "the strategy" if isinstance(schedule, Strategy) else "the schedule"
    proposal = proposal_of(operator.name, (*bound.same, (what, decision.header)), own)
    if bound.adapt is not None:
        inputs = bound.adapt(schedule, inputs)
    workspaces: Mapping[str, int] = {}
    if bound.workspaces is not None and fabric.world > 1:
        workspaces = bound.workspaces(schedule)
    outputs: Callable[[Plannable], Tensors] | None = bound.outputs
    stored: dict[str, PeerOutput] = {}
    if bound.stored is not None:
        outputs, stored = _stored(fabric, schedule, bound.stored, output)
    assert outputs is not None
    exposed = Exposed({name: inputs[name] for name in bound.shared}, workspaces, stored)
    return Request(
        proposal,
        decision.asked,
        schedule,
        decision.why,
        bound.combine or operator.combine,
        inputs,
        exposed,
        outputs,
        decision.observe,
        output is not None,
    )


def _stored(
    fabric: Fabric, schedule: AnySchedule | None, stored: Output, output: PeerOutput | None
) -> tuple[Callable[[Plannable], Tensors], dict[str, PeerOutput]]:
    """The function that makes the result `y`, and its memory if peers store into it."""
    shape, dtype, out = stored
    if not in_kernel(fabric, schedule):
        # Copy engines write contiguous rows.
        given = out if out is not None and out.is_contiguous() else None
        return (
            lambda _: {
                "y": torch.empty(shape, dtype=dtype, device=fabric.device)
                if given is None
                else given
            }
        ), {}
    if output is None:
        output = fabric.memory.output(shape, dtype, out)
    else:
        output = PeerOutput(output.tensor.view(shape), output.offset)
    tensor = output.tensor
    return (lambda _: {"y": tensor}), {"y": output}


def in_kernel(fabric: Fabric, schedule: AnySchedule | None) -> bool:
    """Whether the kernel of a call stores into the outputs of peers."""
    return isinstance(schedule, Schedule) and schedule.fusion == "kernel" and fabric.world > 1


def into(out: torch.Tensor | None, y: torch.Tensor) -> torch.Tensor:
    """y, copied into `out` if peers have stored it elsewhere."""
    return y if out is None or out is y else out.copy_(y)
