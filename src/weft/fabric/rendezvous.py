"""How ranks meet before they share memory: each writes a card into the store of the group and reads
the cards of the others. This is not a collective, so that a `Timeout` can name a missing rank and
an interrupt works. While a rank waits, it looks after those that are missing (`presence.py`)."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar, get_args
from weakref import WeakKeyDictionary

import torch.distributed as dist

from weft.errors import PeerLost, Timeout, Unsupported, nearest
from weft.fabric import _native
from weft.fabric.deadlines import nap, own_time
from weft.fabric.presence import lost, present, store_of

Kind = Literal["auto", "host", "group", "flat"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""The values of WEFT_FABRIC. auto: shared memory if all ranks are on one machine, otherwise group.
group: the network between machines and shared memory inside. flat: the network for every peer."""


@dataclass(frozen=True)
class Hello:
    """The first card: the machine of a rank, its version of weft, and the fabric that it asks
    for."""

    machine: str
    host: str
    version: str
    fabric: str
    error: str = ""


def hello(group: dist.ProcessGroup, deadline: float, more: Sequence[str] = ()) -> list[Hello]:
    """The first cards of all ranks. Raises unless they have the same version and ask for the same
    fabric."""
    asked = os.environ.get("WEFT_FABRIC", "auto")
    error = ""
    known = [*KINDS, *more]
    if asked not in known:
        error = (
            f"has WEFT_FABRIC={asked!r}{nearest(asked, known)}; it may be one of {', '.join(known)}"
        )
    own = Hello(machine(), _host_name(), _native.VERSION, asked, error)
    members = range(dist.get_world_size(group))
    found = exchange(group, members, "hello", asdict(own), deadline)
    # An older or newer weft may have other fields; its version is compared next.
    cards = [Hello(**{name: card.get(name, "") for name in asdict(own)}) for card in found]
    check_versions([card.version for card in cards], members)
    for rank, card in enumerate(cards):
        if card.error:
            raise Unsupported(f"rank {rank} {card.error}")
        if card.fabric != cards[0].fabric:
            raise Unsupported(
                f"a group has one fabric: WEFT_FABRIC is {cards[0].fabric} on rank 0 and "
                f"{card.fabric} on rank {rank}; set the same everywhere, or nowhere"
            )
    return cards


def check_versions(versions: Sequence[str], members: Sequence[int]) -> None:
    """Raises unless all ranks have the same version of weft."""
    for rank, version in zip(members, versions, strict=True):
        if version != versions[0]:
            raise Unsupported(
                f"rank {members[0]} runs weft {versions[0]} and rank {rank} {version}; "
                "install the same version everywhere"
            )


@contextmanager
def opening(group: dist.ProcessGroup) -> Iterator[None]:
    """The block in which a rank opens a fabric with others. Its exchanges have one number, the same
    on every rank, however the last attempt ended. If this rank raises or is interrupted, the others
    hear it as soon as they wait for it."""
    rank, store = dist.get_rank(group), store_of(group)
    attempts, number = f"weft/opening/{rank}", 0
    try:
        with _store_errors(group):
            number = _openings[group] = store.add(attempts, 1)
        present(store, rank, machine())
        yield
    except BaseException as error:
        with suppress(Exception):
            number = number or store.add(attempts, 0)  # the interrupt came with the number
            store.set(_note(number, rank), json.dumps(_words(error, rank)))
        raise
    finally:
        _openings.pop(group, None)


