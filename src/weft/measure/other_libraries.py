"""Times the collectives of other libraries: MPICH's, and the all-reduce over shared memory that
DeepSpeed has for inference. They run in processes of their own, on the cores of weft's ranks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from weft.measure.launch import cores_of

SECONDS = 60.0
"""How long one run may take."""
BUILD_SECONDS = 600.0
"""How long DeepSpeed may take to compile its all-reduce, which it does once."""

Sizes = Sequence[tuple[int, int, int]]
"""(KiB of each rank's input, calls per sample, samples)."""
Times = dict[tuple[str, int], list[float]]
"""Seconds per call of each sample, by collective and KiB."""


@dataclass(frozen=True)
class OtherLibrary:
    """A library that was found. `measure(world, sizes)` is one run of it, empty if that fails.

    spins: whether its ranks never give way while they wait, so that each needs a core of its own.
    """

    name: str
    spins: bool
    measure: Callable[[int, Sizes], Times]


_LOOP = """
import json, os, sys, time
sizes, cores = json.loads(sys.argv[1]), json.loads(sys.argv[2])
def measure(rank, prepare, meet):
    out = {}
    for kib, calls, repeat in sizes:
        arms = prepare(kib * 256)
        for call in arms.values():
            call()
        for _ in range(repeat):
            for kind, call in arms.items():
                meet()
                start = time.perf_counter()
                for _ in range(calls):
                    call()
                taken = (time.perf_counter() - start) / calls
                out.setdefault(kind + "," + str(kib), []).append(taken)
    if rank == 0:
        print(json.dumps(out))
"""
"""Makes the same calls in the same order as the ranks of weft, so that each finds the caches in the
same state. What a library does not have is a copy of as many bytes."""

_MPICH = (
    _LOOP
    + """
import mmap
import numpy as np
from mpi4py import MPI
comm = MPI.COMM_WORLD
os.sched_setaffinity(0, cores[comm.rank])
def ones(count):
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    made = np.frombuffer(mmap.mmap(-1, count * 4, flags=private), np.float32)
    made[:] = 1
    return made
def prepare(count):
    x, y, z, both = (ones(n) for n in (count, count * comm.size, count, count))
    whole = ones(count * comm.size)
    return {
        "all_gather": lambda: comm.Allgather(x, y),
        "all_reduce": lambda: comm.Allreduce(x, z),
        "all_reduce in place": lambda: comm.Allreduce(MPI.IN_PLACE, both),
        "all_to_all": lambda: comm.Alltoall(x, z),
        "memcpy to y": lambda: np.copyto(y, whole),
        "memcpy to z": lambda: np.copyto(z, x),
    }
measure(comm.rank, prepare, comm.Barrier)
"""
)
"""Its memory is like that of torch's tensors. numpy would ask the kernel for huge pages, from which
MPICH's copies are up to twice as fast."""

_BUILD = """
from deepspeed.accelerator import get_accelerator
builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
module = builder.load()
"""

_DEEPSPEED = (
    _LOOP
    + """
rank, world, folder = int(sys.argv[3]), len(cores), sys.argv[4]
os.sched_setaffinity(0, cores[rank])
import torch
torch.set_num_threads(1)
"""
    + _BUILD
    + """
module.initialize(world, rank)
store = torch.distributed.FileStore(os.path.join(folder, "store"), world)
store.add("mapped", 1)
while store.add("mapped", 0) < world:  # a segment can be used once every rank has made its own
    time.sleep(0.01)
add = torch.ops.deepspeed.inference_all_reduce_
one = torch.zeros(1)
def prepare(count):
    x, y, z = (torch.ones(n) for n in (count, count * world, count))
    whole, both = torch.ones(count * world), torch.zeros(count)
    return {
        "copy of all_gather": lambda: y.copy_(whole),
        "copy of all_reduce": lambda: z.copy_(x),
        "all_reduce in place": lambda: add(both),
        "copy of all_to_all": lambda: z.copy_(x),
        "memcpy to y": lambda: y.copy_(whole),
        "memcpy to z": lambda: z.copy_(x),
    }
measure(rank, prepare, lambda: add(one))
"""
)


def find_mpich() -> OtherLibrary | str:
    """MPICH next to this Python or to that of WEFT_MPI_PYTHON, or why it cannot be measured."""
    python = os.environ.get("WEFT_MPI_PYTHON", sys.executable)
    beside = Path(python).parent / "mpiexec"
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    if mpiexec is None or not _works([python, "-c", "import mpi4py, numpy"], SECONDS):
        return "MPICH not found: set WEFT_MPI_PYTHON"

    def measure(world: int, sizes: Sizes) -> Times:
        command = [mpiexec, "-n", str(world), python, "-c", _MPICH]
        return _read([[*command, json.dumps(sizes), _cores(world)]])

    return OtherLibrary("MPICH", False, measure)


def find_deepspeed() -> OtherLibrary | str:
    """DeepSpeed of this Python or of WEFT_DEEPSPEED_PYTHON, compiled, or why it cannot be
    measured."""
    python = os.environ.get("WEFT_DEEPSPEED_PYTHON", sys.executable)
    found = "import sys, importlib.util; sys.exit(not importlib.util.find_spec('deepspeed'))"
    if not _works([python, "-c", found], SECONDS):
        return "DeepSpeed not found: set WEFT_DEEPSPEED_PYTHON"
    if not _works([python, "-c", _BUILD], BUILD_SECONDS, _environment(python)):
        return "DeepSpeed cannot compile its all-reduce here"

    def measure(world: int, sizes: Sizes) -> Times:
        with tempfile.TemporaryDirectory() as folder:
            # The names of its shared memory have these in them, and it leaves that memory behind.
            mark = Path(folder).name
            environment = _environment(python) | {
                "LOCAL_SIZE": str(world),
                "MASTER_ADDR": mark,
                "MASTER_PORT": "0",
                "OMP_NUM_THREADS": "1",
            }
            arguments = [json.dumps(sizes), _cores(world)]
            command = [python, "-c", _DEEPSPEED, *arguments]
            try:
                return _read([[*command, str(r), folder] for r in range(world)], environment)
            finally:
                for left in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{mark}_*"):
                    left.unlink(missing_ok=True)

    return OtherLibrary("DeepSpeed", True, measure)


def _environment(python: str) -> dict[str, str]:
    """With the tools beside a Python: DeepSpeed looks for ninja on the path."""
    path = os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", "")])
    return {**os.environ, "PATH": path}


def _works(
    command: Sequence[str], seconds: float, environment: dict[str, str] | None = None
) -> bool:
    try:
        asked = subprocess.run(command, capture_output=True, timeout=seconds, env=environment)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return asked.returncode == 0


def _cores(world: int) -> str:
    return json.dumps([cores_of(rank, world) for rank in range(world)])


def _read(commands: Sequence[Sequence[str]], environment: dict[str, str] | None = None) -> Times:
    """Starts all commands, and reads what the first one prints."""
    started = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        )
        for command in commands
    ]
    printed = ""
    try:
        with suppress(subprocess.TimeoutExpired):
            printed = started[0].communicate(timeout=SECONDS)[0].strip()
    finally:
        for process in started:
            process.kill()
            process.communicate()
    if started[0].returncode != 0 or not printed:
        return {}
    results: dict[str, list[float]] = json.loads(printed.splitlines()[-1])
    return {(kind, int(kib)): v for key, v in results.items() for kind, kib in [key.split(",")]}
