"""Known calls: calls that are recognised by the layouts of their arguments.

Checking arguments, choosing a schedule and writing a header takes longer than a small product, and
most calls repeat an earlier one. Everything about such a call that follows from the layouts of its
arguments is therefore kept in the `Session`, by a key that contains all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.utils import _python_dispatch

from weft import fabric
from weft.fabric import is_set, layouts_of
from weft.fabric.interface import Exposed, PeerOutput
from weft.fabric.proposal import Proposal
from weft.plan.tasks import Plannable
from weft.run import record
from weft.run.call import PLAIN, Combine, Tensors, dispatch_modes, in_transform
from weft.run.ranges import profiled
from weft.schedule import Schedule
from weft.select.decide import AUTO, AnySchedule, Decision

fabric.watch(
    torch.is_grad_enabled,
    [torch._C._is_any_autocast_enabled, in_transform, profiled],
    [
        (vars(record), "active", None),
        (vars(forward_ad), "_current_level", -1),
        (vars(_python_dispatch), "_is_in_torch_dispatch_mode", False),
    ],
    dist.distributed_c10d._world,
)
again: Callable[[dist.ProcessGroup | None, tuple[Any, ...]], torch.Tensor | None] = fabric.again
"""The result of a call that is one native call (see `operator_call`), from its group and from the
operator's name, the schedule and the arguments; None if it is not. Not for compiled graphs."""

_STRIDED = torch.strided
_VALUES = frozenset({int, bool, str, type(None)})
_LIST = ...
"""Comes before the length of a list in a key, for no argument is equal to it."""


class Output(NamedTuple):
    """The result `y` of an operator, if peers may store into it. out: the caller's tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    out: torch.Tensor | None


class Operands(NamedTuple):
    """The tensors of one call. result: makes the result for the caller. outputs: makes this rank's
    outputs. stored: used instead of `outputs` if peers may store into the one output `y`."""

    inputs: Tensors
    result: Callable[[Tensors], Any]
    outputs: Callable[[Plannable], Tensors] | None = None
    stored: Output | None = None


Adapt = Callable[[AnySchedule | None, Tensors], Tensors]
Again = Callable[..., Operands]


class Known(NamedTuple):
    """A call without its operands. Nothing in it refers to a tensor.

    again: makes the operands from the arguments. still: returns the decision of the next call with
    these `sizes`, if it was chosen; None if the caller named the schedule. as_made: whether the
    caller gets the result as the program makes it.
    """

    proposal: Proposal
    decision: Decision
    combine: Combine
    shared: tuple[str, ...]
    workspaces: Mapping[str, int]
    adapt: Adapt | None
    again: Again | None
    still: Callable[[Hashable], Decision | None] | None = None
    sizes: Hashable = None
    as_made: bool = True

    def holds(self) -> bool:
        """Whether its decision is also that of the next call."""
        return self.still is None or self.still(self.sizes) is self.decision

    def exposed(self, inputs: Tensors, output: PeerOutput | None) -> Exposed:
        """The memory that peers may touch. output: the result `y`, if they store into it."""
        shared = {name: inputs[name] for name in self.shared}
        return Exposed(shared, self.workspaces, {} if output is None else {"y": output})


def key_of(name: str, schedule: object, arguments: Sequence[Any]) -> Hashable | None:
    """Everything that decides how a call is made, except the addresses of its tensors; None if its
    arguments must be checked one by one."""
    kind = type(schedule)
    if kind is str:
        if schedule == AUTO:
            named = os.environ.get("WEFT_SCHEDULE") if is_set("WEFT_SCHEDULE") else None
            schedule = (AUTO, named)
    elif kind is not Schedule:
        return None
    # A tensor may have a tangent or no values, which must be refused.
    if forward_ad._current_level >= 0 or in_transform() or dispatch_modes():
        return None
    graph = torch.is_grad_enabled()
    layouts = layouts_of(arguments, graph)
    if layouts is not None:
        return (name, schedule, layouts)
    key: list[Hashable] = [name, schedule]
    return tuple(key) if _add(key, arguments, graph) else None


def _add(key: list[Hashable], arguments: Sequence[Any], graph: bool) -> bool:
    """Adds arguments to a key; returns False if they must be checked one by one."""
    for argument in arguments:
        kind = type(argument)
        if kind in _VALUES:
            key.append(argument)
        elif kind in PLAIN:
            if argument.layout is not _STRIDED or argument.is_nested:
                return False
            if graph and argument.requires_grad:
                return False
            if argument.is_neg():
                return False
            if argument.numel() and not argument.untyped_storage().data_ptr():  # it was freed
                return False
            device = None if argument.is_cpu else argument.device
            key += (argument.shape, argument.stride(), argument.dtype, device)
        elif kind is list or kind is tuple:
            key += (_LIST, len(argument))
            if not _add(key, argument, graph):
                return False
        else:
            return False
    return True
