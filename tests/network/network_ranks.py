"""A pool of ranks (see ranks.py) whose processes are on hosts of their own."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
import traceback

from ranks import Outcome, Pool

DEADLINE = 6.0


class HostPool(Pool):
    """Ranks in even parts over hosts; rank 0 has the store, as with torchrun."""

    def __init__(self, hosts, world, environment):
        self.world, self.broken = world, False
        self.pipes, self.processes = [], []
        self._store = None
        context = multiprocessing.get_context("forkserver")
        for rank in range(world):
            ours, theirs = context.Pipe()
            place = hosts.place(rank * hosts.count // world)
            process = context.Process(
                target=_rank_main, args=(rank, world, place, theirs, environment), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)


def _rank_main(rank, world, place, pipe, environment):
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    os.environ["WEFT_DEADLINE"] = str(DEADLINE)
    os.environ.update(environment)
    import torch
    import torch.distributed as dist

    from weft.measure.launch import join

    torch.set_num_threads(1)
    store = join(place, rank, 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    while True:
        try:
            function, arguments = pipe.recv()
        except (EOFError, ConnectionResetError):
            break
        try:
            value = function(*arguments)
            outcome = Outcome(value=value, at=time.monotonic())
        except SystemExit:
            break
        except BaseException as error:
            moment, trace = time.monotonic(), traceback.format_exc()
            outcome = Outcome(error=error.with_traceback(None), trace=trace, at=moment)
        try:
            pipe.send(outcome)
        except BrokenPipeError:
            break
    os._exit(0)
