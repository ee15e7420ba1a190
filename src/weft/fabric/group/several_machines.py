"""Ranks on several machines. Those of one machine share memory, as on the host fabric; between
machines the same plans run over point-to-point transfers.

Nothing has to be symmetric between machines: a copy becomes a send and a receive, and each of its
dependencies delays the one that is on its own rank.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from weft.errors import Error, PeerLost, Timeout, Unsupported
from weft.fabric import _native
from weft.fabric.group import eager
from weft.fabric.group.connecting import Door
from weft.fabric.group.network_native import NetworkNative
from weft.fabric.group.streams import Streams
from weft.fabric.group.transfers import NetworkProgram
from weft.fabric.group.wires import Wires
from weft.fabric.host.opening import heap_span, open_heap
from weft.fabric.interface import Capabilities
from weft.fabric.outcomes import PEER_FAILED, PEER_LOST, Outcome
from weft.fabric.presence import lost, store_of
from weft.fabric.reach import Transfer, WorkspaceBlock
from weft.fabric.rendezvous import Hello, exchange, look_after, machine, number_of, posted
from weft.plan import network
from weft.plan.tasks import Plan, Plannable
from weft.plan.two_level_gathering import RELAY
from weft.schedule import Schedule
from weft.strategy import Strategy

T = TypeVar("T")

CAN = Capabilities("group", adaptive=True, two_level=True, paced=True)

STORE_SECONDS = 2.0
"""Seconds to wait for the note of a lost peer in the group's store, before it counts as dead."""


NOTE_SECONDS = 1.0
"""Seconds that a rank which closed its connections has to write why."""


