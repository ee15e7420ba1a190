"""The channel of a group, seen from Python: one native call per collective, errors in words.

Collectives have numbers, memory and a thread of their own, so they neither disturb the numbering of
the operators' calls nor need the GIL while they are under way.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from os import getpid
from typing import Any

import torch
import torch.distributed as dist

from weft import fabric as fabrics
from weft.collectives.kinds import DTYPES, OTHER, REDUCTIONS, SUM
from weft.errors import Cancelled, Error, Mismatch, PeerLost, Timeout, Unsupported
from weft.fabric import HostFabric, _native
from weft.fabric.host import (
    AGAIN,
    DISAGREE,
    OK,
    PEER_FAILED,
    PEER_LEFT,
    PEER_LOST,
    TIMEOUT,
    WITHDRAWN,
)

_world = dist.distributed_c10d._world
FOREVER = 2**63 - 1
_EMPTY = 64
"""Stands for the place of an empty tensor, which has none; nothing is ever read there."""

_channels: dict[int, Channel] = {}
"""By fabric."""
_known: dict[int, Channel] = {}
"""By the group that was asked for, or None."""


class Channel:
    """The collectives of one group on this rank. Made by `of(group)`."""

    def __init__(self, fabric: HostFabric) -> None:
        self.fabric = fabric
        self.native = fabric.channel
        self.rank, self.world = fabric.rank, fabric.world
        self.group_ref, self.pid = fabric.group_ref, fabric.pid
        self._alike = self.native.alike
        self._under_way: deque[tuple[_native.Job, Any]] = deque()
        self._messages: list[tuple[_native.Message, torch.Tensor]] = []

    # -- starting ----------------------------------------------------------------------------------

    def at_once(
        self,
        kind: int,
        dtype: torch.dtype,
        source: int,
        target: int,
        num_bytes: int,
        reduction: int = SUM,
        root: int = 0,
    ) -> None:
        """Carries out a collective of checked arguments from place to place: as little Python as
        can be, for small messages."""
        fabric = self.fabric
        if fabric.broken is not None:
            raise self.over()
        job = self._alike(
            self.world,
            kind,
            DTYPES.get(dtype, OTHER),
            dtype.itemsize,
            reduction,
            root,
            False,
            int(fabric.deadline * 1e9),
            source or _EMPTY,
            target or _EMPTY,
            num_bytes,
            False,
        )
        if job is not None:
            self.wait(job)

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
        job = self.native.alike(
            self.world,
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
        )
        if job is None:
            return None
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
        )
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

    def keep_message(self, message: _native.Message, tensor: torch.Tensor) -> None:
        """Keeps the tensor of a message alive while it is under way, for nobody may wait for it."""
        self._messages = [kept for kept in self._messages if not kept[0].done]
        if not message.done:
            self._messages.append((message, tensor))

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
        code, rank = outcome
        error: Error
        if code == TIMEOUT:
            error = Timeout(
                f"rank {self.rank} was {where} and waited {self.patience:g} s for {waiting_for}; "
                "see what that rank is doing, or allow more with weft.configure(deadline=...)"
            )
        elif code == PEER_LOST:
            error = PeerLost(f"rank {rank} died; rank {self.rank} was {where}", rank)
        elif code == PEER_LEFT:
            error = PeerLost(f"rank {rank} left the group; rank {self.rank} was {where}", rank)
        elif code == PEER_FAILED:
            error = PeerLost(f"rank {rank} gave up; rank {self.rank} was {where}", rank)
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
    if known is not None and known.pid == getpid():
        if group is None:
            if known.group_ref() is _world.default_pg:
                return known
        elif known.group_ref() is group:
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


def check_engine(engine: str) -> None:
    if engine not in ("dma", "cores"):
        raise Unsupported(f"a collective is moved by dma or cores, not {engine!r}")


def check_reduction(dtype: torch.dtype, reduction: int) -> None:
    """That a dtype can be reduced so."""
    if not _native.can_reduce(DTYPES.get(dtype, OTHER), reduction):
        raise Unsupported(
            f"{str(dtype).removeprefix('torch.')} has no reduction {REDUCTIONS[reduction]!r} here"
        )
