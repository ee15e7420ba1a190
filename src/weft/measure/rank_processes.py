"""Starts ranks on this machine, sends each a function, and collects what they return.

Nothing is left behind: ranks end with the process that started them, and a rank that does not
end by itself is killed.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import IO, Any

import cloudpickle
from torch._C._distributed_c10d import TCPStore

from weft.errors import Error, RankFailed, Unsupported, signal_name
from weft.fabric.rendezvous import listed
from weft.measure.hosts import Hosts
from weft.measure.rank_process import Report, Start

_BOOT = """
import faulthandler, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started this rank is interrupted and ends it
faulthandler.register(signal.SIGUSR1)  # until it has joined its group: see `_not_joined`
from multiprocessing.connection import Connection
pipe = Connection(int(sys.argv[1]))
sys.path[:], sys.argv[:] = pipe.recv()
from weft.measure.rank_process import main
main(pipe)
"""

_JOIN = 300.0
"""Seconds in which all ranks must have joined their group: a few are enough, but a busy machine
may take long to start Python and torch."""
_OTHERS = 3.0
"""Seconds after a failure in which the other ranks may fail by themselves, and say why."""
_END = 5.0
"""Seconds in which a rank that has answered must end."""


@dataclass(frozen=True)
class Group:
    """What the ranks are. threads: compute threads per rank. pin: whether each is pinned to its
    share of the cores. labelled: whether what they print comes out here, line by line with the
    number of the rank, and errors begin with it; otherwise they have the output of this process."""

    world: int
    threads: int = 1
    pin: bool = True
    hosts: Hosts | None = None
    backend: str = "gloo"
    device: str = "cpu"
    labelled: bool = False


def run(
    group: Group,
    function: Callable[..., Any],
    arguments: Sequence[Any],
    options: Mapping[str, Any] | None = None,
    report: Report | None = None,
) -> list[Any]:
    """Runs `function(report, *arguments, **options)` on every rank. Returns the results."""
    try:
        content = cloudpickle.dumps((function, tuple(arguments), dict(options or {})))
    except Exception as failure:
        raise Unsupported(
            f"the function cannot be sent to the ranks with what it uses ({failure}); make such "
            "things inside the function, or pass data that can be pickled"
        ) from None
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    ranks: list[_Rank] = []
    answered = False
    try:
        ranks += (_start(group, rank) for rank in range(group.world))
        for rank in ranks:
            rank.tell(_start_of(group, rank.number, store.port), content)
        results = _collect(ranks, report, group.labelled)
        answered = True
        return results
    finally:
        _end(ranks, _END if answered else 0.0)


def cores_of(rank: int, world: int) -> list[int]:
    """The rank's share of the cores: its own cores if there are enough, else one core in turn."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < world:
        return [cores[rank % len(cores)]]
    return cores[rank * len(cores) // world : (rank + 1) * len(cores) // world]


class _Rank:
    """A rank seen from here: its process, the pipe to it, and what it prints."""

    def __init__(self, number: int, process: subprocess.Popen[bytes], pipe: Connection) -> None:
        self.number = number
        self.process = process
        self.pipe = pipe
        self.streams: dict[IO[bytes], _Lines] = {}
        for stream, name in ((process.stdout, "stdout"), (process.stderr, "stderr")):
            if stream is not None:
                self.streams[stream] = _Lines(f"[rank {number}] ", name)

    def tell(self, start: Start, content: bytes) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # `_collect` finds out
            self.pipe.send((list(sys.path), list(sys.argv)))
            self.pipe.send(start)
            self.pipe.send_bytes(content)

    def hear(self) -> tuple[str, float, Any]:
        try:
            content = self.pipe.recv_bytes()
        except (EOFError, OSError):
            return self.died()
        try:
            message: tuple[str, float, Any] = pickle.loads(content)
        except Exception as failure:
            said = f"what rank {self.number} returned or raised cannot be read here ({failure})"
            hint = "return numbers, tensors or other plain data"
            return "died", time.monotonic(), Unsupported(f"{said}; {hint}")
        return message

    def died(self) -> tuple[str, float, Any]:
        return "died", time.monotonic(), Error(self._death())

    def is_gone(self) -> bool:
        """Whether its process has ended and nothing that it sent is left. The pipe alone does not
        tell: a child that the rank forked has it, too."""
        return self.process.poll() is not None and not self.pipe.poll()

    def _death(self) -> str:
        try:
            code = self.process.wait(_END)
        except subprocess.TimeoutExpired:
            return f"rank {self.number} closed its connection without an error message"
        how = f"with code {code}" if code >= 0 else f"by signal {signal_name(-code)}"
        return f"rank {self.number} ended {how}, without an error message"

    def forward(self, stream: IO[bytes]) -> None:
        """Prints what a stream has; forgets the stream at its end."""
        text = os.read(stream.fileno(), 1 << 16)
        self.streams[stream].add(text)
        if not text:
            del self.streams[stream]
            stream.close()


class _Lines:
    """Prints whole lines with a label."""

    def __init__(self, label: str, name: str) -> None:
        self._label = label
        self._name = name
        self._rest = b""

    def add(self, text: bytes) -> None:
        """Takes the next part of the output; an empty one is its end."""
        *lines, self._rest = (self._rest + text).split(b"\n")
        if not text and self._rest:
            lines.append(self._rest)
        if lines:
            target = getattr(sys, self._name)  # looked up now: a notebook replaces it
            for line in lines:
                target.write(f"{self._label}{line.decode(errors='replace')}\n")
            target.flush()


def _start(group: Group, number: int) -> _Rank:
    ours, theirs = Pipe()
    output = subprocess.PIPE if group.labelled else None
    environment = os.environ | ({"PYTHONUNBUFFERED": "1"} if group.labelled else {})
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
        )
    return _Rank(number, process, ours)


