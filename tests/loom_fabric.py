"""Ranks whose tensors are on the emulated device, for the tests of operators.

Every run is checked: the detector reads the logs of all ranks, and a finding fails the test.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from rank_pools import Environment, Pool, Pools

MODES = ("late", "eager", "random")


@dataclass
class LoomRanks:
    """The ranks of one world with loom loaded, and the logs that they share."""

    pool: Pool
    session: object
    mode: str

    def run(self, function, *arguments, within: float = 180.0, **options) -> list:
        from weft.loom import find

        self.pool.run(clear, self.mode)
        try:
            values = self.pool.run(function, *arguments, within=within, **options)
            self.pool.run(settle)
        finally:
            findings = find(self.session.logs())
        assert not findings, findings[0]
        return values


@dataclass
class LoomPools:
    """One `LoomRanks` per world and settings."""

    pools: Pools
    made: dict = field(default_factory=dict)

    def get(self, world: int, mode: str = "late", **settings) -> LoomRanks:
        from weft.loom import Session

        key = (world, *sorted(settings.items()))
        found = self.made.get(key)
        if found is None or not found.pool.usable:
            if found is not None:
                found.pool.close()
                found.session.close()
            session = Session(world, log_bytes=1 << 30)
            environment: Environment = {
                "WEFT_LOOM_CHECK": "1",
                "WEFT_LOOM_HEAP": "512",
                "WEFT_LOOM_SESSION": session.path,
                "WEFT_TEST_DEVICE": "loom",
                **{f"WEFT_LOOM_{name.upper()}": str(value) for name, value in settings.items()},
            }
            found = self.made[key] = LoomRanks(Pool(world, environment), session, mode)
            found.pool.run(load)
        found.mode = mode
        return found

    def close(self) -> None:
        for ranks in self.made.values():
            ranks.pool.close()
            ranks.session.close()
        self.made.clear()


def load() -> None:
    """Loads loom in a rank, as torchrun's environment would have it."""
    import torch
    import torch.distributed as dist

    import weft.loom

    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
    weft.loom.load()
    torch.zeros(1, device="loom")


def clear(mode: str, seed: int = 0) -> None:
    """Forgets what was logged, and sets the mode."""
    import gc

    import torch
    import torch.distributed as dist

    import weft.loom

    weft.loom.load(mode=mode, seed=seed)
    gc.collect()
    torch.accelerator.synchronize()
    dist.barrier()
    weft.loom.clear()
    dist.barrier()


def settle() -> None:
    """Waits until the device has done everything."""
    import torch
    import torch.distributed as dist

    torch.accelerator.synchronize()
    dist.barrier()
