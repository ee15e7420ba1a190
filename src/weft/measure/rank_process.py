"""The life of one rank that `rank_processes` started: it joins its group, runs the function it was
sent, and sends back the result or the error.

A rank never runs the script that started it again, so that script needs no guard around its main
part, and may as well be a notebook, `python -c` or standard input.
"""

from __future__ import annotations

import ctypes
import faulthandler
import io
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from weft.errors import Error, RankFailed, Unsupported
from weft.measure.hosts import STORE_PORT, Place

Report = Callable[[float, str], None]
"""A progress callback: the share that is done (0 to 1), and a text."""

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Start:
    """What a rank is told before it gets its function."""

    rank: int
    world: int
    port: int
    parent: int
    threads: int
    cores: list[int] | None
    place: Place | None
    backend: str
    device: str


def main(pipe: Connection) -> None:
    """Runs in a new process. `pipe` leads to the process that started it."""
    start: Start = pipe.recv()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != start.parent:
        os._exit(1)
    if start.cores is not None:
        os.sched_setaffinity(0, start.cores)
    torch.set_num_threads(start.threads)
    rank, world = str(start.rank), str(start.world)
    os.environ.update(RANK=rank, WORLD_SIZE=world, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=world)

    def report(share: float, text: str) -> None:
        if start.rank == 0:
            _send(pipe, "report", (share, text))

    try:
        function, arguments, options = pickle.loads(pipe.recv_bytes())
        store = join(start.place, start.rank, start.port)
        _prepare(start)
        dist.init_process_group(start.backend, store=store, rank=start.rank, world_size=start.world)
        dist.barrier()  # a rank that fails at once must not leave others while they connect
        faulthandler.unregister(signal.SIGUSR1)
        _send(pipe, "joined", None)
        result = function(report, *arguments, **options)
        dist.barrier()
        _flush()
        _send(pipe, "result", result)
    except Error as error:
        _flush()
        _send(pipe, "failed", error.with_traceback(None))
    except BaseException as error:
        _flush()
        said = f"{type(error).__name__}: {error}".removesuffix(": ")
        _send(pipe, "failed", RankFailed(said, start.rank, _trace(error)))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        pipe.close()


def join(place: Place | None, rank: int, port: int) -> TCPStore:
    """Moves this rank to its place, and returns the store of the new group.

    With emulated hosts, rank 0 runs the store, as with torchrun. Otherwise the process that started
    the ranks runs it.
    """
    if place is None:
        return TCPStore("127.0.0.1", port, None, False)
    place.enter()
    return TCPStore(place.store, STORE_PORT, None, rank == 0, wait_for_workers=False)


def _prepare(start: Start) -> None:
    if start.device == "loom":
        import weft.loom

        weft.loom.load()
    elif start.device == "cuda":
        torch.cuda.set_device(start.rank)


def _trace(error: BaseException) -> str:
    """The traceback without the frames of weft's launcher."""
    inner = error.__traceback__
    while inner is not None and "weft/measure/" in inner.tb_frame.f_code.co_filename:
        inner = inner.tb_next
    return "".join(traceback.format_exception(type(error), error, inner)).rstrip()


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Sends the elements of a tensor, not the storage around them, and from a device by way of
    this process: the one that receives them may not have that device."""

    def reducer_override(self, thing: Any) -> Any:
        if type(thing) is torch.Tensor:
            own = thing.detach().cpu()
            if own.untyped_storage().nbytes() > own.numel() * own.element_size():
                own = own.clone()
            return torch.Tensor.__reduce_ex__(own.requires_grad_(thing.requires_grad), 4)  # type: ignore[no-untyped-call]
        return super().reducer_override(thing)


def _send(pipe: Connection, kind: str, value: Any) -> None:
    """Sends a message with its time. One clock holds for all processes of a machine."""
    content = io.BytesIO()
    try:
        _Pickler(content).dump((kind, time.monotonic(), value))
    except Exception as failure:
        if kind == "failed":
            raise
        raise Unsupported(
            f"the result of the function cannot be sent back ({failure}); return numbers, tensors "
            "or other data that can be pickled"
        ) from None
    pipe.send_bytes(content.getvalue())
