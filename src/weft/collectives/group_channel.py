"""The channel of a group in Python: one native call per collective, and its errors as exceptions.

Collectives have their own numbers, memory and thread. So they do not disturb the numbering of the
operators' calls, and they need no GIL while they run. This is the only file of the room that
imports the native module; the others use what it defines.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from weft import fabric as fabrics
from weft.collectives import recording
from weft.collectives.kinds import BY_NUMBER, DTYPES, OTHER, REDUCTIONS, SUM
from weft.dtype import name_of
from weft.errors import (
    Cancelled,
    Error,
    Mismatch,
    PeerLost,
    Timeout,
    Unsupported,
    interrupted_by,
)
from weft.fabric import Fabric, _native
from weft.fabric.deadlines import nanoseconds
from weft.fabric.outcomes import (
    AGAIN,
    BY_ITS_DEADLINE,
    DISAGREE,
    OK,
    PEER_FAILED,
    TIMEOUT,
    WITHDRAWN,
    peer_error,
)
from weft.fabric.rendezvous import listed
from weft.run import explain, record
from weft.run.ranges import NOTHING, profiled, range_of

Job = _native.Job
Message = _native.Message
Facts = _native.Facts
now_ns = _native.now_ns


class Tuning(NamedTuple):
    """How bytes of collectives move. small: bytes that travel with the announcement. least_chunk,
    most_chunk: of a chunk in a ring. stream: of a result from which on it bypasses the cache. past:
    whether chunks of rings do: TRIED, NEVER or ALWAYS."""

    small: int
    least_chunk: int
    most_chunk: int
    stream: int
    past: int


TRIED, NEVER, ALWAYS = range(3)
"""TRIED: what was faster for the first messages of a size."""
TRIALS: int = _native.STORE_TRIALS
"""How many messages of a size these are."""
SHIPPED = Tuning(
    _native.SMALL_BYTES,
    _native.LEAST_CHUNK_BYTES,
    _native.MOST_CHUNK_BYTES,
    _native.STREAM_BYTES,
    TRIED,
)

FOREVER = 2**63 - 1
_world = dist.distributed_c10d._world
_EMPTY = 64
"""The address that stands for an empty tensor, which has none. Nothing is read there."""

_channels: dict[int, GroupChannel] = {}
"""By fabric."""
_known: dict[int, GroupChannel] = {}
"""By the group that was asked for, or None."""
os.register_at_fork(after_in_child=_known.clear)  # a forked child is not a rank and must look anew


class GroupChannel:
    """The collectives of one group on this rank. `of(group)` makes it."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.native: _native.Channel
        self.messages: _native.Messages
        self.native, self.messages = fabric.channels()
        self.rank, self.world = fabric.rank, fabric.world
        self.group_ref = fabric.group_ref
        self._quick = self.native.quick
        self._running: deque[tuple[Job, Any]] = deque()
        self._messages: list[tuple[Message, Any]] = []
        self._most_messages = 64
        fabric.in_background.append(self._is_busy)

    # -- starting ----------------------------------------------------------------------------------

    def quick(self, kind: int, x: object, out: object, reduction: int = SUM, root: int = 0) -> bool:
        """Runs a collective of two tensors with as little Python as possible. Returns False, and
        does nothing, if the arguments need a full check or a recording is active."""
        if record.active is not None:
            return False
        if profiled():
            with range_of(BY_NUMBER[kind].name):
                return self._over(self._quick(kind, x, out, reduction, root, self.fabric.deadline))
        made = self._quick(kind, x, out, reduction, root, self.fabric.deadline)
        return made if made is True else self._over(made)

    def _over(self, made: Job | bool) -> bool:
        """Waits for the job of a quick collective that is not over yet."""
        if made is True or made is False:
            return made
        self.wait(made)
        return True

    def run_even(
        self,
        kind: int,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        num_bytes: int,
        *,
        reduction: int = SUM,
        root: int = 0,
        engine: str = "dma",
        background: bool = False,
        patience: float | None = None,
    ) -> Job | None:
        """Runs a collective in which all ranks have the same sizes. In the background it is only
        started, and its job is returned."""
        fabric = self.fabric
        if fabric.broken is not None:
            raise self.group_error()
        tensor = source if source is not None else target
        dtype = OTHER if tensor is None else DTYPES.get(tensor.dtype, OTHER)
        item = 1 if tensor is None else tensor.element_size()
        with range_of(BY_NUMBER[kind].name) if profiled() else NOTHING:
            active = record.active
            job = self.native.alike(
                kind,
                dtype,
                item,
                reduction,
                root,
                engine == "cores",
                nanoseconds(fabric.deadline if patience is None else patience),
                0 if source is None else source.data_ptr() or _EMPTY,
                0 if target is None else target.data_ptr() or _EMPTY,
                num_bytes,
                bool(background),
                active is not None,
            )
            if job is None:
                return None
            if active is not None:
                total = source.nbytes if source is not None else num_bytes
                recording.keep(active, job, kind, total, self, engine, background)
            if background:
                self._keep(job, (source, target))
                return job
            self.wait(job, patience)
            return None

    def run_uneven(
        self,
        kind: int,
        sizes: Sequence[int],
        sources: Sequence[torch.Tensor],
        in_sizes: Sequence[int],
        targets: Sequence[torch.Tensor],
        out_sizes: Sequence[int],
        *,
        by_pair: bool = False,
        reduction: int = SUM,
        root: int = 0,
        engine: str = "dma",
        background: bool = False,
        patience: float | None = None,
    ) -> Job | None:
        """Runs a collective with sizes that differ by rank (all in bytes), or with lists of
        tensors. by_pair: whether each pair of ranks has a size of its own."""
        fabric = self.fabric
        if fabric.broken is not None:
            raise self.group_error()
        tensor = (*sources, *targets)[0]
        with range_of(BY_NUMBER[kind].name) if profiled() else NOTHING:
            active = record.active
            job = self.native.various(
                kind,
                DTYPES.get(tensor.dtype, OTHER),
                tensor.element_size(),
                reduction,
                root,
                engine == "cores",
                nanoseconds(fabric.deadline if patience is None else patience),
                by_pair,
                sizes,
                [t.data_ptr() or _EMPTY for t in sources],
                in_sizes,
                [t.data_ptr() or _EMPTY for t in targets],
                out_sizes,
                bool(background),
                active is not None,
            )
            if active is not None:
                recording.keep(active, job, kind, sum(in_sizes), self, engine, background)
            if background:
                self._keep(job, (*sources, *targets))
                return job
            self.wait(job, patience)
            return None

    def handle(self, job: Job, result: Any, name: str) -> Any:
        """The handle of a job in the background."""
        from weft.collectives.handle import Handle

        return Handle(self, job, result, name)

    def refuse(self, error: Exception, background: bool = False) -> None:
        """Sends the reason why this rank cannot take part to every rank. In the background this
        returns at once."""
        if self.world == 1 or self.fabric.broken is not None:
            return
        reason = str(error) or type(error).__name__
        job = self.native.refuse(reason[:800], nanoseconds(self.fabric.deadline), background)
        if background:
            self._keep(job, ())
            return
        with contextlib.suppress(Mismatch):
            self.wait(job)

    def _keep(self, job: Job, tensors: Any) -> None:
        """Keeps the tensors of a job alive while the channel may use them."""
        running = self._running
        while running and running[0][0].done:
            running.popleft()
        running.append((job, tensors))

    def _is_busy(self) -> bool:
        """Whether a collective or a message runs in the background."""
        jobs, messages = tuple(self._running), tuple(self._messages)
        return not (all(job.done for job, _ in jobs) and all(one.done for one, _ in messages))

    def message(self, sends: bool, peer: int, tag: int, tensor: torch.Tensor) -> Message:
        """Starts to send or receive a message in the background. Its tensor is kept alive until
        the message has ended, even if the caller drops what it was given."""
        with range_of("send" if sends else "recv") if profiled() else NOTHING:
            started = self.messages.start(
                sends, peer, tag, tensor.data_ptr(), tensor.nbytes, nanoseconds(self.patience), True
            )
        if len(self._messages) >= self._most_messages:
            self._messages = [kept for kept in self._messages if not kept[0].done]
            self._most_messages = 64 + 2 * len(self._messages)
        if not started.done:
            self._messages.append((started, tensor))
        return started

    # -- ending ------------------------------------------------------------------------------------

    def wait(self, job: Job, patience: float | None = None) -> None:
        """Waits for a job and raises its error. Python handles signals meanwhile. patience: of the
        job, if it is not the deadline of the group."""
        try:
            while True:
                outcome = self.native.wait(job, FOREVER)
                if outcome[0] != AGAIN:
                    break
        except BaseException as interrupt:
            self.interrupted(interrupt)
            raise
        if outcome[0] != OK:
            raise self.error(job, outcome, patience)

    def interrupted(self, interrupt: BaseException) -> None:
        """Gives the group up, because this rank left a wait before its end."""
        self.fabric.give_up(interrupted_by(interrupt, self.rank))

    def error(self, job: Job, outcome: tuple[int, int], patience: float | None = None) -> Error:
        """The error for an outcome. Unless ranks only disagreed or one withdrew, the group cannot
        be used any more."""
        code, rank = outcome
        if code == DISAGREE:
            return Mismatch(job.words)
        if code == WITHDRAWN:
            return Cancelled(job.words)
        late = self.native.late(job) if code in (TIMEOUT, PEER_FAILED) else []
        # A peer whose deadline passed first is not the cause: those that did not come are.
        if code == PEER_FAILED and late and rank not in late and self._was_impatient(rank):
            outcome = (TIMEOUT, -1)
        waiting_for = f"{listed(late)} to make it too" if late else "its peers to do their part"
        return self._fatal(outcome, f"in collective {job.number}", waiting_for, patience)

    def _was_impatient(self, rank: int) -> bool:
        """Whether a rank gave up because its deadline had passed. It says so a moment after it has
        left the collective."""
        until = time.monotonic() + 0.5
        while (why := self.native.why_failed(rank)) is None and time.monotonic() < until:
            time.sleep(0.002)
        return why == BY_ITS_DEADLINE

    def message_error(self, outcome: tuple[int, int], what: str) -> Error:
        """The error for a message that could not be sent or received."""
        return self._fatal(outcome, f"about to {what}", "that rank's part")

    def _fatal(
        self,
        outcome: tuple[int, int],
        where: str,
        waiting_for: str,
        patience: float | None = None,
    ) -> Error:
        error: Error
        if outcome[0] == TIMEOUT:
            waited = self.patience if patience is None else patience
            error = Timeout(
                f"rank {self.rank} was {where} and waited {waited:g} s for {waiting_for}; "
                "see what that rank is doing, or allow more with weft.configure(deadline=...)"
            )
        elif lost := peer_error(outcome, self.rank, where):
            error = lost
        elif self.fabric.broken is not None:
            return self.group_error()
        else:
            error = Error(f"rank {self.rank} was stopped when it was {where}")
        self.fabric.give_up(error)
        return error

    @property
    def patience(self) -> float:
        """The longest that a wait may take, in seconds."""
        return self.fabric.deadline

    def group_error(self) -> Error:
        """The error of every call on a group that was given up."""
        broken = self.fabric.broken
        reason = f"this group is over ({broken}); form a new group"
        if isinstance(broken, PeerLost):
            return PeerLost(reason, broken.rank)
        return type(broken)(reason) if broken is not None else Error(reason)


