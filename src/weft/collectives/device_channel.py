"""The collectives of a group on a device: plans of copies that its engines carry out.

It has the methods of `group_channel.GroupChannel` that the public functions call, so these are the
same for all devices. A call is enqueued on the caller's stream; in the background it has a stream
of its own, so that compute on the caller's stream goes on beside the copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from weft import fabric as fabrics
from weft.collectives import group_channel
from weft.collectives.group_channel import GroupChannel
from weft.collectives.handle import Handle, Result
from weft.collectives.kinds import BY_NUMBER, REDUCTIONS, SUM
from weft.dtype import name_of
from weft.errors import Mismatch, Unsupported
from weft.fabric import Fabric
from weft.fabric.interface import Exposed
from weft.fabric.proposal import Proposal, proposal_of
from weft.operation import split
from weft.plan.collective import Collective, KindName
from weft.plan.command_variants import PULL, CommandedCollective
from weft.run import session as sessions
from weft.run.call import Request, carry_out
from weft.schedule import Schedule

_ANY = Schedule.parse("serial")
_WHY = "every rank fetches its parts by copy engines"
_MOVED = "uint8"


class DeviceJob:
    """A collective in the background. It ends on the caller's stream when that waits for it."""

    def __init__(self, event: torch.Event) -> None:
        self._event = event

    @property
    def done(self) -> bool:
        return self._event.query()

    def join(self) -> None:
        torch.accelerator.current_stream().wait_event(self._event)


class DeviceHandle(Handle[Result]):
    """What `async_op=True` returns for tensors of a device."""

    def __init__(self, job: DeviceJob, result: Result, name: str) -> None:
        self._job: Any = job
        self._result = result
        self._name = name

    def wait(self, timeout: float | None = None) -> Result:
        """Lets the current stream wait for the result. The host does not wait, so `timeout` counts
        for nothing: the deadline of the group ends a call that does not come through."""
        self._job.join()
        return self._result

    def cancel(self) -> bool:
        """False: what is enqueued cannot be taken back."""
        return False


