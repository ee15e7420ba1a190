"""A rank's part of a plan as a program of streams: made once, enqueued at every call.

The compute lane is the stream of the caller, and every engine lane is a stream of its own. Inside a
rank, a task of another stream is waited for by an event. Between ranks, the producer pushes a word
into the memory of the consumer, and the consumer's stream waits for it there. All of it follows
from the plan's dependencies, so `steps` is data that tests can change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from weft.errors import Unsupported
from weft.fabric.device.flight import DeviceFlight, cut
from weft.fabric.device.symmetric import PARTS, Slab, aligned
from weft.fabric.interface import Disagree, Repeat
from weft.fabric.proposal import Proposal
from weft.plan.issue import check_issue_order, issue_order
from weft.plan.order import predecessors
from weft.plan.tasks import AnyTask, Buffer, Copy, Plan, Region
from weft.timeline import COMPUTE

if TYPE_CHECKING:
    from weft.fabric.device.device_call import DeviceCall
    from weft.fabric.device.device_fabric import DeviceFabric

MAX_WORDS = 1 << 16
"""The words of a rank that peers may post in one call."""

CALLER = 0
"""The number of the caller's stream, on which compute runs."""


@dataclass(frozen=True)
class Step:
    """One task of this rank, as it is enqueued.

    number: its place in the program. stream: that of its lane. forked: whether its stream waits
    for the fork here. enters: the peers whose inputs it reads, if no step before it on this stream
    has waited for their entry. events: the steps of other streams that it waits for. words: the own
    words that it waits for. posts: the (rank, word) pairs that it sets when it has ended. recorded:
    whether another stream waits for it, and for its posts. joined: whether it is the last of its
    lane, and the caller's stream does not know yet that it has ended.
    """

    number: int
    task: AnyTask
    stream: int
    forked: bool
    enters: tuple[int, ...]
    events: tuple[int, ...]
    words: tuple[int, ...]
    posts: tuple[tuple[int, int], ...]
    recorded: bool
    joined: bool


class DeviceProgram:
    """Implements `weft.fabric.interface.Program`."""

    computes = True
    shares = True
    quick = False
    way = ""

    def __init__(
        self, plan: Plan, fabric: DeviceFabric, signatures: Sequence[int], alike: bool
    ) -> None:
        self.plan, self.fabric, self.signatures = plan, fabric, tuple(signatures)
        self.optimistic = alike and not getattr(plan.operation, "routed", False)
        """Whether a rank that repeats the call expects its peers to do so, and does not wait for
        their headers: if all ranks proposed the same sizes, and sizes do not follow from data."""
        self.label = f"{plan.operation.name}, {plan.schedule}"
        rank = fabric.rank
        order = issue_order(plan)
        check_issue_order(plan, order)
        lanes = [lane for r, lane in plan.lanes if r == rank and lane != COMPUTE]
        self.streams = {COMPUTE: CALLER, **{lane: n + 1 for n, lane in enumerate(sorted(lanes))}}
        words = words_of(plan)
        self.steps = steps_of(plan, rank, order, self.streams, words)
        self.num_words = 1 + max((n for own in words for n in own.values()), default=-1)
        self.joins = tuple(sorted({s.stream for s in self.steps if s.joined}))
        """The lanes that the caller's stream has to wait for at the end."""
        awaited = {peer for step in self.steps for peer in step.enters}
        awaited |= {word % fabric.world for step in self.steps for word in step.words}
        self.strangers = [peer for peer in fabric.peers if peer not in awaited]
        """The peers that no step waits for. A peer that has posted a word has entered the call, so
        only the entries of these are waited for at the end."""
        own = [buffer for buffer in plan.buffers if buffer.rank == rank]
        shared, self.part_bytes = placed(plan)
        self.shared = [b for b in own if b.name in shared]
        self.private = [b for b in own if b.kind == "workspace" and b.name not in shared]
        self.offsets = shared
        self.slab: Slab | None = fabric.memory.slab(self.part_bytes) if shared else None
        self._bases: dict[tuple[int, int, str], torch.Tensor] = {}
        self._views: dict[tuple[int, Region], torch.Tensor] = {}

    def start(
        self, call: DeviceCall, tensors: dict[str, torch.Tensor], record: bool
    ) -> DeviceFlight:
        self.agree(call)
        return DeviceFlight(self, call, tensors, record)

    def agree(self, call: DeviceCall) -> None:
        """Raises `Disagree` unless the headers of a call are those that this was made for."""
        call.label = self.label
        if not call.known and call.differs(self.signatures):
            raise Disagree

    def gave_up(self) -> bool:
        """Whether a wait of an earlier call has ended by itself: a stream's never does."""
        return False

    def repeat(self, proposal: Proposal) -> Repeat | None:
        return None

    def base(self, part: int, buffer: Buffer) -> torch.Tensor:
        """A buffer in the slab of its rank, in the part of this call."""
        key = (part, buffer.rank, buffer.name)
        found = self._bases.get(key)
        if found is None:
            assert self.slab is not None
            at = self.slab.start_of(part) + self.offsets[buffer.name]
            dtype = getattr(torch, buffer.dtype)
            found = self.slab.view(buffer.rank, at, buffer.rows, buffer.columns, dtype)
            self._bases[key] = found
        return found

    def shared_view(self, part: int, region: Region) -> torch.Tensor:
        """A region of a shared buffer, of this rank or a peer."""
        key = (part, region)
        found = self._views.get(key)
        if found is None:
            whole = self.base(part, self.plan.buffer[region.key])
            found = self._views[key] = cut(whole, region)
        return found


