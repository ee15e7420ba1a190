"""Where bytes move. `of(group)` returns the fabric of a torch.distributed group.

The interface is in `interface.py`. A fabric for another device registers itself with `register`.
"""

from __future__ import annotations

import _thread
import atexit
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist

from weft.errors import Unsupported
from weft.fabric import _native, gloo_threads
from weft.fabric.deadlines import deadline_of
from weft.fabric.group.several_machines import SeveralMachines
from weft.fabric.host.one_machine import OneMachine
from weft.fabric.interface import Capabilities, Fabric
from weft.fabric.link import Link
from weft.fabric.processes import ProcessFabric
from weft.fabric.reach import Reach
from weft.fabric.rendezvous import hello, opening

VERSION: str = _native.VERSION
"""The version of weft, as it was built."""

Opener = Callable[[dist.ProcessGroup, torch.device], Fabric]

is_set: Callable[[str], bool] = _native.is_set
"""Whether an environment variable is set; faster than `os.environ`, for checks at every call."""

_native.learn_tensors(torch.Tensor, torch.nn.Parameter)
layouts_of: Callable[[Sequence[object], bool], bytes | None] = _native.layouts_of
"""The values of arguments and the layouts of their tensors, for lookups at every call; None if it
cannot tell. The flag: not for tensors that require a gradient."""
watch, again = _native.watch, _native.again
KnownCalls: TypeAlias = _native.KnownCalls
"""Known calls that native code makes from their arguments on (`weft.ops.known`)."""

_world = dist.distributed_c10d._world
_CPU = "cpu"
_open: dict[tuple[int, str], Fabric] = {}
"""Open fabrics, by group and type of device."""
_numbers = itertools.count(1)
"""Of groups that are gone although something still runs on them; those of others are addresses."""
_openers: dict[str, dict[str, Opener]] = {}
"""Openers by type of device, then by the name of the kind; "" is the default kind."""
_changing = threading.Lock()
_ending = False
"""Whether Python ends."""
_closers: list[_thread.LockType] = []
"""A lock for each thread that closes a fabric whose group is gone, held until it has."""
os.register_at_fork(after_in_child=_closers.clear)
_CLOSING = 5.0
_NAP = 0.005
"""Seconds: the longest that the end of Python waits for such a thread, and the time between two
looks at what still runs on a fabric."""
_opening: WeakKeyDictionary[dist.ProcessGroup, threading.RLock] = WeakKeyDictionary()
"""A lock for each group. Opening waits for the other ranks, whose threads may open another group
first, so one lock for all groups could deadlock. A device's opener takes it again, for the host
fabric that it stands beside."""


def register(device: str, opener: Opener, kind: str = "") -> None:
    """Registers a fabric for tensors of a type of device, such as "cuda". All ranks of a group
    call the opener together, in the first call with such tensors. kind: the name by which
    WEFT_FABRIC chooses this fabric, if the device has another one."""
    _openers.setdefault(device, {})[kind] = opener


def devices() -> list[str]:
    """The types of device that have a fabric."""
    return list(_openers)


def check_device(name: str, tensor: torch.Tensor) -> None:
    """Raises unless a tensor is on a type of device that has a fabric."""
    if not tensor.is_cpu and tensor.device.type not in _openers:
        raise Unsupported(
            f"{name} is on {tensor.device}, which has no fabric; "
            f"use tensors on {' or '.join(_openers)}"
        )


def of(group: dist.ProcessGroup | None = None, device: torch.device | str = _CPU) -> Fabric:
    """The fabric of a group (None: of all ranks) for tensors of a device. It is opened by the first
    call, which all ranks make together."""
    kind = device if type(device) is str else device.type  # type: ignore[union-attr]
    asked = group if group is not None else _world.default_pg
    known = _open.get((id(asked), kind))
    if known is not None and known.group_ref() is asked and known.pid == os.getpid():
        return known
    return _find(group, torch.device(device))


def _find(group: dist.ProcessGroup | None, device: torch.device) -> Fabric:
    if not dist.is_available() or not dist.is_initialized():
        raise Unsupported(
            "there is no process group yet; call torch.distributed.init_process_group('gloo') first"
        )
    found = group if group is not None else dist.group.WORLD
    if not isinstance(found, dist.ProcessGroup):  # torch gives a placeholder to outsiders
        raise Unsupported("this rank is not in the group; call only from ranks that are")
    key = (id(found), device.type)
    fabric = _open.get(key)
    if fabric is None or fabric.group_ref() is not found:
        with _changing:
            _close_stale()
            opening = _opening.get(found)
            if opening is None:
                opening = _opening[found] = threading.RLock()
                finalize(found, _group_is_gone).atexit = False
        with opening:
            fabric = _open.get(key)
            if fabric is None or fabric.group_ref() is not found:
                _make_room(found)
                fabric = _open[key] = _opener(device)(found, device)
    elif fabric.pid != os.getpid():
        raise Unsupported(
            "this process was forked from a rank and is none itself; call from the rank's process"
        )
    return fabric


def _make_room(group: dist.ProcessGroup) -> None:
    """Gives another number to fabrics on which something still runs, although their group is gone,
    and this group is at its address."""
    with _changing:
        number = -next(_numbers)
        for key, fabric in list(_open.items()):
            if key[0] == id(group) and fabric.group_ref() is not group:
                _open[number, key[1]] = _open.pop(key)


