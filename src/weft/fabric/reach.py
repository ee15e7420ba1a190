"""The interface of how processes reach each other: on one machine, or on several.

`processes.ProcessFabric` is the same for both. It is composed with a `Reach`, which is
`host.one_machine.OneMachine` or `group.several_machines.SeveralMachines`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from weft.errors import Error
from weft.fabric import _native
from weft.fabric.interface import Capabilities
from weft.fabric.native import Native
from weft.fabric.outcomes import Outcome
from weft.plan.tasks import Plan, Plannable, Region
from weft.schedule import Schedule
from weft.strategy import Strategy


class WorkspaceBlock(NamedTuple):
    """Workspace of this rank. offset: where peers find it in the heap; -1 if it is private. parts:
    the tensors of buffers in it, by where they begin, their dtype and their sizes. They are made
    once, and go when the block goes."""

    offset: int
    memory: torch.Tensor
    pointer: int
    size: int
    parts: dict[tuple[int, str, int, int], torch.Tensor]

    @classmethod
    def of(cls, memory: torch.Tensor, offset: int = -1) -> WorkspaceBlock:
        """Workspace that has just been allocated."""
        return cls(offset, memory, memory.data_ptr(), memory.numel(), {})


class Transfer(NamedTuple):
    """This rank's end of a copy between machines: the region that it sends or receives, the
    counters (place in the machine, index) that it waits for, the counter that it sets, and the
    ranks whose doorbells it rings."""

    task: int
    peer: int
    sends: bool
    buffer: int
    region: Region
    waits: tuple[tuple[int, int], ...]
    counter: int = -1
    rings: tuple[int, ...] = ()


class Reach(Protocol):
    """The connections from this rank to all others."""

    @property
    def can(self) -> Capabilities: ...

    @property
    def members(self) -> list[int]:
        """The ranks whose memory this one shares; native code numbers them in this order."""

    @property
    def apart(self) -> bool:
        """Whether every rank is on a machine of its own."""

    @property
    def heap(self) -> _native.Fabric:
        """The shared memory and copy engines of this machine."""

    @property
    def native(self) -> Native:
        """Headers, counters and flights of the whole group."""

    def channels(self) -> tuple[_native.Channel, _native.Messages]:
        """The channels of native collectives and messages; raises if there are none."""

    @property
    def call_channel(self) -> _native.Channel | None:
        """The channel of serial calls, if this reach has one."""

    def lower(self, operation: Plannable, schedule: Schedule | Strategy) -> Plan: ...

    def program(
        self,
        copies: _native.Program,
        transfers: Sequence[Transfer],
        plan: Plan,
        signatures: Sequence[int],
    ) -> Any:
        """The copies of a plan inside the machine and its transfers between machines."""

    def enter(
        self,
        call: int,
        signature: int,
        offsets: Sequence[int],
        blob: bytes,
        program: Any,
    ) -> None:
        """Posts this rank's header. program: the program that it expects to run, if the call is
        known."""

    def launch(
        self,
        program: Any,
        call: int,
        deadline: int,
        tensors: Sequence[torch.Tensor],
        signatures: Sequence[int],
        record: bool,
    ) -> Any:
        """Starts a program on the buffers of this rank."""

    def relays(self, call: int) -> dict[str, WorkspaceBlock]:
        """Workspace of a call that every call exposes. Its size is only a limit."""

    def loss(self, outcome: Outcome, where: str) -> Error | None:
        """A more exact error for a lost peer, if one is known."""

    def leave_word(self, call: int, error: Error) -> None:
        """Leaves the error for peers that lose this rank."""

    def close(self) -> None:
        """Leaves the group; called in the process that opened it."""
