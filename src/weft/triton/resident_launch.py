"""Launches a kernel so that its grid is resident, and turns its status words into errors.

On the host a kernel is interpreted: its programs run one after another, in the order of their
numbers. On a GPU the grid is never larger than what fits at once, and is launched cooperatively, so
that the driver refuses a grid that would not be resident.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.dtype import in_triton
from weft.errors import Error, Unsupported
from weft.fabric.proposal import Items, Proposal
from weft.triton import interpreting
from weft.triton.jit import JitKernel
from weft.triton.residency import Resources, programs_per_unit, unit_of
from weft.triton.space import Space, SymmetricRegion, Visit

DTYPES = tuple(in_triton())
"""The dtypes of kernels. All of them sum in float32 and round once."""

BAD_INDEX = 2  # weft.triton.language.BAD_INDEX
STATUS_WORDS = 8
FOREVER = 2**31 - 1
SECONDS_PER_SPIN = 5e-7
"""The least time of one poll of a counter on a GPU (a pause of 128 ns, then a read that bypasses
all caches). So a wait lasts at least its deadline."""
HOST_PROGRAMS = 4
"""The interpreted grid. Its programs run one after another, so more would gain nothing."""
SPARE_UNITS = 1
"""Compute units that a grid leaves free, for copies that a driver makes with a kernel."""


@dataclass(frozen=True)
class Tiles:
    """Block sizes of a kernel, which are powers of two from 16 on, and its compiler options."""

    m: int = 128
    n: int = 128
    k: int = 64
    warps: int = 8
    stages: int = 2

    def __post_init__(self) -> None:
        for name, size in (("m", self.m), ("n", self.n), ("k", self.k)):
            if size < 16 or size & (size - 1):
                raise Unsupported(f"tile {name} must be a power of two from 16 on, not {size}")

    @property
    def options(self) -> dict[str, int]:
        """The options for Triton's compiler."""
        return {"num_warps": self.warps, "num_stages": self.stages}

    @classmethod
    def of(cls, space: Space, dtype: torch.dtype) -> Tiles:
        """The default tiles of a space. Interpreted tiles are small."""
        if space.device.type == "cpu":
            return cls(32, 32, 32)
        return cls(k=64 if dtype.itemsize == 2 else 32)


Beside = Callable[[Any], tuple[dict[str, Any], Callable[[bool], None]]]


class KernelCalls:
    """The calls of one operation on one space, numbered from 1."""

    def __init__(
        self,
        kernel: JitKernel,
        phases: Sequence[str],
        space: Space,
        same: Items,
        *,
        size: int,
        own: Items = (),
        grid: int | None = None,
    ) -> None:
        """phases: the names of what the kernel waits for. same: items that must be equal on all
        ranks. size: bytes of symmetric memory. own: items that may differ (see `proposals`). grid:
        the number of programs; by default as many as fit."""
        if grid is not None and grid < 1:
            raise Unsupported(f"a grid needs at least one program, not {grid}")
        self.kernel, self.space, self.phases = kernel, space, tuple(phases)
        self.operation = f"triton.{kernel.fn.__name__}"
        self.done = 0
        self.region: SymmetricRegion
        self.proposals: list[Proposal]
        self.region, self.proposals = space.allocate(
            self.operation, size, (*same, ("grid", grid or 0)), own
        )
        self._status = torch.zeros(STATUS_WORDS, dtype=torch.int64, device=space.device)
        self._grid = grid
        self._over: Error | None = None

    @property
    def turn(self) -> int:
        """Which of two results the next call fills."""
        return (self.done + 1) % 2

    def run(
        self,
        prepare: Callable[[], dict[str, Any]],
        same: Items = (),
        beside: Beside | None = None,
        share: torch.Tensor | None = None,
        options: Mapping[str, int] | None = None,
    ) -> None:
        """One call. `prepare` returns the kernel's arguments or raises; if the space can inform
        other ranks, they raise too. `beside` starts work beside the kernel, and returns further
        arguments and a function that ends it. share: memory that peers may read meanwhile. options:
        those of the compiler."""
        if self._over is not None:
            raise type(self._over)(
                f"{self.operation} is over since call {self.done + 1} ({self._over}); "
                "make it anew, on a new group"
            )
        error: Error | None = None
        arguments: dict[str, Any] = {}
        try:
            _refuse_capture(self.space.device)
            arguments = prepare()
        except Error as refusal:
            error = refusal
        with self.space.visit(self.operation, same, error, share) as visit:
            more, end = beside(visit) if beside is not None else ({}, None)
            arguments = {**arguments, **more}
            try:
                self._launch(visit, arguments, dict(options or {}))
            except BaseException as failure:
                if isinstance(failure, Error):
                    self._over = failure
                if end is not None:
                    end(False)
                raise
            if end is not None:
                end(True)
        self.done += 1

    def check(self) -> None:
        """Raises the error of the calls so far, if there is one. On a GPU this waits for them."""
        with self.space.look(self.operation) as visit:
            self._check(visit)

    def _launch(self, visit: Visit, arguments: dict[str, Any], options: dict[str, Any]) -> None:
        arguments = {**arguments, "status": self._status}
        if self.space.device.type == "cpu":
            with interpreting.watched(visit.go_on):
                grid = self._grid or HOST_PROGRAMS
                self.kernel.interpreted[(grid,)](**arguments, spins=FOREVER)
            self._check(visit)
            return
        spins = int(min(self.space.deadline / SECONDS_PER_SPIN, FOREVER))
        bound = {**arguments, "spins": spins}
        if self._grid is None:
            fits = resident(self.kernel, self.space.device, bound, options)
            self._grid = self.space.least(fits)
        self.kernel[(self._grid,)](**bound, launch_cooperative_grid=True, **options)

    def _check(self, visit: Visit) -> None:
        code, rank, phase, target, seen, *_ = self._status.tolist()
        if code == 0:
            return
        self._status.zero_()
        if code == BAD_INDEX:
            raise Unsupported(
                f"index {seen} of table {phase} of rank {rank} is not below its {target} rows; "
                "nothing was read for it"
            )
        raise visit.failure(
            self.operation, f"rank {rank} to send {self.phases[phase]} ({seen} of {target} there)"
        )


