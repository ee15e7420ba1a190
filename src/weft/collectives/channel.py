"""The channel of a group, seen from Python: one native call per collective, errors in words.

Collectives have numbers, memory and a thread of their own, so they neither disturb the numbering of
the operators' calls nor need the GIL while they are under way.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from weft import fabric as fabrics
from weft.collectives import telling
from weft.collectives.kinds import DTYPES, OTHER, REDUCTIONS, SUM
from weft.errors import Cancelled, Error, Mismatch, PeerLost, Timeout, Unsupported
from weft.fabric import Fabric, _native
from weft.fabric.outcomes import (
    AGAIN,
    DISAGREE,
    OK,
    TIMEOUT,
    WITHDRAWN,
    peer_error,
)
from weft.run import explain, record

_world = dist.distributed_c10d._world
FOREVER = 2**63 - 1
_EMPTY = 64
"""Stands for the place of an empty tensor, which has none; nothing is ever read there."""

_native.learn_tensors(torch.Tensor)

_channels: dict[int, Channel] = {}
"""By fabric."""
_known: dict[int, Channel] = {}
"""By the group that was asked for, or None."""
os.register_at_fork(after_in_child=_known.clear)  # a forked child is no rank: it must ask anew


class Channel:
    """The collectives of one group on this rank. Made by `of(group)`."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.native: _native.Channel
        self.messages: _native.Messages
        self.native, self.messages = fabric.channels()
        self.rank, self.world = fabric.rank, fabric.world
        self.group_ref = fabric.group_ref
        self._quick = self.native.quick
        self._under_way: deque[tuple[_native.Job, Any]] = deque()
        self._messages: list[tuple[_native.Message, Any]] = []
        self._most_messages = 64

    # -- starting ----------------------------------------------------------------------------------

    def quick(self, kind: int, x: object, out: object, reduction: int = SUM, root: int = 0) -> bool:
        """Carries out a collective of two tensors with as little Python as can be: False, and
        nothing was done, where it takes a further look (and at every call of a recording)."""
        if record.active is not None:
            return False
        made = self._quick(kind, x, out, reduction, root, self.fabric.deadline)
        if made is True or made is False:
            return made
        self.wait(made)
        return True

    def alike(
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
    ) -> _native.Job | None:
        """Carries out a collective in which all ranks have the same sizes; one in the background
        is only started, and gives its job."""
        fabric = self.fabric
        if fabric.broken is not None:
            raise self.over()
        tensor = source if source is not None else target
        dtype = OTHER if tensor is None else DTYPES.get(tensor.dtype, OTHER)
        item = 1 if tensor is None else tensor.element_size()
        recording = record.active
        job = self.native.alike(
            kind,
            dtype,
            item,
            reduction,
            root,
            engine == "cores",
            int((fabric.deadline if patience is None else patience) * 1e9),
            0 if source is None else source.data_ptr() or _EMPTY,
            0 if target is None else target.data_ptr() or _EMPTY,
            num_bytes,
            background,
            recording is not None,
        )
        if job is None:
            return None
        if recording is not None:
            total = source.nbytes if source is not None else num_bytes
            telling.keep(recording, job, kind, total, self.rank, self.world)
        if background:
            self._keep(job, (source, target))
            return job
        self.wait(job)
        return None

    def various(
        self,
        kind: int,
        sizes: Sequence[int],
        sources: Sequence[torch.Tensor],
        in_sizes: Sequence[int],
        targets: Sequence[torch.Tensor],
        out_sizes: Sequence[int],
        *,
        uneven: bool = False,
        reduction: int = SUM,
        root: int = 0,
        engine: str = "dma",
        background: bool = False,
        patience: float | None = None,
    ) -> _native.Job | None:
        """The same for sizes that differ by rank (all in bytes), and for lists of tensors."""
        fabric = self.fabric
        if fabric.broken is not None:
            raise self.over()
        tensor = (*sources, *targets)[0]
        recording = record.active
        job = self.native.various(
            kind,
            DTYPES.get(tensor.dtype, OTHER),
            tensor.element_size(),
            reduction,
            root,
            engine == "cores",
            int((fabric.deadline if patience is None else patience) * 1e9),
            uneven,
            sizes,
            [t.data_ptr() or _EMPTY for t in sources],
            in_sizes,
            [t.data_ptr() or _EMPTY for t in targets],
            out_sizes,
            background,
            recording is not None,
        )
        if recording is not None:
            telling.keep(recording, job, kind, sum(in_sizes), self.rank, self.world)
        if background:
            self._keep(job, (*sources, *targets))
            return job
        self.wait(job)
        return None

    def refuse(self, error: Exception, background: bool = False) -> None:
        """Tells every rank why this one cannot take part. In the background nobody waits for it."""
        if self.world == 1 or self.fabric.broken is not None:
            return
        said = str(error) or type(error).__name__
        job = self.native.refuse(said[:800], int(self.fabric.deadline * 1e9), background)
        if background:
            self._keep(job, ())
            return
        with contextlib.suppress(Mismatch):
            self.wait(job)

    def _keep(self, job: _native.Job, tensors: Any) -> None:
        """Keeps the tensors of a job alive while the channel may touch them."""
        under_way = self._under_way
        while under_way and under_way[0][0].done:
            under_way.popleft()
        under_way.append((job, tensors))

    def message(self, sends: bool, peer: int, tag: int, tensor: torch.Tensor) -> _native.Message:
        """Starts a message in the background. Its tensor lives until it is over, whatever becomes
        of what the caller got for it."""
        started = self.messages.start(
            sends, peer, tag, tensor.data_ptr(), tensor.nbytes, int(self.patience * 1e9), True
        )
        if len(self._messages) >= self._most_messages:
            self._messages = [kept for kept in self._messages if not kept[0].done]
            self._most_messages = 64 + 2 * len(self._messages)
        if not started.done:
            self._messages.append((started, tensor))
        return started

    # -- ending ------------------------------------------------------------------------------------

    def wait(self, job: _native.Job) -> None:
        """Waits for a job; raises what became of it. Python handles its signals in between."""
        try:
            while True:
                outcome = self.native.wait(job, FOREVER)
                if outcome[0] != AGAIN:
                    break
        except BaseException as interrupt:
            said = f"rank {self.rank} was interrupted by {type(interrupt).__name__}"
            self.fabric.give_up(Error(said))
            raise
        if outcome[0] != OK:
            raise self.error(job, outcome)

    def error(self, job: _native.Job, outcome: tuple[int, int]) -> Error:
        """The error for an outcome; the group is over unless the ranks only disagreed."""
        code = outcome[0]
        if code == DISAGREE:
            return Mismatch(job.words)
        if code == WITHDRAWN:
            return Cancelled(job.words)
        if code == TIMEOUT:
            late = self.native.late(job)
            who = ("rank " if len(late) == 1 else "ranks ") + ", ".join(map(str, late))
            waiting_for = f"{who} to make it too" if late else "its peers to do their part"
            return self._fatal(outcome, f"in collective {job.number}", waiting_for)
        return self._fatal(outcome, f"in collective {job.number}", "")

    def message_error(self, outcome: tuple[int, int], what: str) -> Error:
        """The error for a message that could not be sent or received."""
        return self._fatal(outcome, f"about to {what}", "that rank's part")

    def _fatal(self, outcome: tuple[int, int], where: str, waiting_for: str) -> Error:
        error: Error
        if outcome[0] == TIMEOUT:
            error = Timeout(
                f"rank {self.rank} was {where} and waited {self.patience:g} s for {waiting_for}; "
                "see what that rank is doing, or allow more with weft.configure(deadline=...)"
            )
        elif lost := peer_error(outcome, self.rank, where):
            error = lost
        elif self.fabric.broken is not None:
            return self.over()
        else:
            error = Error(f"rank {self.rank} was stopped when it was {where}")
        self.fabric.give_up(error)
        return error

    @property
    def patience(self) -> float:
        """How long a wait may take, in seconds."""
        return self.fabric.deadline

    def over(self) -> Error:
        """What every call on a group says that is over."""
        broken = self.fabric.broken
        said = f"this group is over ({broken}); form a new group"
        if isinstance(broken, PeerLost):
            return PeerLost(said, broken.rank)
        return type(broken)(said) if broken is not None else Error(said)


