"""How the ranks of a group of processes reach each other: on one machine, or on several.

`processes.ProcessFabric` is the same for both. It is composed with a `Reach`, which is
`host.one_machine.OneMachine` or `group.several_machines.SeveralMachines`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


class SharedBlock(NamedTuple):
    """Workspace in this rank's part of the heap: where peers find it, and its bytes."""

    offset: int
    memory: torch.Tensor
    pointer: int
    size: int


class Transfer(NamedTuple):
    """This rank's end of a copy between machines: the region that it sends or fills, the counters
    (place in the machine, index) to wait for first, and those that it sets and rings."""

    task: int
    peer: int
    sends: bool
    buffer: int
    region: Region
    waits: tuple[tuple[int, int], ...]
    counter: int = -1
    rings: tuple[int, ...] = ()


class Reach(Protocol):
    """The ways from this rank to all others."""

    @property
    def can(self) -> Capabilities: ...

    @property
    def members(self) -> list[int]:
        """The ranks whose memory this one shares; native code numbers them in this order."""

    @property
    def heap(self) -> _native.Fabric:
        """The shared memory and copy engines of this machine."""

    @property
    def native(self) -> Native:
        """Headers, counters and flights of the whole group."""

    def channels(self) -> tuple[_native.Channel, _native.Messages]:
        """What native collectives and messages go through; raises where there are none."""

    def lower(self, operation: Plannable, schedule: Schedule | Strategy) -> Plan: ...

    def program(
        self,
        copies: _native.Program,
        transfers: Sequence[Transfer],
        plan: Plan,
        signatures: Sequence[int],
    ) -> Any:
        """What engines do in a plan: copies inside the machine, transfers beyond it."""

    def enter(
        self,
        call: int,
        signature: int,
        offsets: Sequence[int],
        blob: bytes,
        program: Any,
        inputs: Mapping[str, torch.Tensor],
    ) -> None:
        """Posts this rank's header. program: what it expects to run, if it knows the call."""

    def launch(
        self,
        program: Any,
        call: int,
        deadline: int,
        tensors: Sequence[torch.Tensor],
        signatures: Sequence[int],
        record: bool,
    ) -> Any:
        """Sets a program going on the buffers of this rank."""

    def relays(self, call: int) -> dict[str, SharedBlock]:
        """Workspace of a call that peers may touch whatever its size, for it is only a limit."""

    def loss(self, outcome: Outcome, where: str) -> Error | None:
        """A more exact error for a lost peer, where one is known."""

    def leave_word(self, call: int, error: Error) -> None:
        """Leaves a note for peers that find this rank gone."""

    def close(self) -> None:
        """Leaves the group; called in the process that opened it."""