class DeviceChannel:
    """The collectives of one group on one kind of device."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.rank, self.world = fabric.rank, fabric.world
        self._side: torch.Stream | None = None

    def quick(self, *arguments: object, **options: object) -> bool:
        """Never: there is no shorter way."""
        return False

    def refuse(self, error: Exception, background: bool = False) -> None:
        self.fabric.refuse("a collective", error)

    def run_even(
        self,
        kind: int,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        num_bytes: int,
        *,
        reduction: int = SUM,
        root: int = 0,
        engine: str = "dma",
        background: bool = False,
    ) -> DeviceJob | None:
        """A collective in which all ranks have the same sizes. num_bytes: of a rank's part, or of
        the whole where every rank has a whole."""
        name = BY_NUMBER[kind].name
        whole = name in ("all_reduce", "broadcast")
        counts = _shares(num_bytes, self.world, source) if whole else (num_bytes,) * self.world
        own: Any = (counts, counts) if name == "all_to_all" else counts
        return self._start(name, own, source, target, reduction, root, background, engine)

    def run_uneven(
        self,
        kind: int,
        sizes: Sequence[int],
        sources: Sequence[torch.Tensor],
        in_sizes: Sequence[int],
        targets: Sequence[torch.Tensor],
        out_sizes: Sequence[int],
        *,
        by_pair: bool = False,
        reduction: int = SUM,
        root: int = 0,
        engine: str = "dma",
        background: bool = False,
    ) -> DeviceJob | None:
        """A collective with sizes that differ by rank, all in bytes."""
        source = sources[0] if sources else None
        target = targets[0] if targets else None
        name = BY_NUMBER[kind].name
        own = (tuple(in_sizes), tuple(out_sizes)) if by_pair else tuple(sizes)
        return self._start(name, own, source, target, reduction, root, background, engine)

    def _start(
        self,
        name: KindName,
        sizes: Any,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        reduction: int,
        root: int,
        background: bool,
        engine: str,
    ) -> DeviceJob | None:
        operation = REDUCTIONS[reduction]
        try:
            if engine != "dma":
                raise Unsupported(f"collectives on {self.fabric.device.type} are for dma engines")
            if operation not in ("sum", "avg"):
                raise Unsupported(
                    f"collectives on {self.fabric.device.type} add; use op='sum' or op='avg'"
                )
        except Unsupported as error:
            self.refuse(error)
            raise
        if not background:
            self._run(name, sizes, source, target, operation, root)
            return None
        if self._side is None:
            self._side = torch.Stream(self.fabric.device)
        side = self._side
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            self._run(name, sizes, source, target, operation, root)
        for tensor in (source, target):
            if tensor is not None:
                tensor.record_stream(side)
        return DeviceJob(side.record_event())

    def _run(
        self,
        name: KindName,
        sizes: Any,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        operation: str,
        root: int,
    ) -> None:
        tensor = source if source is not None else target
        adds = name in ("all_reduce", "reduce_scatter")
        dtype = name_of(tensor.dtype) if adds and tensor is not None else _MOVED
        proposal = proposal_of(name, (("dtype", dtype), ("root", root)), (("sizes", sizes),))
        inputs = {} if source is None else {"x": _column(source, adds)}
        outputs = {} if target is None else {"y": _column(target, adds)}
        carry_out(
            sessions.of(self.fabric),
            Request(
                proposal,
                str(_ANY),
                _ANY,
                _WHY,
                lambda proposals: _combine(name, proposals),
                inputs,
                Exposed(inputs),
                lambda _: dict(outputs),
            ),
        )
        if operation == "avg" and target is not None:
            target.div_(self.world)

    def handle(self, job: DeviceJob, result: Any, name: str) -> DeviceHandle[Any]:
        return DeviceHandle(job, result, name)


def _combine(name: KindName, proposals: Sequence[Proposal]) -> CommandedCollective:
    """The collective that the proposals of all ranks make together."""
    same = dict(proposals[0].same)
    own = [dict(proposal.own)["sizes"] for proposal in proposals]
    world, root, dtype = len(own), same["root"], same["dtype"]
    if name == "all_to_all":
        for source in range(world):
            for target in range(world):
                sent, expected = own[source][0][target], own[target][1][source]
                if sent != expected:
                    raise Mismatch(
                        f"ranks disagree on the splits: rank {source} sends {sent} bytes to rank "
                        f"{target}, which expects {expected}"
                    )
        sizes = tuple(size for sent, _ in own for size in sent)
    else:
        sizes = tuple(own[root] if name == "scatter" else own[0])
        for rank, counts in enumerate(own):
            fits = counts[rank] == sizes[rank] if name == "scatter" else tuple(counts) == sizes
            if not fits:
                raise Mismatch(
                    f"ranks disagree on the sizes of {name}: they are {list(sizes)} bytes on rank "
                    f"{root if name == 'scatter' else 0} and {list(counts)} on rank {rank}"
                )
    return CommandedCollective(_collective(name, sizes, world, dtype, root), PULL)


def _collective(
    name: KindName, num_bytes: Sequence[int], world: int, dtype: str, root: int
) -> Collective:
    item = 1 if dtype == _MOVED else getattr(torch, dtype).itemsize
    return Collective(name, tuple(size // item for size in num_bytes), world, dtype, root)


def _shares(num_bytes: int, world: int, tensor: torch.Tensor | None) -> tuple[int, ...]:
    """A whole cut into parts of whole elements, one for each rank."""
    item = 1 if tensor is None else tensor.element_size()
    elements = num_bytes // item
    return tuple(size * item for size in split(elements, world))


def _column(tensor: torch.Tensor, adds: bool) -> torch.Tensor:
    """A tensor as a column of elements, or of bytes if they are only moved."""
    flat = tensor.detach().reshape(-1)
    return (flat if adds or not flat.numel() else flat.view(torch.uint8)).view(-1, 1)


AnyChannel = GroupChannel | DeviceChannel


def channel_of(group: dist.ProcessGroup | None, tensor: object) -> Any:
    """The channel of a group for a tensor: `GroupChannel` on the host, else `DeviceChannel`."""
    if isinstance(tensor, torch.Tensor) and not tensor.is_cpu:
        kind = tensor.device.type
        if kind in fabrics.devices():
            session = sessions.of(fabrics.of(group, kind))
            return session.part(DeviceChannel, lambda own: DeviceChannel(own.fabric))
    return group_channel.of(group)
