"""Used by tests inside a rank process (`rank_pools.py` starts them): reports to the test, groups,
scripts, and products that are checked."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from multiprocessing.connection import Connection

pipe: Connection | None = None
"""To the tests."""


@dataclass(frozen=True)
class Told:
    """What a rank says while its function is under way."""

    what: str


def tell(what: str) -> None:
    """Tells the test how far this rank is; see `Job.hear`."""
    assert pipe is not None
    pipe.send(Told(what))


def integers(shape, dtype, seed: int):
    """Small whole numbers, the same on every rank: their sums are exact in every dtype."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, tuple(shape), generator=generator).to(dtype)


def product(x, w):
    """x @ w, exactly."""
    return (x.double() @ w.double()).to(x.dtype)


@contextmanager
def without_group() -> Iterator[Callable[[str], None]]:
    """Takes this rank out of its group while the block lasts, and into a new one afterwards. Gives
    a function that makes a group of a backend meanwhile, with a store of its own."""
    import torch.distributed as dist

    start, store = dist.init_process_group, dist.distributed_c10d._get_default_store()
    rank, world = dist.get_rank(), dist.get_world_size()
    without_group.times = getattr(without_group, "times", 0) + 1

    def begin(backend: str, what: str = "meanwhile") -> None:
        own = dist.PrefixStore(f"{what} {without_group.times}", store)
        start(backend, store=own, rank=rank, world_size=world)

    dist.destroy_process_group()
    try:
        yield begin
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        begin("gloo", "after")


def renew_group() -> None:
    with without_group():
        pass


def on_weft(function, *arguments):
    """Runs a function with a weft group as the default group of this rank."""
    with without_group() as begin:
        begin("weft")
        return function(*arguments)


def run_script(code: str, name: str, arguments: Sequence[str] = ()) -> str:
    """What a script prints on this rank, run as torchrun would start it: the group is made and
    destroyed by the script."""
    import torch
    import torch.distributed as dist

    output = io.StringIO()
    start, argv, num_threads = dist.init_process_group, sys.argv, torch.get_num_threads()
    with without_group() as begin:
        dist.init_process_group, sys.argv = begin, [name, *arguments]
        try:
            with redirect_stdout(output):
                exec(compile(code, name, "exec"), {"__name__": "__main__"})
        finally:
            dist.init_process_group, sys.argv = start, argv
            torch.set_num_threads(num_threads)
            os.environ.pop("WEFT_SCHEDULE", None)
    return output.getvalue()


def shard_of(x, group=None):
    """This rank's rows of x, by an even split."""
    import torch.distributed as dist

    return x.tensor_split(dist.get_world_size(group))[dist.get_rank(group)]


def check_call(m, n, k, dtype=None, *, seed: int = 0, group=None, **options) -> None:
    """One all_gather_matmul against plain torch, bit for bit."""
    import torch

    import weft

    dtype = dtype or torch.float32
    x, w = integers((m, k), dtype, seed), integers((k, n), dtype, seed + 1)
    y = weft.all_gather_matmul(shard_of(x, group), w, group=group, **options)
    assert y.dtype == dtype
    assert torch.equal(y, product(x, w)), (m, n, k, dtype, options)
