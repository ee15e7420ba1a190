"""weft as a backend of torch.distributed: `init_process_group("weft")` for ranks of one machine.

`import weft` registers it. All of c10d on CPU goes through the channel of the group, so DDP, FSDP2,
DTensor and other code run on it unchanged, and weft's operators work on such groups too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from weft import fabric as fabrics
from weft.collectives import group_channel as channels
from weft.collectives.backend_call import (
    BackendCall,
    Tensors,
    check_bytes,
    check_parts,
    reduction_of,
    split_bytes,
)
from weft.collectives.backend_work import PendingMessage, WeftWork
from weft.collectives.group_channel import check_reduction
from weft.collectives.kinds import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BARRIER,
    BROADCAST,
    GATHER,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
)
from weft.errors import Error, Unsupported
from weft.fabric.presence import present
from weft.fabric.rendezvous import machine

NAME = "weft"


def _refusing(method: Callable[..., WeftWork]) -> Callable[..., WeftWork]:
    """If the arguments are bad, the reason goes to every rank."""

    def call(self: WeftGroup, *arguments: Any, **keywords: Any) -> WeftWork:
        opts = keywords.get("opts", arguments[-1] if arguments else None)
        call = BackendCall(self, method.__name__.strip("_"), opts)
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
        present(store, rank, machine())

    # -- what torch reads of a group ---------------------------------------------------------------

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

    @property
    def _device_types(self) -> list[torch.device]:
        """Checkpoints ask whether the group takes CPU tensors."""
        return [torch.device("cpu")]

    def get_group_store(self) -> Store:
        return self.store

    def shutdown(self) -> None:
        """torch.distributed calls this when it destroys the group."""
        fabrics.leave(self)

    def abort(self) -> None:
        channels.of(self).fabric.give_up(Error(f"rank {self.rank()} aborted the group"))

    # -- collectives -------------------------------------------------------------------------------

    @_refusing
    def allreduce(self, call: BackendCall, tensors: Tensors, opts: Any = None) -> WeftWork:
        number = reduction_of(opts)
        for tensor in tensors:
            into = call.target(tensor)
            check_reduction(into.dtype, number)
            call.even(ALL_REDUCE, into, into, into.nbytes, reduction=number)
        return call.work(list(tensors))

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> WeftWork:
        return self.allreduce(tensors, opts)

    @_refusing
    def broadcast(self, call: BackendCall, tensors: Tensors, opts: Any = None) -> WeftWork:
        for tensor in tensors:
            into = call.target(tensor)
            call.even(BROADCAST, into, into, into.nbytes, root=int(opts.rootRank))
        return call.work(list(tensors))

    @_refusing
    def reduce(self, call: BackendCall, tensors: Tensors, opts: Any = None) -> WeftWork:
        number, root = reduction_of(opts), int(opts.rootRank)
        for tensor in tensors:
            # Only the root's tensor is written; the others keep their values.
            into = call.target(tensor) if self.rank() == root else call.source(tensor)
            check_reduction(into.dtype, number)
            call.even(
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
        self, call: BackendCall, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None
    ) -> WeftWork:
        for parts, tensor in zip(outputs, inputs, strict=True):
            check_parts("output", parts, self.size())
            source, targets = call.source(tensor), [call.target(part) for part in parts]
            sizes = [target.nbytes for target in targets]
            check_bytes(sizes[self.rank()], source.nbytes)
            call.uneven(ALL_GATHER, sizes, [source], [source.nbytes], targets, sizes)
        return call.work([list(parts) for parts in outputs])

    def allgather_coalesced(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None
    ) -> WeftWork:
        # One list of outputs per rank, each with one tensor per input.
        by_input = [[parts[i] for parts in outputs] for i in range(len(inputs))]
        return self.allgather(by_input, inputs, opts)

    def all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> WeftWork:
        return self.all_gather_single_coalesced([output], [tensor], opts)

    _allgather_base = all_gather_single  # type: ignore[assignment]

    @_refusing
    def all_gather_single_coalesced(
        self, call: BackendCall, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> WeftWork:
        for output, tensor in zip(outputs, inputs, strict=True):
            source, target = call.source(tensor), call.target(output)
            check_bytes(target.nbytes, source.nbytes * self.size())
            call.even(ALL_GATHER, source, target, source.nbytes)
        return call.work(list(outputs))

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @_refusing
    def reduce_scatter(
        self, call: BackendCall, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None
    ) -> WeftWork:
        number = reduction_of(opts)
        for output, parts in zip(outputs, inputs, strict=True):
            check_parts("input", parts, self.size())
            sources, target = [call.source(part) for part in parts], call.target(output)
            check_reduction(target.dtype, number)
            sizes = [source.nbytes for source in sources]
            check_bytes(target.nbytes, sizes[self.rank()])
            call.uneven(
                REDUCE_SCATTER, sizes, sources, sizes, [target], [target.nbytes], reduction=number
            )
        return call.work(list(outputs))

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> WeftWork:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    @_refusing
    def reduce_scatter_single_coalesced(
        self, call: BackendCall, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> WeftWork:
        number = reduction_of(opts)
        for output, tensor in zip(outputs, inputs, strict=True):
            source, target = call.source(tensor), call.target(output)
            check_reduction(target.dtype, number)
            check_bytes(source.nbytes, target.nbytes * self.size())
            call.even(REDUCE_SCATTER, source, target, target.nbytes, reduction=number)
        return call.work(list(outputs))

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    @_refusing
    def gather(
        self, call: BackendCall, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None
    ) -> WeftWork:
        source, root = call.source(inputs[0]), int(opts.rootRank)
        parts = outputs[0] if self.rank() == root else []
        if self.rank() == root:
            check_parts("output", parts, self.size())
        targets = [call.target(part) for part in parts]
        for target in targets:
            check_bytes(target.nbytes, source.nbytes)
        sizes = [source.nbytes] * self.size()
        call.uneven(
            GATHER, sizes, [source], [source.nbytes], targets, sizes if targets else [], root=root
        )
        return call.work([list(parts)])

    @_refusing
    def scatter(
        self, call: BackendCall, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None
    ) -> WeftWork:
        target, root = call.target(outputs[0]), int(opts.rootRank)
        parts = inputs[0] if self.rank() == root else []
        if self.rank() == root:
            check_parts("input", parts, self.size())
        sources = [call.source(part) for part in parts]
        for source in sources:
            check_bytes(source.nbytes, target.nbytes)
        sizes = [target.nbytes] * self.size()
        call.uneven(
            SCATTER, sizes, sources, sizes if sources else [], [target], [target.nbytes], root=root
        )
        return call.work(list(outputs))

    @_refusing
    def alltoall(
        self, call: BackendCall, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> WeftWork:
        check_parts("output", outputs, self.size())
        check_parts("input", inputs, self.size())
        sources = [call.source(tensor) for tensor in inputs]
        targets = [call.target(tensor) for tensor in outputs]
        sent, got = [s.nbytes for s in sources], [t.nbytes for t in targets]
        call.uneven(ALL_TO_ALL, [], sources, sent, targets, got, by_pair=True)
        return call.work(list(outputs))

    @_refusing
    def all_to_all_single(
        self,
        call: BackendCall,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        opts: Any = None,
    ) -> WeftWork:
        source, target = call.source(tensor), call.target(output)
        if output_splits or input_splits:
            sent = split_bytes("input", source, input_splits, self.size())
            got = split_bytes("output", target, output_splits, self.size())
            call.uneven(ALL_TO_ALL, [], [source], sent, [target], got, by_pair=True)
        else:
            check_bytes(target.nbytes, source.nbytes)
            split_bytes("input", source, None, self.size())
            call.even(ALL_TO_ALL, source, target, source.nbytes // self.size())
        return call.work(output)

    alltoall_base = all_to_all_single

    @_refusing
    def barrier(self, call: BackendCall, opts: Any = None) -> WeftWork:
        call.even(BARRIER, None, None, 0)
        return call.work(None)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """A barrier whose error names the ranks that did not come. torch.distributed's function of
        this name takes gloo groups only, so call this method of the group."""
        channel = channels.of(self)
        channel.run_even(
            BARRIER, None, None, 0, patience=timeout.total_seconds() if timeout else None
        )

    # -- messages ----------------------------------------------------------------------------------

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> WeftWork:
        return self._message(True, tensors, dst, tag)

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> WeftWork:
        return self._message(False, tensors, src, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> WeftWork:
        return self._message(False, tensors, -1, tag)

    def _message(self, sends: bool, tensors: Tensors, peer: int, tag: int) -> WeftWork:
        call = BackendCall(self, "send" if sends else "recv", None)
        channel, tensor = call.channel, tensors[0]
        if channel.fabric.broken is not None:
            raise channel.group_error()
        if not -1 <= peer < self.size() or (sends and peer < 0):
            raise Unsupported(f"there is no rank {peer} in a group of {self.size()}")
        moved = call.source(tensor) if sends else call.target(tensor)
        message = channel.message(sends, peer, tag, moved)
        whom = "any rank" if peer < 0 else f"rank {peer}"
        what = f"send to {whom}" if sends else f"receive from {whom}"
        call.pending.append(PendingMessage(channel, message, moved, what))
        return WeftWork(call.pending, list(tensors), call.finish)


def _create(store: Store, rank: int, size: int, timeout: timedelta) -> WeftGroup:
    return WeftGroup(store, rank, size, timeout)


def register() -> None:
    """Registers the backend with torch.distributed, once."""
    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, devices=["cpu"])
