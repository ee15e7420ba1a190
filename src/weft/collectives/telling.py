"""What is told of collectives: their spans in a recording, and `weft.explain()` in words."""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.collectives.kinds import DTYPES, KINDS, REDUCTIONS
from weft.fabric import _native
from weft.run import record
from weft.run.explain import Explanation
from weft.timeline import COMMUNICATION, Span, Timeline

LANE = "channel"
"""The lane of what a rank does alone in a collective; what comes from a peer is on its engine's."""

ACTS: tuple[tuple[str, str], ...] = (
    ("meet", "wait"),
    ("stage", "permute"),
    ("from {}", COMMUNICATION),
    ("sum", "reduce"),
    ("own part", "permute"),
)
"""What a span is called and of which kind it is, in the order of the native acts."""

WAYS: dict[str, str] = {
    "announcement": "up to {small} travel with the announcement: flag and data in one line",
    "ring": "in chunks of {chunk} through rings that stay in the cache",
    "in place": "the input is symmetric memory, which peers read where it lies",
}
"""How bytes can come, in the order of the native ways, and why they came so."""

_NAMES = {number: str(dtype).removeprefix("torch.") for dtype, number in DTYPES.items()}
_NS = 1e-9


@dataclass(frozen=True)
class CollectiveExplanation(Explanation):
    """The last collective of this process. `schedule` says how bytes came to this rank, and
    `num_tasks` in how many chunks."""

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


def explain_last(native: _native.Channel, world: int) -> tuple[float, Explanation] | None:
    """What happened in the last collective of a channel, and when it ended."""
    facts = native.last()
    if facts.ended == 0:
        return None
    sizes = {
        "small": _size(_native.SMALL_BYTES),
        "chunk": _size(_native.CHUNK_BYTES),
    }
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
    recording: record.Recording, job: _native.Job, kind: int, num_bytes: int, rank: int, world: int
) -> None:
    """Puts a job's spans into a recording: at once if it is over, else as soon as it is."""
    title = f"{KINDS[kind]} of {_size(num_bytes)} over {world} ranks"
    recording.reserve(title, lambda: _timeline(job, rank, title) if job.done else None)
    recording.settle()


def _timeline(job: _native.Job, rank: int, title: str) -> Timeline:
    spans = []
    for act, peer, num_bytes, start, end in job.marks:
        task, kind = ACTS[act]
        lane = f"engine {peer}" if kind == COMMUNICATION else LANE
        name = task.format(peer)
        spans.append(Span(rank, lane, name, kind, start * _NS, end * _NS, num_bytes))
    return Timeline(tuple(spans), title)


def _title(facts: _native.Facts, world: int) -> str:
    name = KINDS[facts.kind]
    if name == "barrier":
        return f"barrier over {world} ranks"
    if name in ("all_reduce", "reduce_scatter", "reduce"):
        name += f" ({REDUCTIONS[facts.reduction]})"
    dtype = _NAMES.get(facts.dtype, f"{facts.item}-byte elements")
    given, made = facts.bytes_in // max(1, facts.item), facts.bytes_out // max(1, facts.item)
    into = f" into {made}" if made != given else ""
    return f"{name} of {given} {dtype}{into} over {world} ranks"


def _size(num_bytes: int) -> str:
    if num_bytes >= 2**20:
        return f"{num_bytes / 2**20:.4g} MiB"
    return f"{num_bytes / 2**10:.4g} KiB" if num_bytes >= 2**10 else f"{num_bytes} bytes"
