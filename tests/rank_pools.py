"""Rank processes for tests: kept per world size and environment, used by many tests, replaced when
broken.

    pool = pools.get(3)                      # or pools.get(3, {"WEFT_FABRIC": "flat"})
    values = pool.run(function, 1, 2)     # function(1, 2) on every rank; raises what a rank raised
    job = pool.start(function)            # the same, without waiting; then
    outcomes = job.outcomes()               # one Outcome per rank: a value, an error, or a death
    job.hear("calling")                   # waits until every rank has called tell("calling")
    pool.renew()                          # the same processes in a new group

Functions are module-level and sent by reference. Every rank is in one gloo group and has one
compute thread. Ranks fork from a server that has torch imported, so a new pool is cheap; they die
with that server, and it dies with the tests, however those end. Tests whose ranks need more than
torch have a server of their own, which has imported that too. A rank that raises, dies or hangs
breaks its pool: the next test gets new processes.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

import ranks
from ranks import Told

DEADLINE = 60.0
"""The deadline of waits in ranks, in seconds: a hang becomes `weft.Timeout`, long before ours.
Tests of deadlines set their own; for all others it is long, because a busy machine may stand still
for half a minute."""

Environment = Mapping[str, "str | tuple[str, ...]"]
"""Variables of all ranks; where the value is a tuple, of each in turn."""

PATIENCE = float(os.environ.get("WEFT_TEST_PATIENCE", "1"))
"""How many times as long as they say tests wait for ranks, which a sanitizer makes slow."""

POOLS = int(os.environ.get("WEFT_TEST_POOLS", "8"))
"""How many pools wait for the next test at most. A rank that waits takes memory, and is not idle:
its thread of gloo looks around a hundred times a second."""

IMPORTED = ("torch", "torch.distributed", "weft", "weft.measure.rank_process")
"""What every server has imported."""

_PR_SET_PDEATHSIG = 1


@cache
def _server(more: tuple[str, ...]) -> forkserver.ForkServer:
    server = forkserver.ForkServer()
    server.set_forkserver_preload([*IMPORTED, *more])
    return server


@contextmanager
def _forking_from(more: tuple[str, ...]) -> Iterator[None]:
    """Processes started in the block fork from the server that has imported more."""
    usual = forkserver.connect_to_new_process
    forkserver.connect_to_new_process = _server(more).connect_to_new_process
    try:
        yield
    finally:
        forkserver.connect_to_new_process = usual


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
        self._members = members
        self._waiting = {pool.pipes[rank]: rank for rank in members}
        self._outcomes: dict[int, Outcome] = {}
        self._told: set[tuple[int, str]] = set()

    def outcomes(self, within: float = 240.0) -> list[Outcome]:
        """The outcome of every rank; a rank that takes too long breaks the pool and the test."""
        self._receive(lambda: not self._waiting, within)
        return [self._outcomes[rank] for rank in sorted(self._outcomes)]

    def hear(self, what: str, within: float = 240.0) -> None:
        """Waits until every rank has told this, or is through."""
        self._receive(
            lambda: all((r, what) in self._told or r in self._outcomes for r in self._members),
            within,
        )

    def _receive(self, enough: Callable[[], bool], within: float) -> None:
        until = time.monotonic() + within * PATIENCE
        while not enough():
            ready = wait(list(self._waiting), timeout=max(0.0, until - time.monotonic()))
            if not ready:
                late = sorted(self._waiting.values())
                self._pool.broken = True
                said = [f"\nrank {r}: {o.trace}" for r, o in self._outcomes.items() if o.trace]
                raise RankError(f"ranks {late} gave no answer within {within} s{''.join(said)}")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    came = pipe.recv()
                except (EOFError, ConnectionResetError):
                    self._pool.broken = True
                    came = Outcome(died=True, at=time.monotonic())
                if isinstance(came, Told):
                    self._told.add((self._waiting[pipe], came.what))
                else:
                    self._outcomes[self._waiting.pop(pipe)] = came

    def values(self, within: float = 240.0) -> list:
        """The value of every rank; raises if a rank raised or died."""
        outcomes = self.outcomes(within)
        if any(o.died or o.error is not None for o in outcomes):
            self._pool.broken = True  # other tests get ranks that have not seen this
        # All of them: what one rank says of its peers is rarely the reason.
        said = [
            f"rank {rank} died" if outcome.died else f"rank {rank}:\n{outcome.trace}"
            for rank, outcome in enumerate(outcomes)
            if outcome.died or outcome.error is not None
        ]
        if said:
            raise RankError("\n".join(said))
        return [outcome.value for outcome in outcomes]


class Pool:
    """The ranks of one world."""

    _imports: tuple[str, ...] = ()

    def __init__(
        self, world: int, environment: Environment | None = None, imports: Sequence[str] = ()
    ) -> None:
        import torch.distributed as dist

        self._imports = tuple(imports)
        self._store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        own = [_of_rank(environment or {}, rank) for rank in range(world)]
        self._begin(_join, [(rank, world, self._store.port, own[rank]) for rank in range(world)])

    def _begin(self, join: Callable[..., None], arguments: list[tuple]) -> None:
        """Starts a rank for each of the arguments, with which it joins the group. On a busy machine
        gloo may fail to connect; then the ranks start over, in a group of another name."""
        self.world, self.broken = len(arguments), False
        for name in ("first", "second", "third"):
            self.pipes: list[Connection] = []
            self.processes: list = []
            context = multiprocessing.get_context("forkserver")
            for own in arguments:
                ours, theirs = context.Pipe()
                call = (theirs, join, (name, *own))
                process = context.Process(target=_serve, args=call, daemon=True)
                with _forking_from(self._imports):
                    process.start()
                theirs.close()
                self.pipes.append(ours)
                self.processes.append(process)
            if self._joined():
                return
            self._end()
        raise RankError(f"{self.world} ranks could not form a group in three attempts")

    def _joined(self, within: float = 180.0) -> bool:
        """Waits until all ranks are in the group; False if one died on the way."""
        until, waiting = time.monotonic() + within, list(self.pipes)
        while waiting:
            ready = wait(waiting, timeout=max(0.0, until - time.monotonic()))
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    pipe.recv()
                except (EOFError, ConnectionResetError):
                    return False
                waiting.remove(pipe)
            if not ready:
                return False
        return True

    @property
    def usable(self) -> bool:
        return not self.broken and all(process.is_alive() for process in self.processes)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def start(self, function, *arguments, only: list[int] | None = None, **options) -> Job:
        members = list(range(self.world)) if only is None else only
        for rank in members:
            self.pipes[rank].send((function, arguments, options))
        return Job(self, members)

    def run(self, function, *arguments, within: float = 240.0, **options) -> list:
        return self.start(function, *arguments, **options).values(within)

    def outcomes(self, function, *arguments, within: float = 240.0) -> list[Outcome]:
        return self.start(function, *arguments).outcomes(within)

    def renew(self) -> Pool:
        """Puts the ranks into a new group, with nothing of the old one."""
        self.run(ranks.renew_group)
        return self

    def kill(self, rank: int) -> float:
        """Kills a rank and gives the moment."""
        self.broken = True
        moment = time.monotonic()
        os.kill(self.pids[rank], signal.SIGKILL)
        return moment

    def suspend(self, seconds: float, last: int) -> None:
        """Stops all ranks for some seconds, as Ctrl-Z does. last: the rank that is resumed when all
        others have been for a moment."""
        for pid in self.pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        for rank in sorted(range(self.world), key=lambda rank: rank == last):
            time.sleep(0.2)
            os.kill(self.pids[rank], signal.SIGCONT)

    def close(self) -> None:
        self._end()
        del self._store
        gc.collect()

    def _end(self) -> None:
        """Ends every rank. They have nothing to put away, whatever they were doing: so killing them
        is quicker than asking, and how scripts end in good order has a test of its own."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