def resident(
    kernel: JitKernel, device: torch.device, arguments: dict[str, Any], options: dict[str, Any]
) -> int:
    """The number of programs of a kernel that fit on a GPU at once."""
    compiled = kernel.warmup(**arguments, grid=(1,), launch_cooperative_grid=True, **options)
    compiled._init_handles()
    properties = torch.cuda.get_device_properties(device)
    name = f"sm_{properties.major}{properties.minor}"
    if torch.version.hip:
        name = properties.gcnArchName
    built = compiled.metadata
    taken = Resources(compiled.n_regs, compiled.n_spills, built.shared, built.num_warps)
    each = programs_per_unit(taken, unit_of(name))
    if each == 0:
        what = kernel.fn.__name__
        raise Unsupported(f"one program of triton.{what} does not fit on {name}: {taken}")
    return max(properties.multi_processor_count - SPARE_UNITS, 1) * each


def _refuse_capture(device: torch.device) -> None:
    """A kernel waits for counters to reach the number of its call. A graph would keep that number,
    and its replays would not wait at all."""
    if device.type == "cpu":
        return
    if torch.get_device_module(device).is_current_stream_capturing():
        raise Unsupported(
            "weft's Triton kernels cannot be captured into a graph, because they wait for the "
            "number of a call; call them outside of the capture"
        )


def check_input(
    space: Space, name: str, tensor: object, dtype: torch.dtype, shape: Sequence[int | None]
) -> torch.Tensor:
    """Raises unless a tensor has this dtype and shape (None: any size); returns the tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise Unsupported(f"{name} must be a tensor, not {type(tensor).__name__}")
    if tensor.device != space.device:
        raise Unsupported(f"{name} is on {tensor.device}, but the memory on {space.device}")
    if tensor.dtype != dtype:
        raise Unsupported(f"{name} is {tensor.dtype}, but was said to be {dtype}")
    fits = len(shape) == tensor.dim() and all(
        want is None or have == want for have, want in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise Unsupported(f"{name} must have the shape [{wanted}], not {list(tensor.shape)}")
    return tensor


def check_sizes(dtype: torch.dtype, **sizes: int) -> None:
    """Raises unless kernels take the dtype and the sizes."""
    if dtype not in DTYPES:
        raise Unsupported(f"kernels take {', '.join(map(str, DTYPES))}, not {dtype}")
    for name, size in sizes.items():
        if not 0 <= size < 2**31:
            raise Unsupported(f"{name} must be from 0 to 2**31 - 1, not {size}")


def rows_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """A matrix with contiguous rows."""
    return tensor if tensor.dim() != 2 or tensor.stride(1) == 1 else tensor.contiguous()
