"""All ranks are processes of one machine: every rank reaches every other through shared memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from weft.errors import Error
from weft.fabric import _native
from weft.fabric.host.opening import SPIN_NS, open_heap
from weft.fabric.interface import Capabilities
from weft.fabric.outcomes import Outcome
from weft.fabric.reach import Transfer, WorkspaceBlock
from weft.plan.tasks import Plan, Plannable
from weft.schedule import Schedule
from weft.strategy import Strategy

CAN = Capabilities("host", direct=True, adaptive=True, in_kernel=True, collectives=True, paced=True)


class OneMachine:
    """The reach of the host fabric (see `weft.fabric.reach`)."""

    can = CAN
    apart = False

    def __init__(self, group: dist.ProcessGroup, deadline: float) -> None:
        world = dist.get_world_size(group)
        self.members = list(range(world))
        self.heap = self.native = open_heap(group, self.members, deadline)
        crowded = (os.cpu_count() or 1) < world
        with ExitStack() as if_not:  # peers must not wait for a rank that is interrupted here
            if_not.callback(self.close)
            self._channels = (
                _native.Channel(self.heap, SPIN_NS, crowded),
                _native.Messages(self.heap, SPIN_NS, crowded),
            )
            self.call_channel = _native.Channel(self.heap, SPIN_NS, crowded, for_calls=True)
            if_not.pop_all()

    def channels(self) -> tuple[_native.Channel, _native.Messages]:
        return self._channels

    def lower(self, operation: Plannable, schedule: Schedule | Strategy) -> Plan:
        return operation.lower(schedule)

    def program(
        self,
        copies: _native.Program,
        transfers: Sequence[Transfer],
        plan: Plan,
        signatures: Sequence[int],
    ) -> Any:
        return copies

    def enter(
        self,
        call: int,
        signature: int,
        offsets: Sequence[int],
        blob: bytes,
        program: Any,
    ) -> None:
        self.heap.enter(call, signature, offsets, blob)

    def launch(
        self,
        program: Any,
        call: int,
        deadline: int,
        tensors: Sequence[torch.Tensor],
        signatures: Sequence[int],
        record: bool,
    ) -> Any:
        pointers = [tensor.data_ptr() for tensor in tensors]
        return self.heap.launch(program, call, deadline, pointers, signatures, record, True)

    def relays(self, call: int) -> dict[str, WorkspaceBlock]:
        return {}

    def loss(self, outcome: Outcome, where: str) -> Error | None:
        return None

    def leave_word(self, call: int, error: Error) -> None:
        """Does nothing: peers see in shared memory that this rank gave up."""

    def close(self) -> None:
        self.heap.leave()
