"""How ranks meet before they share anything: each puts a card into the group's store and reads the
cards of the others. This is no collective, so that a missing rank is named by a `Timeout` and an
interrupt works."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import torch.distributed as dist

from weft.errors import PeerLost, Timeout, Unsupported, nearest
from weft.fabric import _native

Kind = Literal["auto", "host", "group", "flat"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""What WEFT_FABRIC may say. auto: shared memory where all ranks share a machine, otherwise group.
group: the network between machines and shared memory inside. flat: the network for every peer."""


@dataclass(frozen=True)
class Hello:
    """The first card: where a rank is, which weft it runs, and which fabric it asks for."""

    machine: str
    host: str
    version: str
    fabric: str
    error: str = ""


def hello(group: dist.ProcessGroup, deadline: float, more: Sequence[str] = ()) -> list[Hello]:
    """The first cards of all ranks, which have the same weft and ask for the same fabric."""
    asked = os.environ.get("WEFT_FABRIC", "auto")
    error = ""
    known = [*KINDS, *more]
    if asked not in known:
        error = (
            f"has WEFT_FABRIC={asked!r}{nearest(asked, known)}; it may be one of {', '.join(known)}"
        )
    own = Hello(machine(), _host_name(), _native.VERSION, asked, error)
    members = range(dist.get_world_size(group))
    said = exchange(group, members, "hello", asdict(own), deadline)
    # An older or newer weft may have other fields; its version is compared next.
    cards = [Hello(**{name: card.get(name, "") for name in asdict(own)}) for card in said]
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
    """Raises unless all ranks run the same weft."""
    for rank, version in zip(members, versions, strict=True):
        if version != versions[0]:
            raise Unsupported(
                f"rank {members[0]} runs weft {versions[0]} and rank {rank} {version}; "
                "install the same version everywhere"
            )


def exchange(
    group: dist.ProcessGroup,
    members: Sequence[int],
    what: str,
    card: dict[str, Any],
    deadline: float,
) -> list[dict[str, Any]]:
    """The cards of these ranks of a group, in their order; each of them must ask."""
    rank = dist.get_rank(group)
    store = dist.distributed_c10d._get_process_group_store(group)
    try:
        # A group that is made again on the same store must not read the cards of the last one.
        time_opened = store.add(f"weft/{what}/{rank}/times", 1)
        keys = {member: f"weft/{what}/{member}/{time_opened}" for member in members}
        store.set(keys[rank], json.dumps(card))
        until, pause = time.monotonic() + deadline, 1e-4
        while not store.check(list(keys.values())):
            if time.monotonic() > until:
                gave_up = f"gave up after it had waited {deadline:g} s for the others"
                store.set(keys[rank], json.dumps({**card, "error": gave_up}))
                late = [member for member, key in keys.items() if not store.check([key])]
                raise Timeout(
                    f"rank {rank} waited {deadline:g} s in the first call on this "
                    f"group for {listed(late)} to make it too; see what that rank is doing, or "
                    "allow more with WEFT_DEADLINE"
                )
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)
        return [json.loads(store.get(key)) for key in keys.values()]
    except RuntimeError as failure:
        raise PeerLost(
            f"the store of torch.distributed that introduces the ranks is gone: {failure}"
        ) from None


def machine() -> str:
    """What is the same for two processes exactly if they share memory, process numbers and their
    way to the network. WEFT_HOST overrides it: ranks with the same name are on one machine."""
    named = os.environ.get("WEFT_HOST")
    if named:
        return f"named {named}"
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return boot + os.readlink("/proc/self/ns/pid") + os.readlink("/proc/self/ns/net")


def listed(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _host_name() -> str:
    return os.environ.get("WEFT_HOST") or socket.gethostname()