_openings: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""The number of the attempt to open a fabric that is under way."""

T = TypeVar("T")

LOOK = 0.2
"""Seconds between two looks at ranks that are missing."""


def number_of(group: dist.ProcessGroup) -> int:
    """The number of the attempt to open a fabric that is under way, the same on every rank."""
    return _openings[group]


def exchange(
    group: dist.ProcessGroup,
    members: Sequence[int],
    what: str,
    card: dict[str, Any],
    deadline: float,
) -> list[dict[str, Any]]:
    """The cards of these ranks of a group, in their order. Each of them must call this."""
    rank, store = dist.get_rank(group), store_of(group)
    with _store_errors(group):
        # A group that is made again on the same store must not read the cards of the last one.
        number = _openings.get(group) or store.add(f"weft/{what}/{rank}/times", 1)
        keys = {member: _card(what, member, number) for member in members}
        store.set(keys[rank], json.dumps(card))
        began, pause = own_time(), 1e-4
        look = began + min(LOOK, deadline)
        while not store.check(list(keys.values())):
            now = own_time()
            if now > look:
                missing = [member for member, key in keys.items() if not store.check([key])]
                try:
                    look_after(group, missing)
                except PeerLost:
                    if store.check(list(keys.values())):
                        break  # it came meanwhile, and gave up only after that
                    raise
                if now - began > deadline:
                    raise Timeout(
                        f"rank {rank} waited {deadline:g} s in the first call on this "
                        f"group for {listed(missing)} to make it too; see what that rank is "
                        "doing, or allow more with WEFT_DEADLINE"
                    )
                look = now + min(LOOK, max(0.0, deadline - (now - began)))
            nap(pause)
            pause = min(pause * 1.5, 0.02)
        return [json.loads(store.get(key)) for key in keys.values()]


def posted(group: dist.ProcessGroup, member: int, what: str) -> dict[str, Any] | None:
    """The card that a rank has written for an exchange of this opening; None if it has not yet."""
    store, key = store_of(group), _card(what, member, number_of(group))
    with _store_errors(group):
        card: dict[str, Any] | None = json.loads(store.get(key)) if store.check([key]) else None
    return card


def watched(make: Callable[[], T], look: Callable[[], None]) -> T | RuntimeError:
    """What `make` returns, or the RuntimeError that it raises. look: called meanwhile; raises if a
    peer is lost. torch cannot be stopped while it waits for peers, so a thread does, and ends by
    itself if a peer is lost."""
    made: list[T | RuntimeError] = []

    def run() -> None:
        try:
            made.append(make())
        except RuntimeError as error:
            made.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(LOOK)
        if thread.is_alive():
            look()
    return made[0]


def look_after(group: dist.ProcessGroup, missing: Sequence[int]) -> None:
    """Raises if one of the ranks that are missing cannot come any more."""
    check_alive(group, missing)  # first, because others give up because of it
    rank, store, number = dist.get_rank(group), store_of(group), _openings.get(group)
    for member in missing:
        note = "" if number is None else _note(number, member)
        if note and store.check([note]):
            said, cause = json.loads(store.get(note))
            raise PeerLost(
                f"rank {member} {said}; {_where(rank)}", member if cause == rank else cause
            )


def check_alive(group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
    """Raises if one of the ranks has died."""
    died = lost(group, ranks, machine())
    if died is not None:
        raise PeerLost(f"rank {died} died; {_where(dist.get_rank(group))}", died)


def _where(rank: int) -> str:
    return f"rank {rank} was in the first call on this group"


def _card(what: str, rank: int, number: int) -> str:
    """The key under which a rank writes its card for an exchange."""
    return f"weft/{what}/{rank}/{number}"


def _note(number: int, rank: int) -> str:
    """The key under which a rank says why it could not open the fabric."""
    return f"weft/gave up/{rank}/{number}"


def _words(error: BaseException, rank: int) -> tuple[str, int]:
    """Why this rank could not open the fabric, and the rank that is the cause."""
    if isinstance(error, Timeout):
        return "gave up after it had waited for the others", rank
    if isinstance(error, Exception):
        lost_one = error.rank if isinstance(error, PeerLost) and error.rank >= 0 else rank
        return f"gave up: {error}", lost_one
    return f"was interrupted by {type(error).__name__}", rank


@contextmanager
def _store_errors(group: dist.ProcessGroup) -> Iterator[None]:
    """Raises `PeerLost` if the store is gone, with the rank that it was on, if that is known."""
    try:
        yield
    except RuntimeError as failure:
        peers = [rank for rank in range(dist.get_world_size(group)) if rank != dist.get_rank(group)]
        died = lost(group, peers, machine())
        who = "" if died is None else f"rank {died} died, and "
        raise PeerLost(
            f"{who}the store of torch.distributed that introduces the ranks is gone: {failure}",
            -1 if died is None else died,
        ) from None


def machine() -> str:
    """A name that two processes share exactly if they share memory, process numbers and network.
    WEFT_HOST overrides it: ranks with the same name are on one machine."""
    named = os.environ.get("WEFT_HOST")
    if named:
        return f"named {named}"
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError as failure:
        raise Unsupported(
            f"this machine cannot be told from others ({failure}); allow more open files with "
            "ulimit -n, or name the machine with WEFT_HOST"
        ) from None
    return boot + os.readlink("/proc/self/ns/pid") + os.readlink("/proc/self/ns/net")


def listed(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _host_name() -> str:
    return os.environ.get("WEFT_HOST") or socket.gethostname()
