"""What a collective did: its spans in a recording, and its explanation for `weft.explain()`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weft.collectives.kinds import BY_NUMBER, DTYPES, REDUCTIONS
from weft.dtype import name_of
from weft.operation import ranks_label
from weft.run import record
from weft.run.explain import Explanation
from weft.timeline import COMMUNICATION, Span, Timeline

if TYPE_CHECKING:
    from weft.collectives.group_channel import Facts, GroupChannel, Job

LANE = "channel"
"""The lane for what a rank does alone. Bytes from a peer are on the lane of that peer's engine."""

ACTS: tuple[tuple[str, str], ...] = (
    ("meet", "wait"),
    ("stage", "permute"),
    ("from {}", COMMUNICATION),
    ("sum", "reduce"),
    ("own part", "permute"),
    ("from {}", COMMUNICATION),
)
"""The name and the kind of each span, in the order of the native acts (`native/job.h`)."""

WAYS: dict[str, str] = {
    "announcement": "up to {small} travel with the announcement: flag and data in one line",
    "ring": "in chunks of {chunk} through rings in shared memory",
    "in place": "the input is symmetric memory, which peers read where it lies",
}
"""How bytes can arrive, in the order of the native ways, with the reason."""

COLLECTIVE = "a collective by itself, which the caller waits for"
BACKGROUND = "a collective in the background, beside other work"
"""The reasons in a summary."""

_DTYPE_NAMES = {number: name_of(dtype) for dtype, number in DTYPES.items()}
_NS = 1e-9


@dataclass(frozen=True)
class CollectiveExplanation(Explanation):
    """The last collective of this process. `schedule` is how bytes arrived at this rank, and
    `num_tasks` is the number of chunks."""

    bytes_by_way: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        chunks = "1 chunk" if self.num_tasks == 1 else f"{self.num_tasks} chunks"
        moved = ", ".join(
            f"{_size(n)} by {engine} in {chunks}" for engine, n in self.bytes_by_engine.items() if n
        )
        us = self.seconds * 1e6
        took = f"{us:.1f} us" if us < 1000 else f"{us / 1000:.3f} ms"
        return "\n".join(
            [
                self.operation,
                f"  way        {self.schedule} ({self.why})",
                f"  took       {took}",
                f"  moved      {moved or 'nothing'} to this rank",
            ]
        )


def explanation_of(facts: Facts, world: int, small_bytes: int) -> tuple[float, Explanation] | None:
    """When the last collective of a channel ended, and its explanation; None if there was none.

    small_bytes: the most that travels with an announcement.
    """
    if facts.ended == 0:
        return None
    sizes = {"small": _size(small_bytes), "chunk": _size(facts.chunk_bytes)}
    by_way = {way: n for way, n in zip(WAYS, facts.came, strict=True) if n}
    seconds = (facts.ended - facts.started) * _NS
    return facts.ended * _NS, CollectiveExplanation(
        operation=_title(facts, world),
        schedule=" + ".join(by_way) or "nothing to move",
        why="; ".join(WAYS[way].format(**sizes) for way in by_way) or "no bytes came from a peer",
        seconds=seconds,
        bytes_by_engine={"cores" if facts.holds_core else "dma": sum(facts.came)},
        num_tasks=facts.chunks,
        workspace_bytes=0,
        percent_of_ideal=None,
        bytes_by_way=by_way,
    )


def keep(
    recording: record.Recording,
    job: Job,
    kind: int,
    num_bytes: int,
    channel: GroupChannel,
    engine: str,
    background: bool,
) -> None:
    """Puts the spans of a job into a recording: now if the job has ended, otherwise when it has."""
    name, rank = BY_NUMBER[kind].name, channel.rank
    title = f"{name} of {_size(num_bytes)} over {ranks_label(channel.world)}"
    layer, backward = recording.layers.now()
    called = record.Called(
        name,
        title,
        layer,
        backward,
        rank,
        f"{engine}, in background" if background else engine,
        "",
        BACKGROUND if background else COLLECTIVE,
        None,
        0,
        channel.fabric.link,
        not background,
    )
    recording.add(
        called, Timeline((), title), lambda: _timeline(job, rank, title) if job.done else None
    )
    recording.settle()


def _timeline(job: Job, rank: int, title: str) -> Timeline:
    spans = []
    for act, peer, num_bytes, start, end in job.marks:
        task, kind = ACTS[act]
        lane = f"engine {peer}" if kind == COMMUNICATION else LANE
        name = task.format(peer)
        spans.append(Span(rank, lane, name, kind, start * _NS, end * _NS, num_bytes))
    return Timeline(tuple(spans), title)


def _title(facts: Facts, world: int) -> str:
    kind = BY_NUMBER[facts.kind]
    if kind.gives == "nothing":
        return f"{kind.name} over {ranks_label(world)}"
    name = f"{kind.name} ({REDUCTIONS[facts.reduction]})" if kind.sums else kind.name
    dtype = _DTYPE_NAMES.get(facts.dtype, f"{facts.item}-byte elements")
    given, made = facts.bytes_in // max(1, facts.item), facts.bytes_out // max(1, facts.item)
    into = f" into {made}" if made != given else ""
    return f"{name} of {given} {dtype}{into} over {ranks_label(world)}"


def _size(num_bytes: int) -> str:
    if num_bytes >= 2**20:
        return f"{num_bytes / 2**20:.4g} MiB"
    return f"{num_bytes / 2**10:.4g} KiB" if num_bytes >= 2**10 else f"{num_bytes} bytes"
