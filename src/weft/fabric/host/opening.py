"""Opens the memory that the ranks of one machine share."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch.distributed as dist

from weft.errors import Unsupported, nearest
from weft.fabric import _native
from weft.fabric.host.numa import keep_near
from weft.fabric.link import Link
from weft.fabric.rendezvous import check_alive, check_versions, exchange, machine

SPIN_NS = 100_000
"""How long a waiting compute thread spins before it sleeps, if every rank has a core."""
_ENDING = 1.0
"""Seconds in which a process that has let go of its memory ends."""


@dataclass(frozen=True)
class _Card:
    """The card of a rank for the others of its machine."""

    machine: str
    pid: int
    fd: int
    version: str
    span: int
    error: str = ""


def open_heap(group: dist.ProcessGroup, members: Sequence[int], deadline: float) -> _native.Fabric:
    """The memory that this rank shares with the members of its machine, and its copy engines. All
    members call this together."""
    here, world = list(members).index(dist.get_rank(group)), len(members)
    if world > _native.MAX_WORLD:
        raise Unsupported(f"the host fabric takes up to {_native.MAX_WORLD} ranks, not {world}")

    def swap(card: _Card, what: str) -> list[_Card]:
        cards = exchange(group, members, what, asdict(card), deadline)
        return [_Card(**card) for card in cards]

    span = heap_span()
    kernels()  # raises here, where the other ranks are told
    fd, error = -1, ""
    if here == 0:
        try:
            fd = _native.create_heap(world, span)
        except (RuntimeError, OSError) as failure:
            error = str(failure)
    own = _Card(machine(), os.getpid(), fd, _native.VERSION, span, error)
    try:
        cards = swap(own, "cards")
        _check(cards, members)
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
        engine_spin = spin if _native.num_process_cores() > 1 else 0
        native = _native.Fabric(fd, here, world, cards[0].span, spin, engine_spin, own_cores(world))
        first = native.allocate(1)
        keep_near(first.pointer - first.offset, cards[0].span)
        del first
        for place, card in enumerate(cards):
            if place != here:
                native.watch(place, os.pidfd_open(card.pid), card.pid)
    except (RuntimeError, OSError) as failure:
        error = f"cannot share memory with rank {members[0]}: {failure}"
    # A second exchange: either every rank has opened the memory, or all raise the error of one.
    cards = swap(replace(own, error=error), "opened")
    if any(card.error for card in cards):
        _check_alive(group, members)
    _check(cards, members)
    assert native is not None
    return native


def _check_alive(group: dist.ProcessGroup, members: Sequence[int]) -> None:
    """Raises if a rank has died, which is then why its memory could not be opened. That is gone a
    little before the process is."""
    others = [member for member in members if member != dist.get_rank(group)]
    until = time.monotonic() + _ENDING
    while time.monotonic() < until:
        check_alive(group, others)
        time.sleep(0.01)


def _check(cards: Sequence[_Card], members: Sequence[int]) -> None:
    """Raises unless all ranks succeeded and are on the same machine, with the same version."""
    for rank, card in zip(members, cards, strict=True):
        if card.error:
            raise Unsupported(f"rank {rank} {card.error}")
        if card.machine != cards[0].machine:
            raise Unsupported(
                "the host fabric needs all ranks of a group on one machine; ranks "
                f"{members[0]} and {rank} are on different ones: unset WEFT_FABRIC"
            )
    check_versions([card.version for card in cards], members)


def own_cores(world: int) -> int:
    """The cores that this rank has for itself: those that it is pinned to, but no more than its
    share, because ranks that are not pinned may all use the same ones."""
    return min(_native.num_process_cores(), max(1, (os.cpu_count() or 1) // world))


def heap_span() -> int:
    """Bytes of each rank's part of the heap. It is only a limit: a page takes memory when
    touched."""
    text = os.environ.get("WEFT_HEAP", "")
    if text:
        try:
            asked = int(Link.parse(f"{text}/s").bandwidth or 0)
        except Unsupported:
            raise Unsupported(f"WEFT_HEAP is {text!r}; write a size such as 64GiB") from None
        return -(-asked // 2**21) * 2**21
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(total, 2**30) // 2**21 * 2**21


def kernels() -> str:
    """The native kernels that WEFT_KERNELS chooses, or an empty text for the best. Raises unless
    this processor runs them."""
    asked, known = os.environ.get("WEFT_KERNELS", ""), _native.kernel_names()
    if asked and asked not in known:
        raise Unsupported(
            f"WEFT_KERNELS is {asked!r}{nearest(asked, known)}; "
            f"this processor runs {', '.join(known)}"
        )
    return asked