class Pools:
    """One pool per world size and environment."""

    def __init__(self) -> None:
        self._pools: dict[tuple, Pool] = {}
        self._extra: list[Pool] = []
        self.others: dict[str, Any] = {}
        """Pools of other kinds, by name; closed with these."""

    def get(
        self, world: int, environment: Environment | None = None, imports: Sequence[str] = ()
    ) -> Pool:
        """The pool that all tests share; new processes if the last test broke it. imports: modules
        that its ranks are to have imported when they start."""
        key = (world, *imports, *sorted((environment or {}).items()))
        pool = self._pools.pop(key, None)
        if pool is not None and not pool.usable:
            pool.close()
            pool = None
        while len(self._pools) >= POOLS:  # the one that was not used for longest
            self._pools.pop(next(iter(self._pools))).close()
        self._pools[key] = pool or Pool(world, environment, imports)
        return self._pools[key]

    def fresh(self, world: int, environment: Environment | None = None) -> Pool:
        """A pool for one test alone: its ranks are closed by `close_fresh`."""
        self._extra.append(Pool(world, environment))
        return self._extra[-1]

    def close_fresh(self) -> None:
        while self._extra:
            self._extra.pop().close()

    def close(self) -> None:
        self.close_fresh()
        for other in self.others.values():
            other.close()
        self.others.clear()
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


def _of_rank(environment: Environment, rank: int) -> dict[str, str]:
    return {k: v if isinstance(v, str) else v[rank] for k, v in environment.items()}


def _serve(pipe: Connection, join: Callable[..., None], arguments: tuple) -> None:
    """The life of a rank: joins its group, and does what it is sent until nobody sends more."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    gc.freeze()  # what was imported before the fork is shared, and never garbage
    # Tests started in the background of a shell ignore interrupts, and their children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    join(*arguments)
    ranks.pipe = pipe
    ranks.tell("joined")
    while True:
        try:
            function, given, options = pipe.recv()
        except (EOFError, ConnectionResetError):
            break
        try:
            value = function(*given, **options)
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
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _join(name: str, rank: int, world: int, port: int, environment: dict[str, str]) -> None:
    os.environ["WEFT_DEADLINE"] = str(DEADLINE)
    os.environ.update(environment)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.PrefixStore(name, dist.TCPStore("127.0.0.1", port, None, False))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
