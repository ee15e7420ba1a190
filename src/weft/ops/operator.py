"""One operator: what is particular to it, and the one function that runs any of them.

An operator's file defines the function that users call and an `Operator`. Registering it makes it
`torch.ops.weft.NAME` with autograd and graph support on every device that has a fabric, and the
command line, benchmarks and tests find it by `operators()`.
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
from weft.run.session import Session
from weft.schedule import Schedule
from weft.select.decide import AnySchedule, Decision, decide, requested
from weft.strategy import Strategy

library = torch.library.Library("weft", "FRAGMENT")  # type: ignore[no-untyped-call]
"""Where `torch.ops.weft.*` are defined."""


class Renew(Error):
    """The ranks agree, but one had not known how large its result is; now it does. Bind again."""


class Output(NamedTuple):
    """The result `y` of an operator whose peers may store into it. out: the caller's tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    out: torch.Tensor | None


class Bound(NamedTuple):
    """The arguments of a call on this rank, checked.

    same: what must be equal on all ranks, beside the schedule. own: what may differ. key and
    expected: the sizes that a schedule is chosen for, and the operation if all ranks have them.
    shared: the names of the inputs that peers may read. outputs: makes this rank's outputs;
    `stored` instead of it where peers may store into the one output `y`. result: what the caller
    gets. work: see `select.decide`. workspaces: bytes by name that peers may touch, for a schedule
    or, for None, for any that rank 0 may have chosen. adapt: the inputs as a schedule wants them.
    after: is called when the call is over. combine: in place of the operator's, if it learns
    something for the next call.
    """

    same: Items
    own: Items
    key: Hashable
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
    """What is particular to an operator.

    schema: of `torch.ops.weft.NAME`. bind: checks the arguments on this rank. combine: the
    operation that the proposals of all ranks make, or `Mismatch`. kernel: takes the arguments of
    the schema; fake: their result without data. operation: the class of `weft.plan` that it runs.
    asked: the decision for a schedule argument; None if one is to be chosen.
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
    """Makes an operator known, to torch and to the rest of weft."""
    _operators[operator.name] = operator
    if operator.schema:
        name, define = operator.name, library.define
        define(operator.schema)  # type: ignore[no-untyped-call]
        # For the tensors of any device: the fabric of their device carries the call out.
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
    """The session of a group for calls on the device of a tensor. A device without a fabric is
    refused with the other checks, on every rank."""
    device = "cpu"
    if isinstance(tensor, torch.Tensor) and not tensor.is_cpu:
        device = tensor.device.type if tensor.device.type in fabrics.devices() else "cpu"
    return sessions.of(fabrics.of(group, device))


def run(
    operator: Operator,
    session: Session,
    schedule: object,
    *arguments: Any,
    output: PeerOutput | None = None,
) -> Any:
    """One call of an operator. output: the memory with which this rank has entered the call
    already, where it has."""
    for _ in range(3):
        try:
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
        decision = decide(session, name, bound.key, bound.expected, bound.work)
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
    """The call in the form in which it is carried out."""
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
    """Where the result `y` is made, and its memory that peers store into, if they do."""
    shape, dtype, out = stored
    if not in_kernel(fabric, schedule):
        return (lambda _: {"y": torch.empty(shape, dtype=dtype) if out is None else out}), {}
    if output is None:
        output = fabric.memory.output(shape, dtype, out)
    else:
        output = PeerOutput(output.tensor.view(shape), output.offset)
    tensor = output.tensor
    return (lambda _: {"y": tensor}), {"y": output}


def in_kernel(fabric: Fabric, schedule: AnySchedule | None) -> bool:
    """Whether a call communicates from inside its kernel, into the outputs of peers."""
    return isinstance(schedule, Schedule) and schedule.fusion == "kernel" and fabric.world > 1


def into(out: torch.Tensor | None, y: torch.Tensor) -> torch.Tensor:
    """y where the caller wants it: peers may have stored it elsewhere."""
    return y if out is None or out is y else out.copy_(y)
