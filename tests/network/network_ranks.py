"""A pool of ranks (see ranks.py) whose processes are on hosts of their own."""

from __future__ import annotations

import os

from rank_pools import DEADLINE, Pool


class HostPool(Pool):
    """Ranks in even parts over hosts; rank 0 has the store, as with torchrun."""

    def __init__(self, hosts, world, environment):
        self._store = None
        places = [hosts.place(rank * hosts.count // world) for rank in range(world)]
        self._begin(_join, [(rank, world, places[rank], environment) for rank in range(world)])


def _join(_, rank, world, place, environment):
    os.environ["WEFT_DEADLINE"] = str(DEADLINE)
    os.environ.update(environment)
    import torch
    import torch.distributed as dist

    from weft.measure.launch import join

    torch.set_num_threads(1)
    store = join(place, rank, 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