def _start_of(group: Group, rank: int, port: int) -> Start:
    world, hosts = group.world, group.hosts
    return Start(
        rank=rank,
        world=world,
        port=port,
        parent=os.getpid(),
        threads=group.threads,
        cores=cores_of(rank, world) if group.pin else None,
        place=None if hosts is None else hosts.place(rank * hosts.count // world),
        backend=group.backend,
        device=group.device,
    )


def _collect(ranks: list[_Rank], report: Report | None, named: bool) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[_Failure] = []
    first: float | None = None
    joining, began = set(ranks), time.monotonic()
    pipes: dict[Any, _Rank] = {rank.pipe: rank for rank in ranks}
    while pipes:
        streams: dict[Any, _Rank] = {stream: rank for rank in ranks for stream in rank.streams}
        ready: set[Any] = {*wait([*pipes, *streams], timeout=1.0)}
        for stream in ready & streams.keys():
            streams[stream].forward(stream)
        gone = {pipe for pipe, rank in pipes.items() if pipe not in ready and rank.is_gone()}
        for pipe in (ready | gone) & pipes.keys():
            rank = pipes[pipe]
            kind, moment, value = rank.died() if pipe in gone else rank.hear()
            if kind == "report":
                if report is not None:
                    report(*value)
                continue
            joining.discard(rank)
            if kind == "joined":
                continue
            del pipes[pipe]
            if kind == "result":
                results[rank.number] = value
            else:
                failures.append(_Failure(kind == "died", moment, rank.number, value))
                first = first or time.monotonic()
        if first is not None and time.monotonic() - first > _OTHERS:
            break
        if joining and not failures and time.monotonic() - began > _JOIN:
            raise _not_joined(joining)
    if failures:
        raise _cause(failures, named)
    return [results[rank.number] for rank in ranks]


def _not_joined(ranks: set[_Rank]) -> Error:
    """The error for ranks that do not join their group. They print where they are."""
    for rank in ranks:
        rank.process.send_signal(signal.SIGUSR1)
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        if not _forward(list(ranks), 0.1):
            time.sleep(0.05)
    return Error(
        f"{listed(sorted(rank.number for rank in ranks))} did not join the group within {_JOIN:g} "
        "s; what they were doing is printed above"
    )


@dataclass(frozen=True)
class _Failure:
    """How a rank failed: died without an answer or raised an error, and when."""

    died: bool
    moment: float
    rank: int
    error: Exception


def _cause(failures: list[_Failure], named: bool) -> Exception:
    """The failure to raise: a death, else the first error that is not one of weft's, else the
    first. What other ranks raise is mostly that their peer is gone. named: whether errors of weft,
    which name a rank where one matters, are to begin with theirs."""
    cause = min(failures, key=lambda f: (not f.died, not isinstance(f.error, RankFailed), f.moment))
    if isinstance(cause.error, RankFailed) or cause.died or not cause.error.args:
        return cause.error
    said, *rest = cause.error.args
    cause.error.args = (f"rank {cause.rank}: {said}" if named else said, *rest)
    return cause.error


def _end(ranks: list[_Rank], seconds: float) -> None:
    """Prints what is still to be printed, and ends the ranks that do not end within some time."""
    until = time.monotonic() + seconds
    while any(rank.process.poll() is None for rank in ranks) and time.monotonic() < until:
        if not _forward(ranks, 0.02):
            time.sleep(0.005)
    for rank in ranks:
        rank.process.kill()
    for rank in ranks:
        rank.process.wait()
        rank.pipe.close()
    while _forward(ranks, 0.0):
        pass
    for rank in ranks:
        for stream in rank.streams:
            stream.close()


def _forward(ranks: list[_Rank], timeout: float) -> bool:
    """Prints what has come meanwhile. Returns whether there was anything."""
    streams: dict[Any, _Rank] = {stream: rank for rank in ranks for stream in rank.streams}
    ready: list[Any] = list(wait(list(streams), timeout=timeout)) if streams else []
    for stream in ready:
        streams[stream].forward(stream)
    return bool(ready)
