"""The race detector: which accesses of the same bytes, one of them a write, had no order; and which
posts of the same word.

It replays the logs of all ranks with vector clocks, one component for each stream of each rank. An
operation comes after what its stream did before, what its stream waited for (events, and words that
others posted), and what the host of its rank had waited for when it was issued; the hosts of ranks
learn from each other where they meet. That one queue runs two streams, or that the host issued one
operation before the other, is no order. So what is found does not depend on timing: a race is found
whichever access came first, in every mode.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.loom.deadlock import LoomFinding, QueuedOperation, failures
from weft.loom.read import Line, Rect, read

Clock = dict[tuple[int, int], int]
"""How much of each (rank, stream) is known to be over."""

FREE, ALLOC = "free", "alloc"
"""What the allocator logs: a write of a freed block, before the next work of the stream that it
belongs to, and that a block is given out."""

_BUCKET = 1 << 20
_MOST = 100  # findings that are kept apart


@dataclass(slots=True)
class _Access:
    stream: tuple[int, int]
    tick: int
    rect: Rect
    write: bool
    sync: bool  # of a flag, which streams write and wait for on purpose
    line: Line
    frees: bool = False  # nobody may use these bytes until they are allocated again


@dataclass(slots=True)
class _Post:
    stream: tuple[int, int]
    tick: int
    clock: Clock
    value: int | None  # None: written with other data, so not known


@dataclass
class _State:
    words: dict[int, list[int]]  # the flags of each heap, by offset
    clocks: dict[tuple[int, int], Clock] = field(default_factory=dict)
    hosts: dict[int, dict[int, Clock]] = field(default_factory=dict)
    joined: dict[tuple[int, int], int] = field(default_factory=dict)
    marks: dict[tuple[int, int], Clock] = field(default_factory=dict)
    posts: dict[tuple[int, int], list[_Post]] = field(default_factory=dict)
    entered: dict[tuple[str, int], Clock] = field(default_factory=dict)
    buckets: dict[tuple[int, int], list[_Access]] = field(default_factory=dict)
    found: dict[tuple[Any, ...], LoomFinding] = field(default_factory=dict)


def find(logs: Sequence[bytes]) -> list[LoomFinding]:
    """Everything that was wrong in a run, from the logs of its ranks, in the order of the ranks."""
    lines = read(logs)
    state = _State(_flags(lines))
    for line in lines:
        if line.kind == "h":
            _host(state, line)
        elif line.name == ALLOC:
            _allocated(state, line)
        elif line.kind in "orwpf":
            _stream(state, line)
    return [*state.found.values(), *failures(lines)]


def _flags(lines: Sequence[Line]) -> dict[int, list[int]]:
    words: dict[int, set[int]] = {}
    for line in lines:
        if line.kind in "pf":
            space, offset, width = line.rest[0][:3]
            for at in range(offset, offset + width, 4):
                words.setdefault(space, set()).add(at)
    return {space: sorted(found) for space, found in words.items()}


def _join(clock: Clock, other: Clock) -> None:
    for stream, tick in other.items():
        if clock.get(stream, 0) < tick:
            clock[stream] = tick


def _host(state: _State, line: Line) -> None:
    at, what = line.rest[:2]
    known = state.hosts.setdefault(line.rank, {0: {}})
    clock = dict(known[max(known)])
    if what == "mark":
        _join(clock, state.marks.get((line.rank, line.rest[2]), {}))
    elif what == "enter":
        state.entered[line.rest[2], line.rank] = dict(clock)
    else:
        for peer in line.rest[3]:
            _join(clock, state.entered.get((line.rest[2], peer), {}))
    known[at] = clock


def _stream(state: _State, line: Line) -> None:
    stream = (line.rank, line.stream)
    clock = state.clocks.setdefault(stream, {})
    if state.joined.get(stream, 0) < line.host:
        state.joined[stream] = line.host
        _join(clock, state.hosts.get(line.rank, {}).get(line.host, {}))
    clock[stream] = clock.get(stream, 0) + 1
    if line.kind == "r":
        state.marks[line.rank, line.rest[0]] = dict(clock)
    elif line.kind == "w":
        _join(clock, state.marks.get((line.rank, line.rest[0]), {}))
    elif line.kind == "f":
        rect, value, compare = line.rest
        _wait(state, clock, (rect[0], rect[1]), compare, value)
        _access(state, line, clock, Rect(*rect[:5]), write=False, sync=True)
    elif line.kind == "p":
        rect, value = line.rest
        _access(state, line, clock, Rect(*rect[:5]), write=True, sync=True)
        _post(state, line, clock, (rect[0], rect[1]), value)
    else:
        _operation(state, line, clock)


def _operation(state: _State, line: Line, clock: Clock) -> None:
    rects, values, after = line.rest[4:7]
    if after:  # what only this operation comes after: memory whose other uses are over
        clock = dict(clock)
        for mark in after:
            _join(clock, state.marks.get((line.rank, mark), {}))
    written = {(space, offset): value for space, offset, value in values}
    for space, offset, width, rows, pitch, write in rects:
        rect = Rect(space, offset, width, rows, pitch)
        inside = _words_in(state, rect)
        sync = width <= 8 and rows == 1 and len(inside) * 4 == width
        _access(state, line, clock, rect, bool(write), sync)
        if write:
            for word in inside:
                _post(state, line, clock, (space, word), written.get((space, word)))


def _words_in(state: _State, rect: Rect) -> list[int]:
    words = state.words.get(rect.space)
    if not words:
        return []
    near = words[bisect_left(words, rect.offset) : bisect_left(words, rect.end)]
    if rect.rows == 1:
        return near
    return [w for w in near if (w - rect.offset) % rect.pitch < rect.width]


# -- flags -----------------------------------------------------------------------------------------


def _post(
    state: _State, line: Line, clock: Clock, word: tuple[int, int], value: int | None
) -> None:
    stream = (line.rank, line.stream)
    posts = state.posts.setdefault(word, [])
    posts.append(_Post(stream, clock[stream], dict(clock), value))
    if len(posts) > 512:
        del posts[:256]


def _wait(state: _State, clock: Clock, word: tuple[int, int], compare: int, value: int) -> None:
    """The waiter comes after the first post that can have ended its wait: the first that satisfies
    it and that it did not know to be overwritten. What it knew already teaches it nothing."""
    posts = state.posts.get(word, [])
    known = next(
        (i for i in reversed(range(len(posts))) if posts[i].tick <= clock.get(posts[i].stream, 0)),
        -1,
    )
    last = 0 if known < 0 else posts[known].value
    if last is not None and _satisfies(last, compare, value):
        return
    for post in posts[known + 1 :]:
        if post.value is not None and _satisfies(post.value, compare, value):
            _join(clock, post.clock)
            return
    unknown = [post for post in posts[known + 1 :] if post.value is None]
    if unknown:
        _join(clock, unknown[-1].clock)


def _satisfies(found: int, compare: int, value: int) -> bool:
    if compare == 0:
        return (found - value) % 2**32 < 2**31
    if compare == 1:
        return found == value
    return bool(found & value) if compare == 2 else (found | value) % 2**32 != 2**32 - 1


# -- accesses --------------------------------------------------------------------------------------


def _access(state: _State, line: Line, clock: Clock, rect: Rect, write: bool, sync: bool) -> None:
    stream = (line.rank, line.stream)
    access = _Access(stream, clock[stream], rect, write, sync, line, line.name == FREE)
    for bucket in range(rect.offset // _BUCKET, (rect.end - 1) // _BUCKET + 1):
        earlier = state.buckets.setdefault((rect.space, bucket), [])
        kept = []
        for other in earlier:
            ordered = other.tick <= clock.get(other.stream, 0)
            wrong = other.frees if ordered else _conflict(access, other)
            if wrong and overlap(rect, other.rect):
                _report(state, other, access)
            # Whoever comes after this access comes after that one too: it need not be kept.
            if not (
                ordered
                and (write or not other.write)
                and _covers(rect, other.rect)
                and sync <= other.sync
            ):
                kept.append(other)
        kept.append(access)
        state.buckets[rect.space, bucket] = kept


def _allocated(state: _State, line: Line) -> None:
    """Memory is given out again: that it was freed does not matter any more."""
    for rect in (Rect(*rect[:5]) for rect in line.rest[4]):
        for bucket in range(rect.offset // _BUCKET, (rect.end - 1) // _BUCKET + 1):
            for access in state.buckets.get((rect.space, bucket), ()):
                access.frees = access.frees and not overlap(access.rect, rect)


def _conflict(one: _Access, other: _Access) -> bool:
    """Whether two accesses of the same bytes need an order. A post and a wait of a word make one;
    but of two posts that nothing orders, one is lost."""
    if one.sync and other.sync:
        return one.line.kind == other.line.kind == "p"
    return one.write or other.write


def overlap(a: Rect, b: Rect) -> bool:
    """Whether two rectangles share a byte."""
    if a.end <= b.offset or b.end <= a.offset:
        return False
    if a.rows > b.rows:
        a, b = b, a
    if b.rows == 1:
        return True
    for row in range(a.rows):
        start = a.offset + row * a.pitch
        first = max(0, (start - b.offset - b.width) // b.pitch + 1)
        last = min(b.rows - 1, -(-(start + a.width - b.offset) // b.pitch) - 1)
        if first <= last:
            return True
    return False


def _covers(a: Rect, b: Rect) -> bool:
    if a.rows == 1:
        return a.offset <= b.offset and b.end <= a.end
    return (a.offset, a.width, a.rows, a.pitch) == (b.offset, b.width, b.rows, b.pitch)


def _report(state: _State, first: _Access, second: _Access) -> None:
    sides = [_operation_of(first), _operation_of(second)]
    sides.sort(key=lambda o: (o.rank, o.stream, o.name))
    key = tuple((o.rank, o.stream, o.name, o.label, o.line, o.access) for o in sides)
    known = state.found.get(key)
    if known is not None:
        known.times += 1
        return
    if len(state.found) >= _MOST:
        return
    freed = next((o for o in sides if o.name == FREE), None)
    place = max(first.rect.offset, second.rect.offset)
    space = second.rect.space
    where = f"heap of rank {space}" if space >= 0 else f"host memory of rank {-1 - space}"
    if freed is not None:
        user = sides[1] if sides[0] is freed else sides[0]
        kind = "reuse"
        text = (
            f"memory is freed while {user} may still use it; call record_stream, "
            "or let the stream that frees it wait"
        )
    elif first.sync and second.sync:
        kind = "lost"
        text = f"nothing orders {sides[0]} and {sides[1]}, of one word; one of them may be lost"
    else:
        kind = "race"
        text = f"nothing orders {sides[0]} and {sides[1]}; a wait is missing between them"
    state.found[key] = LoomFinding(kind, sides, text, f"{where}, byte {place}")


def _operation_of(access: _Access) -> QueuedOperation:
    line = access.line
    how = "write" if access.write else "read"
    return QueuedOperation(line.rank, line.stream, line.name, line.label, line.origin, how)
