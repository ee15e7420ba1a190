"""The NUMA nodes of this machine, and keeping a rank's part of the heap on its own.

A page of shared memory lies on the node of the thread that touches it first. A rank's results are
often stored by its peers, so that without a policy they would lie on the nodes of the peers.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Collection, Mapping
from pathlib import Path

SYSTEM = Path("/sys/devices/system/node")
_MBIND = {"x86_64": 237, "aarch64": 235}
"""The number of the system call, by architecture."""
_PREFERRED = 1
_BITS = 64

Nodes = Mapping[int, frozenset[int]]


def nodes(system: Path | None = None) -> Nodes:
    """The cores of every node that has some; nothing if the kernel does not tell."""
    found = {}
    for folder in (SYSTEM if system is None else system).glob("node[0-9]*"):
        try:
            cores = numbers((folder / "cpulist").read_text("ascii"))
        except (OSError, ValueError):
            continue
        if cores:
            found[int(folder.name.removeprefix("node"))] = cores
    return dict(sorted(found.items()))


def numbers(text: str) -> frozenset[int]:
    """The numbers of a list of the kernel, e.g. 0-2,8."""
    found: set[int] = set()
    for one in filter(None, text.strip().split(",")):
        first, _, last = one.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def node_of(known: Nodes, cores: Collection[int]) -> int | None:
    """The node on which all of these cores are. None if there is only one node, or if the cores are
    on several: then no node is the right one."""
    if len(known) < 2 or not cores:
        return None
    return next((node for node, own in known.items() if own.issuperset(cores)), None)


def keep_near(address: int, size: int, system: Path | None = None) -> int | None:
    """Puts pages that do not exist yet on the node of this process, whoever touches them first.
    Returns the node; None if there is nothing to choose, or if the system does not allow it."""
    node = node_of(nodes(system), os.sched_getaffinity(0))
    if node is None or not _prefer(address, size, node):
        return None
    return node


def _prefer(address: int, size: int, node: int) -> bool:
    """Whether the kernel has taken the preference. Containers may forbid the call, and kernels may
    lack it; memory then lies where it is touched first."""
    call = _MBIND.get(platform.machine())
    if call is None:
        return False
    words = node // _BITS + 1
    mask = (ctypes.c_uint64 * words)()
    mask[node // _BITS] = 1 << node % _BITS
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    place, length, count = ctypes.c_void_p(address), ctypes.c_size_t(size), words * _BITS + 1
    # The kernel takes one bit less than it is told.
    taken: int = syscall(
        ctypes.c_long(call), place, length, _PREFERRED, mask, ctypes.c_ulong(count), 0
    )
    return taken == 0
