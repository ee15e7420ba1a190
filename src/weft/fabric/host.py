"""The host fabric: ranks are processes of one machine and share memory.

torch.distributed only introduces the ranks to each other. From then on a call is: every rank enters
with a header that says what it means to do and where its buffers are; engines and compute of each
rank go on as soon as all headers agree; a rank is done when it touches no other rank's memory any
more. Calls are numbered, and every counter is compared with the call's number, so nothing is ever
reset and no call ends with a barrier.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from weft.errors import Error, Timeout, Unsupported
from weft.fabric import _native
from weft.fabric.landing import Landing, Landings
from weft.fabric.link import TOPOLOGIES, Link
from weft.fabric.meeting import check_versions, exchange, listed, machine
from weft.fabric.outcomes import (
    AGAIN,
    CANCELLED,
    DISAGREE,
    OK,
    PEER_FAILED,
    TIMEOUT,
    Outcome,
    peer_error,
)
from weft.plan.tasks import Plan, Plannable
from weft.schedule import Schedule
from weft.strategy import Strategy

DEFAULT_DEADLINE = 60.0
SPIN_NS = 100_000
"""How long a waiting compute thread spins before it sleeps, where every rank has a core."""

DISCARD = "the host fabric needs all ranks of a group on one machine"


@dataclass(frozen=True)
class _Card:
    """What a rank tells the others when they meet."""

    machine: str
    pid: int
    fd: int
    version: str
    span: int
    error: str = ""


class Shared(NamedTuple):
    """Workspace in this rank's part of the heap: where peers find it, and its bytes."""

    offset: int
    memory: torch.Tensor
    pointer: int
    size: int


