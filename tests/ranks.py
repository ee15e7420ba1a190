"""Rank processes for tests: started once per world size, used by many tests, replaced when broken.

    pool = pools.get(3)
    values = pool.run(function, 1, 2)     # function(1, 2) on every rank; raises what a rank raised
    job = pool.start(function)            # the same, without waiting; then
    outcomes = job.outcomes(within=30)       # one Outcome per rank: a value, an error, or a death

Functions are module-level and sent by reference. Every rank is in one gloo group and has one
compute thread. Ranks fork from a server that has torch imported, so a new pool is cheap; they die
with that server, and it dies with the tests, however those end.
"""

from __future__ import annotations

import ctypes
import gc
import io
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

DEADLINE = 20.0
"""The deadline of waits in ranks, in seconds: a hang becomes `weft.Timeout`, long before ours."""

_PR_SET_PDEATHSIG = 1


@dataclass
class Outcome:
    """What became of a function on one rank, and when: the moment at which the rank was through
    with it, or at which its death was seen here (time.monotonic, one clock for all processes)."""

    value: object = None
    error: BaseException | None = None
    trace: str = ""
    died: bool = False
    at: float = 0.0


class RankError(Exception):
    """A rank raised something that the test did not expect."""


class Job:
    """A function under way on the ranks of a pool."""

    def __init__(self, pool: Pool, members: list[int]) -> None:
        self._pool = pool
        self._waiting = {pool.pipes[rank]: rank for rank in members}
        self._outcomes: dict[int, Outcome] = {}

    def outcomes(self, within: float = 90.0) -> list[Outcome]:
        """The outcome of every rank; a rank that takes too long breaks the pool and the test."""
        until = time.monotonic() + within
        while self._waiting:
            ready = wait(list(self._waiting), timeout=max(0.0, until - time.monotonic()))
            if not ready:
                late = sorted(self._waiting.values())
                self._pool.broken = True
                said = [f"\nrank {r}: {o.trace}" for r, o in self._outcomes.items() if o.trace]
                raise RankError(f"ranks {late} gave no answer within {within} s{''.join(said)}")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = self._waiting.pop(pipe)
                try:
                    outcome = pipe.recv()
                except (EOFError, ConnectionResetError):
                    self._pool.broken = True
                    outcome = Outcome(died=True, at=time.monotonic())
                self._outcomes[rank] = outcome
        return [self._outcomes[rank] for rank in sorted(self._outcomes)]

    def values(self, within: float = 90.0) -> list:
        """The value of every rank; raises if a rank raised or died."""
        outcomes = self.outcomes(within)
        if any(o.died or o.error is not None for o in outcomes):
            self._pool.broken = True  # other tests get ranks that have not seen this
        for rank, outcome in enumerate(outcomes):
            if outcome.died:
                raise RankError(f"rank {rank} died")
            if outcome.error is not None:
                raise RankError(f"rank {rank}:\n{outcome.trace}")
        return [outcome.value for outcome in outcomes]


class Pool:
    """The ranks of one world."""

    def __init__(self, world: int, environment: dict[str, str] | None = None) -> None:
        import torch.distributed as dist

        self.world = world
        self.broken = False
        self.pipes: list[Connection] = []
        self.processes: list = []
        self._store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        context = multiprocessing.get_context("forkserver")
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank_main,
                args=(rank, world, self._store.port, theirs, environment or {}),
                daemon=True,
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def start(self, function, *arguments, only: list[int] | None = None) -> Job:
        members = list(range(self.world)) if only is None else only
        for rank in members:
            self.pipes[rank].send((function, arguments))
        return Job(self, members)

    def run(self, function, *arguments, within: float = 90.0) -> list:
        return self.start(function, *arguments).values(within)

    def outcomes(self, function, *arguments, within: float = 90.0) -> list[Outcome]:
        return self.start(function, *arguments).outcomes(within)

    def kill(self, rank: int) -> float:
        """Kills a rank and gives the moment."""
        self.broken = True
        moment = time.monotonic()
        os.kill(self.pids[rank], signal.SIGKILL)
        return moment

    def close(self) -> None:
        """Ends every rank. They have nothing to put away, whatever they were doing: so killing them
        is quicker than asking, and how scripts end in good order has a test of its own."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        del self._store
        gc.collect()


class Pools:
    """One pool per world size."""

    def __init__(self) -> None:
        multiprocessing.set_forkserver_preload(["torch", "torch.distributed", "weft"])
        self._pools: dict[int, Pool] = {}
        self._extra: list[Pool] = []

    def get(self, world: int) -> Pool:
        pool = self._pools.get(world)
        if pool is None or pool.broken or not all(p.is_alive() for p in pool.processes):
            if pool is not None:
                pool.close()
            pool = self._pools[world] = Pool(world)
        return pool

    def fresh(self, world: int, environment: dict[str, str] | None = None) -> Pool:
        """A pool for one test alone: its ranks are closed by `close_fresh`."""
        self._extra.append(Pool(world, environment))
        return self._extra[-1]

    def close_fresh(self) -> None:
        while self._extra:
            self._extra.pop().close()

    def close(self) -> None:
        self.close_fresh()
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


def _rank_main(
    rank: int, world: int, port: int, pipe: Connection, environment: dict[str, str]
) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Tests started in the background of a shell ignore interrupts, and their children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["WEFT_DEADLINE"] = str(DEADLINE)
    os.environ.update(environment)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, None, False)
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
            moment = time.monotonic()
            trace = traceback.format_exc()
            outcome = Outcome(error=error.with_traceback(None), trace=trace, at=moment)
        try:
            pipe.send(outcome)
        except BrokenPipeError:
            break
    if dist.is_initialized():
        dist.destroy_process_group()


# -- inside a rank ---------------------------------------------------------------------------------


def integers(shape, dtype, seed: int):
    """Small whole numbers, the same on every rank: their sums are exact in every dtype."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, tuple(shape), generator=generator).to(dtype)


def product(x, w):
    """x @ w, exactly."""
    return (x.double() @ w.double()).to(x.dtype)


def run_script(code: str, name: str, arguments: Sequence[str] = ()) -> str:
    """What a script prints on this rank, run as torchrun would start it: the group is made and
    destroyed by the script. name: of the script, another one each time on the same ranks."""
    import torch
    import torch.distributed as dist

    output = io.StringIO()
    start, argv, num_threads = dist.init_process_group, sys.argv, torch.get_num_threads()
    store = dist.distributed_c10d._get_default_store()
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()

    def begin(backend):
        start(backend, store=dist.PrefixStore(name, store), rank=rank, world_size=world)

    dist.init_process_group = begin
    sys.argv = [name, *arguments]
    try:
        with redirect_stdout(output):
            exec(compile(code, name, "exec"), {"__name__": "__main__"})
    finally:
        dist.init_process_group, sys.argv = start, argv
        torch.set_num_threads(num_threads)
        os.environ.pop("WEFT_SCHEDULE", None)
        if dist.is_initialized():
            dist.destroy_process_group()
        again = dist.PrefixStore(f"{name} again", store)
        start("gloo", store=again, rank=rank, world_size=world)
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
