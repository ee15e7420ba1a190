"""One call of the torch.distributed backend: its checked arguments, and the jobs it starts."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from weft.collectives import group_channel as channels
from weft.collectives.backend_work import Finish, Pending, WeftWork
from weft.collectives.group_channel import GroupChannel, Job
from weft.collectives.handle import Handle
from weft.collectives.kinds import REDUCTIONS
from weft.errors import Unsupported

if TYPE_CHECKING:
    from weft.collectives.backend import WeftGroup

Tensors = Sequence[torch.Tensor]
_REDUCTIONS = {
    getattr(dist.ReduceOp, name.upper()): number for number, name in enumerate(REDUCTIONS)
}


class BackendCall:
    """A call while its tensors are made dense, contiguous and on the CPU."""

    def __init__(self, group: WeftGroup, name: str, opts: Any) -> None:
        self.channel: GroupChannel = channels.of(group)
        self.name = name
        self.background = bool(getattr(opts, "asyncOp", True))
        timeout: timedelta | None = getattr(opts, "timeout", None)
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        self.patience = seconds if seconds > 0 else None
        self.finish: list[Finish] = []
        self.pending: list[Pending] = []

    def source(self, tensor: torch.Tensor) -> torch.Tensor:
        return _dense(tensor).contiguous()

    def target(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor for a result. One that is not contiguous is filled at the end."""
        tensor = _dense(tensor)
        if tensor.is_contiguous():
            return tensor
        into = tensor.contiguous()
        self.finish.append(lambda: _fill(tensor, into))
        return into

    def even(
        self,
        kind: int,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        num_bytes: int,
        **options: Any,
    ) -> None:
        """Starts a collective in which all ranks have the same sizes."""
        job = self.channel.run_even(
            kind,
            source,
            target,
            num_bytes,
            background=self.background,
            patience=self.patience,
            **options,
        )
        self._started(job)

    def uneven(
        self,
        kind: int,
        sizes: Sequence[int],
        sources: Tensors,
        in_sizes: Sequence[int],
        targets: Tensors,
        out_sizes: Sequence[int],
        **options: Any,
    ) -> None:
        """Starts a collective with sizes that differ by rank, or with lists of tensors."""
        job = self.channel.run_uneven(
            kind,
            sizes,
            sources,
            in_sizes,
            targets,
            out_sizes,
            background=self.background,
            patience=self.patience,
            **options,
        )
        self._started(job)

    def _started(self, job: Job | None) -> None:
        if job is not None:
            self.pending.append(Handle(self.channel, job, None, self.name))

    def work(self, result: Any) -> WeftWork:
        """What torch.distributed gets for the call."""
        work = WeftWork(self.pending, result, self.finish)
        if not self.background:
            work.wait()
        return work


def reduction_of(opts: Any) -> int:
    """The number of the reduction that torch.distributed asks for."""
    asked = dist.ReduceOp.SUM if opts is None else opts.reduceOp  # group.allreduce([tensor])
    for op, number in _REDUCTIONS.items():
        if asked == op:
            return number
    raise Unsupported(f"the weft backend has no reduction {asked}; it has {', '.join(REDUCTIONS)}")


def check_parts(name: str, parts: Tensors, world: int) -> None:
    """Raises unless there is one tensor per rank."""
    if len(parts) != world:
        raise Unsupported(f"there are {len(parts)} {name} tensors, but the group has {world} ranks")


def check_bytes(given: int, needed: int) -> None:
    """Raises unless a tensor has the bytes that it needs."""
    if given != needed:
        raise Unsupported(f"a tensor has {given} bytes where {needed} belong; check its shape")


def split_bytes(
    name: str, tensor: torch.Tensor, splits: Sequence[int] | None, world: int
) -> list[int]:
    """The bytes of a tensor's rows for each rank, by its splits (None: evenly)."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if not splits:
        if rows % world:
            raise Unsupported(f"{rows} {name} rows cannot be shared out among {world} ranks")
        return [tensor.nbytes // world] * world
    if len(splits) != world or sum(splits) != rows or min(splits) < 0:
        raise Unsupported(
            f"the {name} splits {list(splits)} do not share out {rows} rows among {world} ranks"
        )
    row = tensor.nbytes // rows if rows else 0
    return [size * row for size in splits]


def _fill(tensor: torch.Tensor, values: torch.Tensor) -> None:
    # The thread that completes a future is in no mode; tensors made in inference_mode ask for it.
    with torch.inference_mode(tensor.is_inference()):
        tensor.copy_(values)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "cpu":
        raise Unsupported(f"a tensor is on {tensor.device}; the weft backend takes CPU tensors")
    if tensor.layout is not torch.strided:
        raise Unsupported(f"a tensor is {tensor.layout}; the weft backend takes dense tensors")
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