class SeveralMachines:
    """The reach of the group fabric (see `weft.fabric.reach`)."""

    can = CAN
    call_channel = None

    def __init__(self, group: dist.ProcessGroup, cards: Sequence[Hello], deadline: float) -> None:
        # A weak reference, so that destroy_process_group ends the threads of the backend in time.
        self._group = weakref.ref(group)
        self._rank, world = dist.get_rank(group), dist.get_world_size(group)
        flat = cards[0].fabric == "flat"
        self.nodes = _nodes([card.machine for card in cards], flat)
        """The machine of every rank, numbered in the order of ranks."""
        self.levels = 2
        """2: data that ranks of a machine share crosses the network once. 1 treats all peers alike,
        for comparison. It must be the same on all ranks, and set before the first call."""
        self.apart = len(set(self.nodes)) == world
        own = self.nodes[self._rank]
        self.members = [rank for rank in range(world) if self.nodes[rank] == own]
        self.heap = open_heap(group, self.members, deadline)
        self._relay: _native.Block | None = None
        if len(self.members) > 1:
            # Sparse, like the heap: untouched pages take no memory.
            self._relay = self.heap.allocate(heap_span() // 2)
        self._notes = f"weft/notes/{number_of(group)}"
        with ExitStack() as if_not:  # peers must not wait for a rank that is interrupted here
            wires, streams = _connected(group, deadline, if_not)
            self.native = NetworkNative(self.heap, streams, wires, self._rank, world, self.members)
            if_not.pop_all()

    def channels(self) -> tuple[_native.Channel, _native.Messages]:
        raise Unsupported(
            "weft's collectives go through shared memory, and the ranks of this group are on "
            "several machines; use those of torch.distributed there"
        )

    def lower(self, operation: Plannable, schedule: Schedule | Strategy) -> Plan:
        if isinstance(schedule, Strategy):
            raise Unsupported(
                f"{schedule} places threads of one machine, and the ranks of this group are on "
                "several; start the collective with async_op=True instead"
            )
        return network.lower(operation, schedule, self.nodes, self.levels)

    def program(
        self,
        copies: _native.Program,
        transfers: Sequence[Transfer],
        plan: Plan,
        signatures: Sequence[int],
    ) -> NetworkProgram:
        number = eager.number_of(plan, self.nodes, signatures)
        return NetworkProgram(copies, tuple(transfers), plan.schedule.serial, number)

    def enter(
        self,
        call: int,
        signature: int,
        offsets: Sequence[int],
        blob: bytes,
        program: Any,
    ) -> None:
        self.native.enter(call, signature, offsets, blob, 0 if program is None else program.eager)

    def launch(
        self,
        program: Any,
        call: int,
        deadline: int,
        tensors: Sequence[torch.Tensor],
        signatures: Sequence[int],
        record: bool,
    ) -> Any:
        return self.native.launch(program, call, deadline, tensors, signatures, record)

    def relays(self, call: int) -> dict[str, WorkspaceBlock]:
        """The memory in which carriers keep data for the other ranks of the machine. Two halves
        take turns."""
        if self._relay is None:
            return {}
        half = self._relay.size // 2
        begin = (call % 2) * half
        memory = torch.from_numpy(self._relay.array())[begin : begin + half]
        offset = self._relay.offset + begin
        return {RELAY: WorkspaceBlock.of(memory, offset)}

    # -- faults ------------------------------------------------------------------------------------

    def loss(self, outcome: Outcome, where: str) -> Error | None:
        if outcome[0] not in (PEER_LOST, PEER_FAILED) or outcome[1] < 0:
            return None
        note = self._note_of(outcome[1])
        if note is None:
            return None
        lost = int(note["rank"])
        return PeerLost(
            f"rank {outcome[1]} gave up in call {note['call']}: {note['error']}; {where}",
            lost if lost not in (-1, self._rank) else outcome[1],
        )

    def leave_word(self, call: int, error: Error) -> None:
        rank = error.rank if isinstance(error, PeerLost) else -1
        kind = "timed out" if isinstance(error, Timeout) else str(error)
        note = {"call": call, "rank": rank, "error": kind}
        key = f"{self._notes}/{self._rank}"
        _in_time(lambda: self._store().set(key, json.dumps(note)), STORE_SECONDS / 2)

    def _note_of(self, rank: int) -> dict[str, Any] | None:
        """The note of a rank that gave up; None if it died. A rank may close its connections before
        it writes its note, so one whose process is there has a moment for it."""
        key = f"{self._notes}/{rank}"

        def look() -> Any:
            store, until = self._store(), time.monotonic() + NOTE_SECONDS
            while not store.check([key]):
                group = self._group()
                over = time.monotonic() > until
                if over or group is None or lost(group, [rank], machine()) is not None:
                    return None
                time.sleep(0.02)
            return json.loads(store.get(key))

        found: dict[str, Any] | None = _in_time(look, STORE_SECONDS)
        return found

    def _store(self) -> Any:
        group = self._group()
        if group is None:
            raise RuntimeError("the process group was destroyed")
        return store_of(group)

    def close(self) -> None:
        self.native.leave()
        self._relay = None


class _PeerRefuses(Exception):
    """Another rank has no way over the network, and has said why."""


def _connected(
    group: dist.ProcessGroup, deadline: float, if_not: ExitStack
) -> tuple[Wires, Streams]:
    """The connections to all other ranks. If one rank has not all of them, all ranks raise. if_not:
    closes them if this rank does not come to use them."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    others = [peer for peer in range(world) if peer != rank]

    def look() -> None:
        look_after(group, others)
        for peer in others:
            card = posted(group, peer, "connected")
            if card is not None and card["error"]:
                raise _PeerRefuses

    # A rank may fail to connect late, and the others should raise its error.
    seconds = min(max(deadline, 10.0), 86_400.0)
    limit = deadline + seconds
    with closing(Door(world)) as door:
        doors = exchange(group, range(world), "doors", door.card, limit)
        made, error = _or_why(lambda: door.connect(rank, doors, seconds, look))
        for connections in made or ():
            if_not.callback(connections.close)
        _refuse_if_one(exchange(group, range(world), "connected", {"error": error}, limit))
    assert made is not None
    return made


def _or_why(connect: Callable[[], T]) -> tuple[T | None, str]:
    """The connections, or why there are none."""
    try:
        return connect(), ""
    except Unsupported as failure:
        return None, str(failure)
    except _PeerRefuses:
        return None, ""


def _refuse_if_one(cards: Sequence[Mapping[str, Any]]) -> None:
    """Raises the error of the first rank that has one, on every rank."""
    for rank, card in enumerate(cards):
        if card["error"]:
            raise Unsupported(f"rank {rank} {card['error']}")


def _nodes(machines: Sequence[str], flat: bool) -> tuple[int, ...]:
    if flat:
        return tuple(range(len(machines)))
    known = {machine: number for number, machine in enumerate(dict.fromkeys(machines))}
    return tuple(known[machine] for machine in machines)


def _in_time(function: Callable[[], Any], seconds: float) -> Any:
    """The result of a function, or None if it takes longer. A store whose host is lost does not
    answer, and its clients wait for minutes."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(function())
        except Exception:  # the store is lost with its host, so there is no note
            found.append(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None
