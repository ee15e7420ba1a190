"""Whether the ranks of a group are still there, before they share memory.

Two things tell. A rank writes the number of its process into the store of the group, so that ranks
of the same machine can watch the process. And the connections of gloo, if the group has them, are
closed when a process ends, on whatever machine it was.
"""

from __future__ import annotations

import json
import os
import select
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from weft.fabric import _native

_TAG = 2**31 - 1
"""The tag of receives that only ask whether a connection is open. Nobody sends with it."""


def store_of(group: dist.ProcessGroup) -> Any:
    """The store of a group."""
    own = getattr(group, "store", None)  # a group of weft's backend has it before torch knows it
    if isinstance(own, Store):
        return own
    return dist.distributed_c10d._get_process_group_store(group)


def present(store: Any, rank: int, machine: str) -> None:
    """Writes which process this rank is."""
    store.set(_key(rank), json.dumps([machine, os.getpid()]))


def lost(group: dist.ProcessGroup, ranks: Sequence[int], machine: str) -> int | None:
    """The first of these ranks whose process is known to have ended; None if there is none.
    machine: the name of this one."""
    for rank in ranks:
        if _process_ended(group, rank, machine) or _connection_closed(group, rank):
            return rank
    return None


def _key(rank: int) -> str:
    return f"weft/process/{rank}"


def _process_ended(group: dist.ProcessGroup, rank: int, machine: str) -> bool:
    for store, number in _written(group, rank):
        try:
            if store.check([_key(number)]):
                where, pid = json.loads(store.get(_key(number)))
                return where == machine and ended(pid)
        except RuntimeError:  # the store is gone
            return False
    return False


def _written(group: dist.ProcessGroup, rank: int) -> Iterator[tuple[Any, int]]:
    """The stores in which a rank may have written its process, and its number there: that of the
    group, and that of all ranks, for a rank may have died before this group was made."""
    yield store_of(group), rank
    everyone = dist.group.WORLD
    if everyone is None or everyone is group:
        return
    try:
        yield store_of(everyone), dist.get_global_rank(group, rank)
    except (ValueError, RuntimeError):  # torch does not know this group yet
        return


def ended(pid: int) -> bool:
    """Whether a process of this machine is over, or dying."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except OSError:  # no descriptor is left, or the kernel does not let us
        return False
    try:
        look = select.poll()
        look.register(watched, select.POLLIN)
        return bool(look.poll(0)) or _native.is_dying(pid)
    finally:
        os.close(watched)


def _connection_closed(group: dist.ProcessGroup, rank: int) -> bool:
    """Whether gloo has found its connection to a rank closed: a receive can then not be posted. It
    asks nothing if connections are made only when they are used."""
    if os.environ.get("TORCH_GLOO_LAZY_INIT", "0") not in ("", "0"):
        return False
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:  # the group has none for this device
        return False
    if backend.name() != "gloo":
        return False
    try:
        # Dropped at once: what is posted holds no more than a reference to the buffer.
        group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], rank, _TAG)
    except RuntimeError:
        return True
    return False