def of(group: dist.ProcessGroup | None = None) -> GroupChannel:
    """The channel of a group (None: of all ranks)."""
    key = id(group)
    known = _known.get(key)
    if known is not None:
        alive = known.group_ref()
        if alive is not None and alive is (_world.default_pg if group is None else group):
            return known
    found = _known[key] = _find(group)
    return found


def _find(group: dist.ProcessGroup | None) -> GroupChannel:
    fabric = fabrics.of(group)
    channel = _channels.get(id(fabric))
    if channel is None or channel.fabric is not fabric:
        for key, other in list(_channels.items()):
            if other.fabric.closed:
                del _channels[key]
        for known in [key for key, other in _known.items() if other.fabric.closed]:
            del _known[known]
        channel = _channels[id(fabric)] = GroupChannel(fabric)
    return channel


def explain_collective() -> tuple[float, explain.Explanation] | None:
    """The collective of this process that ended last, over all channels."""
    found = [
        recording.explanation_of(channel.native.last(), channel.world, SHIPPED.small)
        for channel in list(_channels.values())
    ]
    return max((one for one in found if one is not None), key=lambda one: one[0], default=None)


def check_engine(engine: str) -> None:
    """Raises unless an engine can move a collective's bytes."""
    if engine not in ("dma", "cores"):
        raise Unsupported(f"a collective is moved by dma or cores, not {engine!r}")


def check_reduction(dtype: torch.dtype, reduction: int) -> None:
    """Raises unless elements of a dtype have that reduction."""
    if not _native.can_reduce(DTYPES.get(dtype, OTHER), reduction):
        raise Unsupported(f"{name_of(dtype)} has no reduction {REDUCTIONS[reduction]!r} here")