class HostFabric:
    """The shared memory, engines and call numbers of one group. Made by `weft.fabric.of(group)`."""

    network = False
    """Whether some ranks are reached over a network."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        # Not held: destroy_process_group must end the threads of the backend before Python ends.
        self.group_ref = weakref.ref(group)
        self.pid = os.getpid()
        self.rank: int = dist.get_rank(group)
        self.world: int = dist.get_world_size(group)
        self.deadline = deadline_of(group)
        self.link = Link()
        self.lock = threading.RLock()
        self.call = 0
        self.broken: Error | None = None
        self.runners: dict[Any, Any] = {}
        self.repeats: dict[Any, Any] = {}  # calls that are known from their arguments on
        self.chosen: Any = None  # what `weft.select` remembers of this group
        self._stage: list[_native.Block | None] = [None, None]
        self._shared: dict[tuple[str, int], Shared] = {}
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self.landings = Landings()
        self.members = list(range(self.world))
        """The ranks whose memory this one shares; the native fabric numbers them in this order."""
        self.native: _native.Fabric = self._meet()
        self._channels = None if self.network else self._open_channels()
        self.closed = False
        link = os.environ.get("WEFT_LINK")
        if link:
            self.set_link(Link.parse(link))

    @property
    def group(self) -> dist.ProcessGroup:
        group = self.group_ref()
        if group is None:
            raise Unsupported("the process group was destroyed; form a new group")
        return group

    def land(self, shape: Sequence[int], dtype: torch.dtype) -> Landing:
        """Memory for a result into which peers store."""
        with self.lock:
            return self.landings.make(shape, dtype, self._allocate)

    def _meet(self) -> Any:
        return self._open_heap()

    def _open_heap(self) -> _native.Fabric:
        """The memory that this rank shares with the other members, and its engines."""
        here, world = self.members.index(self.rank), len(self.members)
        if world > _native.MAX_WORLD:
            raise Unsupported(f"the host fabric takes up to {_native.MAX_WORLD} ranks, not {world}")
        span = heap_span()
        fd, error = -1, ""
        if here == 0:
            try:
                fd = _native.create_heap(world, span)
            except (RuntimeError, OSError) as failure:
                error = str(failure)
        own = _Card(machine(), self.pid, fd, _native.VERSION, span, error)
        try:
            cards = self._exchange(own, "cards")
            _check_cards(cards, self.members)
        except BaseException:
            if fd >= 0:
                os.close(fd)
            raise
        native: _native.Fabric | None = None
        error = ""
        try:
            if here != 0:
                fd = os.open(f"/proc/{cards[0].pid}/fd/{cards[0].fd}", os.O_RDWR | os.O_CLOEXEC)
            spin = SPIN_NS if (os.cpu_count() or 1) >= world else 0
            engine_spin = spin if len(os.sched_getaffinity(0)) > 1 else 0
            native = _native.Fabric(fd, here, world, cards[0].span, spin, engine_spin)
            for place, card in enumerate(cards):
                if place != here:
                    native.watch(place, os.pidfd_open(card.pid))
        except (RuntimeError, OSError) as failure:
            error = f"cannot share memory with rank {self.members[0]}: {failure}"
        # A second round, so that every rank has opened the memory or all know that one could not.
        _check_cards(self._exchange(replace(own, error=error), "opened"), self.members)
        assert native is not None
        return native

    def _open_channels(self) -> tuple[_native.Channel, _native.Messages]:
        crowded = (os.cpu_count() or 1) < self.world
        return (
            _native.Channel(self.native, SPIN_NS, crowded),
            _native.Messages(self.native, SPIN_NS, crowded),
        )

    @property
    def channel(self) -> _native.Channel:
        """What collectives go through."""
        return self._one_machine()[0]

    @property
    def messages(self) -> _native.Messages:
        """What goes from one rank to another."""
        return self._one_machine()[1]

    def _one_machine(self) -> tuple[_native.Channel, _native.Messages]:
        if self._channels is None:
            raise Unsupported(
                "weft's collectives go through shared memory, and the ranks of this group are on "
                "several machines; use those of torch.distributed there"
            )
        return self._channels

    def _end_channels(self) -> None:
        """Ends what is under way on the channels; between machines there are none."""
        for channel in self._channels or ():
            channel.abort()

    def _exchange(self, card: _Card, what: str) -> list[_Card]:
        """The cards of all members."""
        said = exchange(self.group, self.members, what, asdict(card), self.deadline)
        return [_Card(**card) for card in said]

    # -- memory ------------------------------------------------------------------------------------

    def symmetric_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in this rank's part of the heap, where peers can reach it without staging."""
        count = math.prod(shape)
        if any(size < 0 for size in shape):
            raise Unsupported(f"a tensor cannot have the shape {list(shape)}")
        block = self._allocate(max(count, 1) * dtype.itemsize)
        return torch.from_numpy(block.array()).view(dtype)[:count].view(tuple(shape))

    def share(self, tensor: torch.Tensor) -> tuple[int, bool]:
        """Puts a contiguous tensor where peers can read it: (its offset in the heap, whether it was
        there already). Ordinary tensors are staged; two stages take turns, and a stage's last
        readers have left before its turn comes again."""
        pointer = tensor.data_ptr()
        offset = self.native.offset_of(pointer)
        if offset >= 0:
            return offset, True
        size = tensor.nbytes
        turn = self.call % 2
        stage = self._stage[turn]
        if stage is None or stage.size < size:
            self._stage[turn] = None
            stage = self._stage[turn] = self._allocate(max(size, 1))
        self.native.stage(stage, pointer, size)
        return stage.offset, False

    def shared_workspace(self, name: str, size: int) -> Shared:
        """Memory for one call that peers may read and write. Like stages, there are two of each
        name that take turns: by a call's turn nobody touches what an earlier one left there."""
        key = (name, self.call % 2)
        found = self._shared.get(key)
        if found is None or found.size < size:
            self._shared.pop(key, None)
            block = self._allocate(max(size, 1))
            memory = torch.from_numpy(block.array())
            found = self._shared[key] = Shared(
                block.offset, memory, memory.data_ptr(), memory.numel()
            )
        return found

    def standing(self) -> dict[str, Shared]:
        """Workspace of this call that peers may touch whatever its size, for it is only a limit."""
        return {}

    def workspace(self, size: int) -> torch.Tensor:
        """Private memory for one call at a time, kept between calls."""
        if self._workspace.numel() < size:
            self._workspace = torch.empty(size, dtype=torch.uint8)
        return self._workspace

    def _allocate(self, size: int) -> _native.Block:
        try:
            return self.native.allocate(size)
        except MemoryError:
            raise Unsupported(
                f"the symmetric heap cannot hold {size / 2**20:.0f} MiB more; "
                "set WEFT_HEAP to a larger size, e.g. WEFT_HEAP=64GiB"
            ) from None

    # -- links -------------------------------------------------------------------------------------

    def set_link(self, link: Link) -> None:
        """Sets how fast peers reach each other. Every rank sets the same."""
        self.link = link
        topology = TOPOLOGIES.index(link.topology)
        self.native.set_link(link.bandwidth or 0.0, int(link.latency * 1e9), topology)

    # -- plans -------------------------------------------------------------------------------------

    def lower(self, operation: Plannable, schedule: Schedule | Strategy) -> Plan:
        """The plan of an operation as it is run here."""
        return operation.lower(schedule)

    def program(
        self,
        native: _native.Program,
        transfers: Sequence[Any],
        plan: Plan,
        signatures: Sequence[int],
    ) -> Any:
        """What engines do in a plan: its copies, and on other fabrics transfers over a network.
        signatures: what the headers of the ranks say that the plan was made for."""
        assert not transfers
        return native

    def enter(
        self,
        call: int,
        signature: int,
        offsets: Sequence[int],
        blob: bytes,
        program: Any,
        inputs: Mapping[str, torch.Tensor],
    ) -> None:
        """Enters a call. program: what this rank expects to be run, where it knows the call; some
        fabrics send what peers need of the inputs along."""
        self.native.enter(call, signature, offsets, blob)

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
        pointers = [tensor.data_ptr() for tensor in tensors]
        return self.native.launch(program, call, deadline, pointers, signatures, record)

    # -- calls -------------------------------------------------------------------------------------

    def next_call(self) -> int:
        """The number of the call that starts now; raises if the group is over."""
        if self.broken is not None:
            raise type(self.broken)(
                f"this group is over since call {self.call} ({self.broken}); form a new group"
            )
        self.call += 1
        return self.call

    def deadline_ns(self) -> int:
        return _native.now_ns() + int(self.deadline * 1e9)

    def wait(
        self,
        what: Callable[[], Outcome],
        doing: str,
        waiting_for: str,
        first: Outcome | None = None,
    ) -> Outcome:
        """Repeats a native wait until it has an answer (Python handles its signals in between);
        raises if the answer is that the call cannot go on. first: what it answered before."""
        while True:
            outcome, first = first or what(), None
            if outcome[0] == OK or outcome[0] == DISAGREE or outcome[0] == CANCELLED:
                return outcome
            if outcome[0] != AGAIN:
                raise self.failure(outcome, doing, waiting_for)

    def failure(self, outcome: Outcome, doing: str, waiting_for: str) -> Error:
        """The error for an outcome; marks the group as over, for this rank and for its peers."""
        code, rank = outcome
        where = f"in call {self.call} ({doing})"
        error: Error
        if code == TIMEOUT:
            late = [
                r
                for r in range(self.world)
                if r != self.rank and self.native.entered(r) < self.call
            ]
            if late:
                waiting_for = f"{listed(late)} to enter the call"
            error = Timeout(
                f"rank {self.rank} waited {self.deadline:g} s {where} for {waiting_for}; "
                "see what that rank is doing, or allow more with weft.configure(deadline=...)"
            )
        else:
            there = f"in call {self.native.failed(rank)}" if code == PEER_FAILED else ""
            stopped = f"rank {self.rank} was stopped {where} while it waited for {waiting_for}"
            error = peer_error(outcome, self.rank, where, there) or Error(stopped)
        self.give_up(error)
        return error

    def give_up(self, error: Error) -> None:
        """Ends the group for this rank, and tells the others."""
        if self.broken is None:
            self.broken = error
            self.native.fail(max(1, self.call))
            self._end_channels()

    def close(self) -> None:
        """Leaves the group. Peers that still read this rank's memory in the last call are not
        disturbed: it goes when the last rank has left and the last tensor on it is gone."""
        self.broken = self.broken or Error("the group was closed")
        self.closed = True
        self.native.leave()
        if self.pid == os.getpid():
            self._end_channels()
        self.runners.clear()
        self.repeats.clear()
        # It refers to this fabric: kept, the circle would hold the process group until the
        # interpreter ends, which is too late to destroy it.
        self.chosen = None
        self._stage = [None, None]
        self._shared.clear()
        self.landings.clear()


