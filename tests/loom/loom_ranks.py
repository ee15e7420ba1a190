"""Rank processes with loom loaded, for many runs: forked from a server that has torch imported."""

from __future__ import annotations

import contextlib
import os

from rank_pools import Pool

from weft.loom import Session, find


class LoomPool:
    """The ranks of one world, each with a loom device of the same settings, and their logs."""

    def __init__(self, world: int, **settings: object) -> None:
        self.world = world
        self.session = Session(world)
        environment = {f"WEFT_LOOM_{k.upper()}": str(v) for k, v in settings.items()}
        environment["WEFT_LOOM_SESSION"] = self.session.path
        self.pool = Pool(world, {"WEFT_LOOM_CHECK": "1", "WEFT_LOOM_HEAP": "256", **environment})
        self.pool.run(_load)

    def run(self, function, *arguments, within: float = 90.0) -> list:
        return self.pool.run(function, *arguments, within=within)

    def check(self, name: str, drop: str | None = None, mode: str = "eager", seed: int = 0):
        """Runs a program of the corpus: (names of its waits, findings)."""
        names = self.run(run_program, name, drop, mode, seed)
        return names, find(self.session.logs())

    def close(self) -> None:
        self.pool.close()
        self.session.close()


def _load() -> None:
    import torch
    import torch.distributed as dist

    import weft.loom

    os.environ.update(
        RANK=str(dist.get_rank()),
        WORLD_SIZE=str(dist.get_world_size()),
        LOCAL_WORLD_SIZE=str(dist.get_world_size()),
        LOCAL_RANK=str(dist.get_rank()),
    )
    weft.loom.load()
    torch.zeros(1, device="loom")


def run_program(name: str, drop: str | None, mode: str, seed: int) -> list[str]:
    import gc

    import torch
    import torch.distributed as dist
    from loom_corpus import PROGRAMS, Run

    import weft.loom
    from weft.loom.library import loaded

    _, function = PROGRAMS[name]
    weft.loom.load(mode=mode, seed=seed)
    gc.collect()
    torch.accelerator.synchronize()
    dist.barrier()
    weft.loom.clear()
    dist.barrier()
    run = Run(drop)
    # A run that lacks a wait may fail in any way: what counts is what the detector says.
    with contextlib.suppress(Exception) if drop else contextlib.nullcontext():
        function(run)
        torch.accelerator.synchronize()
    dist.barrier()
    loaded().calls.loom_clear_failure()
    return run.names
