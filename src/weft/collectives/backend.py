"""weft as a backend of torch.distributed: `init_process_group("weft")` for ranks of one machine.

Registered by `import weft`. Everything that c10d offers on CPU goes through the group's channel, so
DDP, FSDP2, DTensor and anyone's code run on it unchanged; weft's operators work on such groups too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from weft import fabric as fabrics
from weft.collectives import channel as channels
from weft.collectives.channel import Channel, check_reduction
from weft.collectives.handle import Handle
from weft.collectives.kinds import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BARRIER,
    BROADCAST,
    GATHER,
    REDUCE,
    REDUCE_SCATTER,
    REDUCTIONS,
    SCATTER,
)
from weft.collectives.work import Finish, Pending, Receipt, Work
from weft.errors import Error, Unsupported

NAME = "weft"
Tensors = Sequence[torch.Tensor]
_REDUCTIONS = {
    getattr(dist.ReduceOp, name.upper()): number for number, name in enumerate(REDUCTIONS)
}


class Call:
    """One collective while its arguments are made ready: dense, contiguous, on the CPU."""

    def __init__(self, group: WeftGroup, name: str, opts: Any) -> None:
        self.channel: Channel = channels.of(group)
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
        """Where a result goes; one that is not contiguous gets it in the end."""
        tensor = _dense(tensor)
        if tensor.is_contiguous():
            return tensor
        into = tensor.contiguous()
        self.finish.append(lambda: _fill(tensor, into))
        return into

    def alike(
        self,
        kind: int,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        num_bytes: int,
        **options: Any,
    ) -> None:
        job = self.channel.alike(
            kind,
            source,
            target,
            num_bytes,
            background=self.background,
            patience=self.patience,
            **options,
        )
        if job is not None:
            self.pending.append(Handle(self.channel, job, None, self.name))

    def various(self, kind: int, sizes: Sequence[int], sources: Tensors, in_sizes: Sequence[int],
                targets: Tensors, out_sizes: Sequence[int], **options: Any) -> None:  # fmt: skip
        job = self.channel.various(
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
        if job is not None:
            self.pending.append(Handle(self.channel, job, None, self.name))

    def work(self, result: Any) -> Work:
        work = Work(self.pending, result, self.finish)
        if not self.background:
            work.wait()
        return work


def _refusing(method: Callable[..., Work]) -> Callable[..., Work]:
    """Bad arguments are heard on every rank."""

    def call(self: WeftGroup, *arguments: Any, **keywords: Any) -> Work:
        opts = keywords.get("opts", arguments[-1] if arguments else None)
        call = Call(self, method.__name__.strip("_"), opts)
        try:
            return method(self, call, *arguments, **keywords)
        except Unsupported as error:
            call.channel.refuse(error, background=call.background)
            raise

    call.__name__ = method.__name__
    return call


class WeftGroup(dist.ProcessGroup):
    """A torch.distributed group on shared memory."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.store = store
        self.deadline = timeout.total_seconds()
        self._name = ""
        self._description = ""
        self._coalesced: list[Pending] | None = None

    # -- what torch asks about a group -------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def name(self) -> str:
        return NAME

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    @property
    def group_desc(self) -> str:
        return self._description

    def _set_group_desc(self, text: str) -> None:
        self._description = text

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def setGroupDesc(self, text: str) -> None:  # noqa: N802
        self._description = text

    def set_timeout(self, timeout: timedelta) -> None:
        self.deadline = timeout.total_seconds()
        channels.of(self).fabric.deadline = self.deadline

    def _get_backend_name(self) -> str:
        return NAME

    def get_group_store(self) -> Store:
        return self.store

    def shutdown(self) -> None:
        """What torch.distributed calls when it destroys the group."""
        fabrics.close(self)

    def abort(self) -> None:
        channels.of(self).fabric.give_up(Error(f"rank {self.rank()} aborted the group"))

    # -- collectives -------------------------------------------------------------------------------

    @_refusing
    def allreduce(self, call: Call, tensors: Tensors, opts: Any = None) -> Work:
        number = _reduction(opts)
        for tensor in tensors:
            into = call.target(tensor)
            check_reduction(into.dtype, number)
            call.alike(ALL_REDUCE, into, into, into.nbytes, reduction=number)
        return call.work(list(tensors))

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        return self.allreduce(tensors, opts)

    @_refusing
    def broadcast(self, call: Call, tensors: Tensors, opts: Any = None) -> Work:
        for tensor in tensors:
            into = call.target(tensor)
            call.alike(BROADCAST, into, into, into.nbytes, root=int(opts.rootRank))
        return call.work(list(tensors))

    @_refusing
    def reduce(self, call: Call, tensors: Tensors, opts: Any = None) -> Work:
        number, root = _reduction(opts), int(opts.rootRank)
        for tensor in tensors:
            # Peers' terms are only read, so a tensor that is not the root's keeps its values.
            into = call.target(tensor) if self.rank() == root else call.source(tensor)
            check_reduction(into.dtype, number)
            call.alike(
                REDUCE,
                into,
                into if self.rank() == root else None,
                into.nbytes,
                reduction=number,
                root=root,
            )
        return call.work(list(tensors))

    @_refusing
    def allgather(
        self, call: Call, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None
    ) -> Work:
        for parts, tensor in zip(outputs, inputs, strict=True):
            _check_parts("output", parts, self.size())
            source, targets = call.source(tensor), [call.target(part) for part in parts]
            sizes = [target.nbytes for target in targets]
            _check_bytes(sizes[self.rank()], source.nbytes)
            call.various(ALL_GATHER, sizes, [source], [source.nbytes], targets, sizes)
        return call.work([list(parts) for parts in outputs])

    def allgather_coalesced(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None
    ) -> Work:
        # One list of outputs per rank, each with one tensor per input.
        by_input = [[parts[i] for parts in outputs] for i in range(len(inputs))]
        return self.allgather(by_input, inputs, opts)

    def all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> Work:
        return self.all_gather_single_coalesced([output], [tensor], opts)

    _allgather_base = all_gather_single  # type: ignore[assignment]

    @_refusing
    def all_gather_single_coalesced(
        self, call: Call, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            source, target = call.source(tensor), call.target(output)
            _check_bytes(target.nbytes, source.nbytes * self.size())
            call.alike(ALL_GATHER, source, target, source.nbytes)
        return call.work(list(outputs))

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @_refusing
    def reduce_scatter(
        self, call: Call, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None
    ) -> Work:
        number = _reduction(opts)
        for output, parts in zip(outputs, inputs, strict=True):
            _check_parts("input", parts, self.size())
            sources, target = [call.source(part) for part in parts], call.target(output)
            check_reduction(target.dtype, number)
            sizes = [source.nbytes for source in sources]
            _check_bytes(target.nbytes, sizes[self.rank()])
            call.various(
                REDUCE_SCATTER, sizes, sources, sizes, [target], [target.nbytes], reduction=number
            )
        return call.work(list(outputs))

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> Work:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    @_refusing
    def reduce_scatter_single_coalesced(
        self, call: Call, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        number = _reduction(opts)
        for output, tensor in zip(outputs, inputs, strict=True):
            source, target = call.source(tensor), call.target(output)
            check_reduction(target.dtype, number)
            _check_bytes(source.nbytes, target.nbytes * self.size())
            call.alike(REDUCE_SCATTER, source, target, target.nbytes, reduction=number)
        return call.work(list(outputs))

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    @_refusing
    def gather(
        self, call: Call, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None
    ) -> Work:
        source, root = call.source(inputs[0]), int(opts.rootRank)
        parts = outputs[0] if self.rank() == root else []
        if self.rank() == root:
            _check_parts("output", parts, self.size())
        targets = [call.target(part) for part in parts]
        for target in targets:
            _check_bytes(target.nbytes, source.nbytes)
        sizes = [source.nbytes] * self.size()
        call.various(
            GATHER, sizes, [source], [source.nbytes], targets, sizes if targets else [], root=root
        )
        return call.work([list(parts)])

    @_refusing
    def scatter(
        self, call: Call, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None
    ) -> Work:
        target, root = call.target(outputs[0]), int(opts.rootRank)
        parts = inputs[0] if self.rank() == root else []
        if self.rank() == root:
            _check_parts("input", parts, self.size())
        sources = [call.source(part) for part in parts]
        for source in sources:
            _check_bytes(source.nbytes, target.nbytes)
        sizes = [target.nbytes] * self.size()
        call.various(
            SCATTER, sizes, sources, sizes if sources else [], [target], [target.nbytes], root=root
        )
        return call.work(list(outputs))

    @_refusing
    def alltoall(self, call: Call, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        _check_parts("output", outputs, self.size())
        _check_parts("input", inputs, self.size())
        sources = [call.source(tensor) for tensor in inputs]
        targets = [call.target(tensor) for tensor in outputs]
        sent, got = [s.nbytes for s in sources], [t.nbytes for t in targets]
        call.various(ALL_TO_ALL, [], sources, sent, targets, got, uneven=True)
        return call.work(list(outputs))

    @_refusing
    def all_to_all_single(
        self,
        call: Call,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        opts: Any = None,
    ) -> Work:
        source, target = call.source(tensor), call.target(output)
        if output_splits or input_splits:
            sent = _split_bytes("input", source, input_splits, self.size())
            got = _split_bytes("output", target, output_splits, self.size())
            call.various(ALL_TO_ALL, [], [source], sent, [target], got, uneven=True)
        else:
            _check_bytes(target.nbytes, source.nbytes)
            _split_bytes("input", source, None, self.size())
            call.alike(ALL_TO_ALL, source, target, source.nbytes // self.size())
        return call.work(output)

    alltoall_base = all_to_all_single

    @_refusing
    def barrier(self, call: Call, opts: Any = None) -> Work:
        call.alike(BARRIER, None, None, 0)
        return call.work(None)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """A barrier that names the ranks which did not come. torch.distributed's function of this
        name takes gloo groups only: call the group's method."""
        channel = channels.of(self)
        channel.alike(BARRIER, None, None, 0, patience=timeout.total_seconds() if timeout else None)

    # -- messages ----------------------------------------------------------------------------------

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> Work:
        return self._message(True, tensors, dst, tag)

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> Work:
        return self._message(False, tensors, src, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        return self._message(False, tensors, -1, tag)

    def _message(self, sends: bool, tensors: Tensors, peer: int, tag: int) -> Work:
        call = Call(self, "send" if sends else "recv", None)
        channel, tensor = call.channel, tensors[0]
        if channel.fabric.broken is not None:
            raise channel.over()
        if not -1 <= peer < self.size() or (sends and peer < 0):
            raise Unsupported(f"there is no rank {peer} in a group of {self.size()}")
        moved = call.source(tensor) if sends else call.target(tensor)
        message = channel.message(sends, peer, tag, moved)
        whom = "any rank" if peer < 0 else f"rank {peer}"
        what = f"send to {whom}" if sends else f"receive from {whom}"
        call.pending.append(Receipt(channel, message, moved, what))
        return Work(call.pending, list(tensors), call.finish)


def _fill(tensor: torch.Tensor, values: torch.Tensor) -> None:
    tensor.copy_(values)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "cpu":
        raise Unsupported(f"a tensor is on {tensor.device}; the weft backend takes CPU tensors")
    if tensor.layout is not torch.strided:
        raise Unsupported(f"a tensor is {tensor.layout}; the weft backend takes dense tensors")
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _reduction(opts: Any) -> int:
    asked = dist.ReduceOp.SUM if opts is None else opts.reduceOp  # group.allreduce([tensor])
    for op, number in _REDUCTIONS.items():
        if asked == op:
            return number
    raise Unsupported(f"the weft backend has no reduction {asked}; it has {', '.join(REDUCTIONS)}")


def _check_parts(name: str, parts: Tensors, world: int) -> None:
    if len(parts) != world:
        raise Unsupported(f"there are {len(parts)} {name} tensors, but the group has {world} ranks")


def _check_bytes(given: int, needed: int) -> None:
    if given != needed:
        raise Unsupported(f"a tensor has {given} bytes where {needed} belong; check its shape")


def _split_bytes(
    name: str, tensor: torch.Tensor, splits: Sequence[int] | None, world: int
) -> list[int]:
    """The bytes for each rank, of rows that splits share out (none: evenly)."""
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


def _create(store: Store, rank: int, size: int, timeout: timedelta) -> WeftGroup:
    return WeftGroup(store, rank, size, timeout)


def register() -> None:
    """Makes the backend known to torch.distributed, once."""
    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, devices=["cpu"])
