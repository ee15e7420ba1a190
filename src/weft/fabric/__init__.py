"""Where bytes really move. `of(group)` gives the fabric of a torch.distributed group."""

from __future__ import annotations

import atexit
import os
import threading
from weakref import WeakKeyDictionary

import torch.distributed as dist

from weft.errors import Unsupported
from weft.fabric.group import GroupFabric
from weft.fabric.host import HostFabric, deadline_of
from weft.fabric.link import Link
from weft.fabric.meeting import hello

_world = dist.distributed_c10d._world
_open: dict[int, HostFabric] = {}
_changing = threading.Lock()
_opening: WeakKeyDictionary[dist.ProcessGroup, threading.Lock] = WeakKeyDictionary()
"""A lock for each group: opening waits for the other ranks, whose threads may be opening another
group first."""


def of(group: dist.ProcessGroup | None = None) -> HostFabric:
    """The fabric of a group (None: of all ranks), opened at the first call, made by all ranks."""
    asked = group if group is not None else _world.default_pg
    known = _open.get(id(asked))
    if known is not None and known.group_ref() is asked and known.pid == os.getpid():
        return known
    if not dist.is_available() or not dist.is_initialized():
        raise Unsupported(
            "there is no process group yet; call torch.distributed.init_process_group('gloo') first"
        )
    found = group if group is not None else dist.group.WORLD
    if not isinstance(found, dist.ProcessGroup):  # torch gives a placeholder to outsiders
        raise Unsupported("this rank is not in the group; call only from ranks that are")
    fabric = _open.get(id(found))
    if fabric is None or fabric.group_ref() is not found:
        with _changing:
            _close_stale()
            opening = _opening.setdefault(found, threading.Lock())
        with opening:
            fabric = _open.get(id(found))
            if fabric is None or fabric.group_ref() is not found:
                fabric = _open[id(found)] = _opened(found)
    elif fabric.pid != os.getpid():
        raise Unsupported(
            "this process was forked from a rank and is none itself; call from the rank's process"
        )
    return fabric


def close(group: dist.ProcessGroup) -> None:
    """Leaves a group, if its fabric is open: peers that wait for this rank hear it at once."""
    with _changing:
        fabric = _open.get(id(group))
        if fabric is not None and fabric.group_ref() is group:
            del _open[id(group)]
            fabric.close()


def _opened(group: dist.ProcessGroup) -> HostFabric:
    """Shared memory where all ranks are on one machine; otherwise the network beside it."""
    cards = hello(group, deadline_of(group))
    asked = cards[0].fabric
    together = len({card.machine for card in cards}) == 1
    if len(cards) == 1 or asked == "host" or (asked == "auto" and together):
        return HostFabric(group)
    return GroupFabric(group, cards)


def _close_stale() -> None:
    """Closes the fabrics of groups that torch.distributed has destroyed."""
    alive = dist.distributed_c10d._world.pg_map
    for key, fabric in list(_open.items()):
        if fabric.group_ref() not in alive:
            fabric.close()
            del _open[key]


@atexit.register
def _close_all() -> None:
    for fabric in _open.values():
        fabric.close()
    _open.clear()


__all__ = ["GroupFabric", "HostFabric", "Link", "close", "of"]