def placed(plan: Plan) -> tuple[dict[str, int], int]:
    """The offset of every buffer that a peer touches, in one part of a slab, and the size of the
    part. A buffer has the same place on all ranks."""
    sizes: dict[str, int] = {}
    for _, name in plan.shared_buffers:
        sizes[name] = max(b.num_bytes for b in plan.buffers if b.name == name)
    offsets, at = {}, 0
    for name in sorted(sizes):
        offsets[name] = at
        at += aligned(sizes[name])
    return offsets, at


def needed_bytes(plan: Plan) -> int:
    """The symmetric memory of a rank for a plan, in bytes."""
    return PARTS * placed(plan)[1]


def words_of(plan: Plan) -> list[dict[tuple[int, str], int]]:
    """For every rank, the numbers of the words that peers post into its memory: one for each task
    of a peer and each lane of the rank that waits for it. All ranks number them alike.

    A word belongs to one peer in all programs (its number modulo the world). If two peers posted
    it, in two calls, that of the later call could come first and end a wait for the other."""
    world = plan.operation.world
    words: list[dict[tuple[int, str], int]] = [{} for _ in range(world)]
    posted = [[0] * world for _ in range(world)]
    for task in plan.tasks:
        for rank, lane in sorted(plan.signals.get(task.id, ())):
            if rank != task.rank:
                words[rank][(task.id, lane)] = posted[rank][task.rank] * world + task.rank
                posted[rank][task.rank] += 1
    most = max((max(own.values()) + 1 for own in words if own), default=0)
    if most > MAX_WORDS:
        raise Unsupported(
            f"{plan.schedule} cuts too fine: a rank waits for {most} tasks of its peers, and a "
            f"device has {MAX_WORDS} words for them; use a smaller depth"
        )
    return words


def steps_of(
    plan: Plan,
    rank: int,
    order: Sequence[int],
    streams: Mapping[str, int],
    words: Sequence[Mapping[tuple[int, str], int]],
) -> tuple[Step, ...]:
    """The steps of a rank, in the order in which they are enqueued. words: see `words_of`."""
    before = predecessors(plan)
    tasks = [plan.tasks[number] for number in order if plan.tasks[number].rank == rank]
    place = {task.id: number for number, task in enumerate(tasks)}
    entered: dict[int, set[int]] = {number: set() for number in streams.values()}
    waited: dict[int, set[Any]] = {number: set() for number in streams.values()}
    newest: dict[int, dict[int, int]] = {number: {} for number in streams.values()}
    """For every stream, the newest step of each stream that has ended when its next step starts."""
    known_at: list[dict[int, int]] = []
    made: list[dict[str, Any]] = []
    for number, task in enumerate(tasks):
        stream = streams[task.lane]
        known = newest[stream]
        first = stream not in known
        others, flags = [], []
        for other in sorted(before[task.id]):
            source = plan.tasks[other]
            if source.rank != rank:
                word = words[rank][(other, task.lane)]
                if word not in waited[stream]:
                    waited[stream].add(word)
                    flags.append(word)
            else:
                others.append(place[other])
        events = []
        for other in sorted(others, reverse=True):  # a later step knows more than one before it
            there = streams[tasks[other].lane]
            if there != stream and other > known.get(there, -1):
                events.append(other)
                _learn(known, known_at[other])
        inputs = {
            region.rank
            for region in task.reads()
            if region.rank != rank and plan.buffer[region.key].kind in ("input", "inplace")
        }
        enters = tuple(sorted(inputs - entered[stream]))
        entered[stream].update(enters)
        posts = tuple(
            (there, words[there][(task.id, lane)])
            for there, lane in sorted(plan.signals.get(task.id, ()))
            if there != rank
        )
        if isinstance(task, Copy) and (task.also or task.swaps):
            raise Unsupported(f"{plan.schedule}: the engines of a device have no such command")
        if isinstance(task, Copy) and task.target.rank != rank:
            raise Unsupported(f"{plan.schedule}: on a device every rank fetches what it needs")
        known[stream] = number
        known_at.append(dict(known))
        made.append(
            {
                "task": task,
                "stream": stream,
                # What another stream of this call has done comes after the fork.
                "forked": first and stream != CALLER and not events,
                "enters": enters,
                "events": tuple(events),
                "words": tuple(flags),
                "posts": posts,
            }
        )
    recorded = {step for fields in made for step in fields["events"]}
    last = {fields["stream"]: number for number, fields in enumerate(made)}
    ends = {number: stream for stream, number in last.items()}
    joined, known = set(), newest[CALLER]
    for number in sorted(ends, reverse=True):
        if ends[number] != CALLER and known.get(ends[number], -1) < number:
            joined.add(number)
            _learn(known, known_at[number])
    return tuple(
        Step(n, **fields, recorded=n in recorded, joined=n in joined)
        for n, fields in enumerate(made)
    )


def _learn(known: dict[int, int], other: Mapping[int, int]) -> None:
    """What a stream knows to have ended, after it has waited for one that knows this."""
    for stream, step in other.items():
        known[stream] = max(known.get(stream, -1), step)
