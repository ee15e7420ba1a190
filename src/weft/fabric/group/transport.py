"""Point-to-point transfers between ranks, with torch.distributed.

weft opens a process group of its own beside the caller's, as MPI libraries duplicate a
communicator. Its messages never mix with the caller's, and if it fails, the caller's group still
works. Transfers are asynchronous and progress while compute runs: gloo's own threads move the bytes
of everything that is posted.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

from weft.errors import Unsupported
from weft.fabric.group.responsive import become_responsive
from weft.fabric.presence import store_of
from weft.fabric.rendezvous import watched

ABORT_TAG = 2**31 - 1
_FOREVER = timedelta(days=10_000)
_CONNECT_WAITS = 5
"""The number of timeouts after which gloo gives up connecting."""


class Posted(Protocol):
    """A posted transfer."""

    def wait(self, timeout: timedelta = ...) -> bool: ...


class PostingGroup(Protocol):
    """The methods of a process group that are used. `dist.ProcessGroup` and its backends have
    them."""

    def send(self, tensors: list[torch.Tensor], dstRank: int, tag: int) -> Posted: ...  # noqa: N803
    def recv(self, tensors: list[torch.Tensor], srcRank: int, tag: int) -> Posted: ...  # noqa: N803


class Transport:
    """The messages of one rank. A message has a peer and a tag; a receive may be larger than its
    message. After `abort`, here or on a peer, all posted transfers fail on both."""

    def __init__(self, group: PostingGroup, rank: int, world: int) -> None:
        self._group = group
        _transports.add(self)
        self._peers = [peer for peer in range(world) if peer != rank]
        self._aborting = threading.Lock()
        self.aborted = False

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Posted:
        return self._group.send([tensor], peer, tag)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Posted:
        return self._group.recv([tensor], peer, tag)

    def abort(self) -> None:
        """Closes all connections. Transfers fail at once on this rank, and on a peer as soon as it
        sees the closed connection."""
        with self._aborting:
            if self.aborted:
                return
            self.aborted = True
            # gloo closes its connections only when a transfer passes its deadline. A transfer to a
            # lost peer fails at once and closes nothing else, so all peers are tried.
            nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
            for peer in self._peers:
                with suppress(RuntimeError):
                    self.receive(nothing, peer, ABORT_TAG).wait(timedelta(milliseconds=1))


_transports: weakref.WeakSet[Transport] = weakref.WeakSet()


def _keep_in_child() -> None:
    """Keeps the groups of transports for as long as a forked child lives. If it destroyed one, it
    would wait for gloo's threads, which it does not have, and take its parent's connections out of
    the epoll instance that both share."""
    for transport in _transports:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(transport._group))


os.register_at_fork(after_in_child=_keep_in_child)


def wait(work: Posted, seconds: float | None = None) -> None:
    """Waits for a transfer. Raises RuntimeError if it fails or takes longer."""
    allowed = _FOREVER if seconds is None else timedelta(seconds=max(seconds, 1e-3))
    work.wait(min(allowed, _FOREVER))


def connect_seconds(deadline: float) -> float:
    """How long opening a transport may take: the deadline, but at least 10 seconds and at most a
    day."""
    return min(max(deadline, 10.0), 86_400.0)


def open_transport(
    group: dist.ProcessGroup, name: str, deadline: float, look_after: Callable[[], None]
) -> Transport:
    """A transport between all ranks of a group. All of them call this with the same name.
    look_after: raises if a peer is lost; called while this waits for peers to connect."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    backend = _cpu_backend(group)
    if backend != "gloo" and not _is_accelerator(backend):
        return Transport(group, rank, world)  # e.g. mpi, which connects machines by itself
    # A connection of its own: while gloo waits for a key, others could not use the same one.
    store = store_of(group).clone()

    def make() -> ProcessGroupGloo:
        # gloo's threads are created by this one and inherit its responsiveness. They have little to
        # do, and while they wait for compute to leave the core, the link is idle.
        become_responsive()
        limit = timedelta(seconds=connect_seconds(deadline) / _CONNECT_WAITS)
        return ProcessGroupGloo(PrefixStore(name, store), rank, world, limit)

    own = watched(make, look_after)
    if isinstance(own, RuntimeError):
        raise Unsupported(
            f"has no way over the network to all other ranks ({_short(own)}); see whether its "
            "host name resolves to an address that they reach, or name the interface with "
            "GLOO_SOCKET_IFNAME"
        )
    return Transport(own, rank, world)  # type: ignore[arg-type]


def _cpu_backend(group: dist.ProcessGroup) -> str:
    """The backend that carries CPU tensors of a group."""
    try:
        return str(group._get_backend(torch.device("cpu")).name()).lower()
    except RuntimeError:  # e.g. a group of nccl alone
        return "gloo"


def _is_accelerator(backend: str) -> bool:
    return backend in ("nccl", "rccl", "xccl", "hccl")


def _short(failure: Exception, most: int = 120) -> str:
    lines: Sequence[str] = str(failure).strip().splitlines() or [type(failure).__name__]
    text = lines[0]
    return text if len(text) <= most else text[: most - 3] + "..."