def of(group: dist.ProcessGroup | None = None) -> Channel:
    """The channel of a group (None: of all ranks)."""
    key = id(group)
    known = _known.get(key)
    if known is not None:
        alive = known.group_ref()
        if alive is not None and alive is (_world.default_pg if group is None else group):
            return known
    found = _known[key] = _find(group)
    return found


def _find(group: dist.ProcessGroup | None) -> Channel:
    fabric = fabrics.of(group)
    channel = _channels.get(id(fabric))
    if channel is None or channel.fabric is not fabric:
        for key, other in list(_channels.items()):
            if other.fabric.closed:
                del _channels[key]
        for known in [key for key, other in _known.items() if other.fabric.closed]:
            del _known[known]
        channel = _channels[id(fabric)] = Channel(fabric)
    return channel


def _explain_last() -> tuple[float, explain.Explanation] | None:
    told = [telling.explain_last(c.native, c.world) for c in list(_channels.values())]
    return max((one for one in told if one is not None), key=lambda one: one[0], default=None)


explain.others.append(_explain_last)


def check_engine(engine: str) -> None:
    if engine not in ("dma", "cores"):
        raise Unsupported(f"a collective is moved by dma or cores, not {engine!r}")


def check_reduction(dtype: torch.dtype, reduction: int) -> None:
    """That a dtype can be reduced so."""
    if not _native.can_reduce(DTYPES.get(dtype, OTHER), reduction):
        raise Unsupported(
            f"{str(dtype).removeprefix('torch.')} has no reduction {REDUCTIONS[reduction]!r} here"
        )