def _opener(device: torch.device) -> Opener:
    if device.type not in _openers:
        raise Unsupported(
            f"there is no fabric for {device.type} tensors; use tensors on {' or '.join(_openers)}"
        )
    kinds = _openers[device.type]
    return kinds.get(os.environ.get("WEFT_FABRIC", ""), kinds[""])


def leave(group: dist.ProcessGroup) -> None:
    """Leaves a group that is being destroyed: when nothing runs on it any more, which is mostly at
    once. Waits of peers for this rank end then."""
    fabrics = [fabric for fabric in list(_open.values()) if fabric.group_ref() is group]
    if any(map(_is_busy, fabrics)):
        _close_in_background(lambda: fabrics)
    else:
        with _changing:
            _close(fabrics)


def check(group: dist.ProcessGroup | None = None, synchronize: bool = True) -> None:
    """Raises the error of a call on a device that has ended, see `weft.check`."""
    asked = group if group is not None else _world.default_pg
    for key, fabric in list(_open.items()):
        if key[1] != _CPU and fabric.group_ref() is asked and fabric.pid == os.getpid():
            fabric.check(synchronize)  # type: ignore[attr-defined]


def kinds() -> list[str]:
    """The names of registered fabrics that WEFT_FABRIC can choose."""
    return sorted({kind for made in _openers.values() for kind in made if kind})


def open_on_cpu(group: dist.ProcessGroup, device: torch.device) -> ProcessFabric:
    """The host fabric if all ranks are on one machine, otherwise the group fabric."""
    deadline = deadline_of(group)
    with opening(group):
        link = Link.parse(os.environ.get("WEFT_LINK") or "memory")
        cards = hello(group, deadline, kinds())
        asked = cards[0].fabric
        together = len({card.machine for card in cards}) == 1
        if len(cards) == 1 or asked == "host" or (together and asked not in ("group", "flat")):
            reach: Reach = OneMachine(group, deadline)
        else:
            reach = SeveralMachines(group, cards, deadline)
        try:
            fabric = ProcessFabric(group, reach)
            fabric.set_link(link)
        except BaseException:
            reach.close()
            raise
        return fabric


def open_on_device(group: dist.ProcessGroup, device: torch.device) -> Fabric:
    """The fabric of an accelerator, beside the host fabric of the same group."""
    from weft.fabric.device.device_fabric import DeviceFabric

    host = of(group)
    assert isinstance(host, ProcessFabric)
    return DeviceFabric(device, host)


register(_CPU, open_on_cpu)
register("cuda", open_on_device)


def _group_is_gone() -> None:
    """Closes the fabric of a group that torch has freed, so that its peers do not wait for this
    rank."""
    _close_in_background(_freed)


def _freed() -> list[Fabric]:
    """The fabrics whose groups torch has freed. A device is not waited for: its fabrics are closed
    by the next lookup, or when Python ends."""
    with_device = {group for group, kind in list(_open) if kind != _CPU}
    return [
        fabric
        for (group, _), fabric in list(_open.items())
        if fabric.group_ref() is None and group not in with_device
    ]


def _close_in_background(find: Callable[[], list[Fabric]]) -> None:
    """Closes fabrics when nothing runs on them any more. A thread does it, for a group may be freed
    at any point, under any lock. It is not waited for, as `threading.Thread` would wait for its
    start."""
    if _ending:
        return  # all fabrics are closed
    ended = _thread.allocate_lock()
    ended.acquire()
    _closers[:] = [*(one for one in _closers if one.locked()), ended]
    _thread.start_new_thread(_close_when_idle, (find, ended))


def _close_when_idle(find: Callable[[], list[Fabric]], ended: _thread.LockType) -> None:
    try:
        for fabric in find():
            while _is_busy(fabric) and not (fabric.closed or _ending):
                time.sleep(_NAP)
            if _ending:
                return
            with _changing:
                _close([fabric])
    finally:
        ended.release()


def _is_busy(fabric: Fabric) -> bool:
    """Whether something runs in the background, or a call of another thread."""
    if not fabric.lock.acquire(blocking=False):
        return True
    fabric.lock.release()
    return any(runs() for runs in fabric.in_background)


def _close_stale() -> None:
    """Closes the fabrics of groups that are destroyed and on which nothing runs any more."""
    alive = dist.distributed_c10d._world.pg_map
    stale = {key: found for key, found in list(_open.items()) if found.group_ref() not in alive}
    busy = {group for (group, _), fabric in stale.items() if _is_busy(fabric)}
    _close([fabric for (group, _), fabric in stale.items() if group not in busy])


def _close(fabrics: Sequence[Fabric]) -> None:
    """Closes fabrics, those of devices before the host fabrics that they stand on."""
    for key, fabric in sorted(_open.items(), key=lambda item: item[0][1] == _CPU):
        if fabric in fabrics:
            fabric.close()
            del _open[key]


@atexit.register
def _close_all() -> None:
    global _ending
    _ending = True
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C now ends the process without a word
    while _closers:  # this function may run twice
        _closers.pop().acquire(timeout=_CLOSING)
    _close(list(_open.values()))
    gloo_threads.settle()


__all__ = [
    "VERSION",
    "Capabilities",
    "Fabric",
    "Link",
    "devices",
    "is_set",
    "leave",
    "of",
    "register",
]
