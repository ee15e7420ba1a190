"""The group fabric: ranks on several machines. Those of one machine share memory, as on the host
fabric; between machines the same plans run over point-to-point transfers of torch.distributed.

Nothing has to be symmetric between machines: a plan's copy becomes a send and a receive, and the
tasks before it keep back the one or the other, each on the rank where they run.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from weft.errors import Error, PeerLost, Timeout, Unsupported
from weft.fabric import _native, eager
from weft.fabric.bridge import Bridge
from weft.fabric.host import HostFabric, Shared, heap_span
from weft.fabric.lanes import NetworkProgram, Transfer
from weft.fabric.meeting import Hello, exchange
from weft.fabric.outcomes import PEER_LOST, Outcome
from weft.fabric.transport import connect_seconds, open_transport
from weft.plan.network import lower
from weft.plan.tasks import Plan, Plannable
from weft.plan.two_level_gathering import RELAY
from weft.schedule import Schedule
from weft.strategy import Strategy

LAST_WORDS = 2.0
"""Seconds in which the group's store must say why a peer is gone, before it is taken for dead."""


class GroupFabric(HostFabric):
    """The machine's shared memory, the network, and the call numbers of one group. Made by
    `weft.fabric.of(group)` where its ranks are on several machines."""

    network = True
    levels = 2
    """2: what ranks of a machine share crosses the network once. 1 treats all peers alike, to see
    what that gains; the same on all ranks, and set before the first call."""

    def __init__(self, group: dist.ProcessGroup, cards: Sequence[Hello]) -> None:
        flat = cards[0].fabric == "flat"
        self.nodes = _nodes([card.machine for card in cards], flat)
        """The machine of every rank, numbered in the order of ranks."""
        self._words = ""
        self._relay: _native.Block | None = None
        super().__init__(group)

    def _meet(self) -> Any:
        own = self.nodes[self.rank]
        self.members = [rank for rank in range(self.world) if self.nodes[rank] == own]
        native = self._open_heap()
        if len(self.members) > 1:
            # Sparse as all of the heap: what is never touched takes no memory.
            self._relay = native.allocate(heap_span() // 2)
        number = _times_opened(self.group, self.rank)
        self._words = f"weft/words/{number}"
        error, transport = "", None
        try:
            transport = open_transport(self.group, f"weft/network/{number}", self.deadline)
        except Unsupported as failure:
            error = str(failure)
        # A rank that is not connected may know it late, and the others are to hear why.
        limit = self.deadline + connect_seconds(self.deadline)
        said = exchange(self.group, range(self.world), "connected", {"error": error}, limit)
        for rank, card in enumerate(said):
            if card["error"]:
                raise Unsupported(f"rank {rank} {card['error']}")
        assert transport is not None
        return Bridge(native, transport, self.rank, self.world, self.members)

    def lower(self, operation: Plannable, schedule: Schedule | Strategy) -> Plan:
        if isinstance(schedule, Strategy):
            raise Unsupported(
                f"{schedule} places threads of one machine, and the ranks of this group are on "
                "several; start the collective with async_op=True instead"
            )
        return lower(operation, schedule, self.nodes, self.levels)

    def program(
        self,
        native: _native.Program,
        transfers: Sequence[Transfer],
        plan: Plan,
        signatures: Sequence[int],
    ) -> Any:
        number = eager.number_of(plan, self.nodes, signatures)
        return NetworkProgram(native, tuple(transfers), plan.schedule.serial, number)

    def enter(
        self,
        call: int,
        signature: int,
        offsets: Sequence[int],
        blob: bytes,
        program: Any,
        inputs: Mapping[str, torch.Tensor],
    ) -> None:
        bridge: Any = self.native
        if program is not None and program.eager:
            payloads = eager.pack(program.transfers, inputs)
            bridge.enter(call, signature, offsets, blob, program.eager, payloads)
        else:
            bridge.enter(call, signature, offsets, blob)

    def launch(
        self,
        program: Any,
        call: int,
        deadline: int,
        tensors: Sequence[torch.Tensor],
        signatures: Sequence[int],
        record: bool,
    ) -> Any:
        bridge: Any = self.native
        return bridge.launch(program, call, deadline, tensors, signatures, record)

    def share(self, tensor: torch.Tensor) -> tuple[int, bool]:
        """As on the host fabric; alone on its machine a rank has nobody to share with, and what it
        sends goes from where it lies."""
        if len(self.members) == 1:
            return 0, False
        return super().share(tensor)

    def standing(self) -> dict[str, Shared]:
        """Where carriers keep what their mates need: one half of it in every other call."""
        if self._relay is None:
            return {}
        half = self._relay.size // 2
        begin = (self.call % 2) * half
        memory = torch.from_numpy(self._relay.array())[begin : begin + half]
        offset = self._relay.offset + begin
        return {RELAY: Shared(offset, memory, memory.data_ptr(), memory.numel())}

    def close(self) -> None:
        super().close()
        self._relay = None

    # -- faults ------------------------------------------------------------------------------------

    def failure(self, outcome: Outcome, doing: str, waiting_for: str) -> Error:
        if outcome[0] == PEER_LOST and outcome[1] >= 0:
            words = self._last_words(outcome[1])
            if words is not None:
                lost = int(words["rank"])
                where = f"rank {self.rank} was in call {self.call} ({doing})"
                error = PeerLost(
                    f"rank {outcome[1]} gave up in call {words['call']}: {words['error']}; {where}",
                    lost if lost not in (-1, self.rank) else outcome[1],
                )
                self.give_up(error)
                return error
        return super().failure(outcome, doing, waiting_for)

    def give_up(self, error: Error) -> None:
        if self.broken is None:
            rank = error.rank if isinstance(error, PeerLost) else -1
            kind = "timed out" if isinstance(error, Timeout) else str(error)
            words = {"call": self.call, "rank": rank, "error": kind}
            key = f"{self._words}/{self.rank}"
            _in_time(lambda: self._store().set(key, json.dumps(words)), LAST_WORDS / 2)
        super().give_up(error)

    def _last_words(self, rank: int) -> dict[str, Any] | None:
        """What a rank that gave up has left in the store; None if it died."""
        key = f"{self._words}/{rank}"

        def look() -> Any:
            store = self._store()
            return json.loads(store.get(key)) if store.check([key]) else None

        found: dict[str, Any] | None = _in_time(look, LAST_WORDS)
        return found

    def _store(self) -> Any:
        return dist.distributed_c10d._get_process_group_store(self.group)


def _nodes(machines: Sequence[str], flat: bool) -> tuple[int, ...]:
    if flat:
        return tuple(range(len(machines)))
    known = {machine: number for number, machine in enumerate(dict.fromkeys(machines))}
    return tuple(known[machine] for machine in machines)


def _times_opened(group: dist.ProcessGroup, rank: int) -> int:
    """How often this rank has opened a fabric on the store of the group."""
    store = dist.distributed_c10d._get_process_group_store(group)
    return int(store.add(f"weft/opened/{rank}", 1))


def _in_time(function: Callable[[], Any], seconds: float) -> Any:
    """What a function gives if it gives it in time, else None: a store whose host is gone answers
    nobody, and its clients wait for minutes."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(function())
        except Exception:  # the store is gone with its host: nothing was said
            found.append(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None