def _check_cards(cards: Sequence[_Card], members: Sequence[int]) -> None:
    """That all ranks could do their part, on the same machine with the same weft."""
    for rank, card in zip(members, cards, strict=True):
        if card.error:
            raise Unsupported(f"rank {rank} {card.error}")
        if card.machine != cards[0].machine:
            raise Unsupported(
                f"{DISCARD}; ranks {members[0]} and {rank} are on different ones: unset WEFT_FABRIC"
            )
    check_versions([card.version for card in cards], members)


def default_deadline() -> float:
    """Seconds that a wait may take where nothing else was configured."""
    text = os.environ.get("WEFT_DEADLINE", "")
    try:
        seconds = float(text) if text else DEFAULT_DEADLINE
    except ValueError:
        seconds = -1.0
    if not seconds > 0:
        raise Unsupported(f"WEFT_DEADLINE must be seconds above zero, e.g. 60, not {text!r}")
    return seconds


def deadline_of(group: dist.ProcessGroup) -> float:
    """Seconds that a wait in a group may take at first."""
    own: float | None = getattr(group, "deadline", None)  # a group of weft's backend has one
    return default_deadline() if own is None or "WEFT_DEADLINE" in os.environ else own


def heap_span() -> int:
    """Bytes of each rank's part: only a limit, pages come when they are touched."""
    text = os.environ.get("WEFT_HEAP", "")
    if text:
        try:
            asked = int(Link.parse(f"{text}/s").bandwidth or 0)
        except Unsupported:
            raise Unsupported(f"WEFT_HEAP is {text!r}; write a size such as 64GiB") from None
        return -(-asked // 2**21) * 2**21
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(total, 2**30) // 2**21 * 2**21
