"""Points 4 and 6: symmetric memory, and whether a word that arrives means that the data has."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from weft.fabric.device.device_driver import Driver
from weft.measure.gpu.finding import Finding

BYTES = 8 << 20
WORDS = 64


@dataclass
class Peers:
    """Symmetric memory of this rank and of the next one."""

    device: torch.device
    mine: torch.Tensor
    theirs: torch.Tensor
    words: torch.Tensor
    their_words: torch.Tensor
    before_words: torch.Tensor
    """The words of the rank before this one, which pushes to this rank."""


def meet(device: torch.device) -> Peers:
    """Allocates and exchanges symmetric memory. All ranks call this together."""
    import torch.distributed._symmetric_memory as symm

    group = dist.group.WORLD
    assert group is not None
    rank, world = dist.get_rank(), dist.get_world_size()
    memory = symm.empty(BYTES + 4 * WORDS, dtype=torch.uint8, device=device)
    handle: Any = symm.rendezvous(memory, group)
    memory.zero_()
    torch.accelerator.synchronize()
    dist.barrier()

    def of(number: int) -> torch.Tensor:
        if number == rank:
            return memory
        first = handle.offset
        found: torch.Tensor = handle.get_buffer(number, memory.shape, torch.uint8, first)
        return found

    following, before = of((rank + 1) % world), of((rank - 1) % world)
    return Peers(
        device,
        memory[:BYTES],
        following[:BYTES],
        memory[BYTES:].view(torch.int32),
        following[BYTES:].view(torch.int32),
        before[BYTES:].view(torch.int32),
    )


def symmetric(peers: Peers) -> Finding:
    """Point 4: a peer's memory can be read and written through its view."""
    rank, world = dist.get_rank(), dist.get_world_size()
    peers.mine[:256].fill_(rank + 1)
    torch.accelerator.synchronize()
    dist.barrier()
    read = peers.theirs[:256].clone()
    torch.accelerator.synchronize()
    dist.barrier()
    peers.theirs[:256].fill_(100 + rank)
    torch.accelerator.synchronize()
    dist.barrier()
    following, before = (rank + 1) % world + 1, 100 + (rank - 1) % world
    right = set(read.tolist()) == {following} and set(peers.mine[:256].tolist()) == {before}
    found = f"torch's, on {world} ranks" if right else "wrong bytes"
    return Finding(4, "peers read and write", "ok" if right else "not", found)


def order(driver: Driver, peers: Peers, rounds: int, seed: int = 0) -> Finding:
    """Point 6: every round pushes a block of its own number to the next rank, then a word; the next
    rank waits for the word and counts the bytes that are not there yet. The host never waits."""
    stream = torch.Stream(peers.device)
    sizes = random.Random(seed)
    source = torch.empty(BYTES // 2, dtype=torch.uint8, device=peers.device)
    stale = torch.zeros(1, dtype=torch.int64, device=peers.device)
    arrived, taken = peers.words.data_ptr() + 16, peers.words.data_ptr() + 20
    stream.wait_stream(torch.accelerator.current_stream())
    for number in range(1, rounds + 1):
        size, value = sizes.randrange(1, len(source) + 1), number % 250 + 1
        with stream:
            source[:size].fill_(value)
        if number > 1:
            driver.wait(taken, number - 1, stream)  # the next rank has read the last block
        driver.copy(peers.theirs[:size], source[:size], stream)
        driver.post(peers.their_words.data_ptr() + 16, number, stream)
        driver.wait(arrived, number, stream)
        with stream:
            stale += (peers.mine[:size] != value).sum()
        driver.post(peers.before_words.data_ptr() + 20, number, stream)
    torch.accelerator.current_stream().wait_stream(stream)
    torch.accelerator.synchronize()
    dist.barrier()
    bad = int(stale.item())
    found = f"{rounds} rounds, {bad} stale bytes"
    remedy = "" if not bad else "report it: a word overtakes the data before it on this machine"
    return Finding(6, "data, then its word", "not" if bad else "ok", found, remedy)
