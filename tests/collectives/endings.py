"""Ranks that end in every way a script can end, each in an interpreter that ends as scripts do.

    python endings.py FOLDER     # prints {ending: [exit code of rank 0, of rank 1]} as JSON

Ranks are forked from here, so torch is imported once; they run to the end of this file, where
Python takes itself apart while threads of weft may still be at work.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
import torch.distributed as dist

import weft

weft.fabric._CLOSING = 1000.0  # a wait for what does not come must not pass for a short one
CODES = (0, 3)
"""What the ranks of every ending exit with."""


def nothing_pending() -> None:
    weft.all_gather_matmul(torch.ones(4, 4), torch.ones(4, 4), schedule="adaptive@dma")
    weft.matmul_all_reduce(torch.ones(1, 64), torch.ones(64, 64))
    dist.all_reduce(torch.ones(4), async_op=True).get_future().wait()


def works_that_never_end() -> None:
    """The peer does not call: collectives, and messages of either kind, whose futures are kept."""
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:  # rank 0 has a peer until it ends
        store.wait(["through"])
        time.sleep(0.5)
        return
    for _ in range(3):
        keep(dist.all_reduce(torch.ones(1000), async_op=True))
    for tag in range(200):
        keep(dist.irecv(torch.empty(8), 1, tag=tag))
    keep(dist.isend(torch.ones(400_000), 1))
    weft.all_reduce(torch.ones(5), async_op=True)
    store.set("through", "")


def works_that_end_meanwhile() -> None:
    """Results come, and complete their futures, while Python ends."""
    for size in range(1, 300):
        keep(dist.all_reduce(torch.ones(size * 100), async_op=True))
    dist.distributed_c10d._get_default_store().barrier("started", 2)  # nobody waits for them


def training() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 300), torch.nn.Linear(300, 1))
    wrapped = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001)
    for _ in range(3):
        wrapped(torch.ones(4, 8)).sum().backward()
    keep(wrapped)


class Slow:
    """Python takes long to take this apart, and lets other threads run meanwhile."""

    def __del__(self, sleep=time.sleep) -> None:
        for _ in range(10):
            sleep(0.02)


slow = Slow()
kept: list[object] = []


def keep(thing) -> None:
    """Holds on to a thing until the interpreter ends; to a work's future too, with a callback."""
    kept.append(thing)
    if isinstance(thing, dist.Work):
        kept.append(thing.get_future().then(lambda future: future.value()))


ENDINGS = (
    (nothing_pending, True),
    (works_that_never_end, False),
    (works_that_never_end, True),
    (works_that_end_meanwhile, False),
    (training, False),
)
"""What is under way, and whether the group is destroyed before the end."""


def start(way, destroys: bool, rank: int, folder: str) -> int:
    """Forks a rank; in it, this returns 0 when the rank is through."""
    child = os.fork()
    if child:
        return child
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, f"{way.__name__}-{destroys}"), 2)
    dist.init_process_group("weft", store=store, rank=rank, world_size=2)
    way()
    if destroys:
        dist.destroy_process_group()
    return 0


def main(folder: str) -> None:
    children: dict[int, tuple[str, int]] = {}
    for way, destroys in ENDINGS:
        for rank, code in enumerate(CODES):
            child = start(way, destroys, rank, folder)
            if child == 0:
                sys.exit(code)
            name = f"{way.__name__}, {'destroyed' if destroys else 'left open'}"
            children[child] = (name, rank)
    codes: dict[str, list[int]] = {name: [0, 0] for name, _ in children.values()}
    for child, (name, rank) in children.items():
        codes[name][rank] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(json.dumps(codes))


if __name__ == "__main__":
    main(sys.argv[1])
