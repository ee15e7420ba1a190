"""The detector on logs written by hand: its rules, without a device."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.loom.detector import find, overlap
from weft.loom.read import Rect, read

WORD = [0, 64, 4, 1, 0]


def log(*lines):
    """A log from lines of (kind, time, stream, host, name, ...)."""
    texts = [json.dumps(["s", 0, ""])]
    names = {"": 0}
    for kind, time, *rest in lines:
        if kind in "orwpf":
            stream, host, name, *more = rest
            if name not in names:
                names[name] = len(names)
                texts.append(json.dumps(["s", names[name], name]))
            texts.append(json.dumps([kind, time, stream, host, names[name], 0, 0, *more]))
        else:
            texts.append(json.dumps([kind, time, *rest]))
    return "\n".join(texts).encode() + b"\n"


def access(time, stream, name, rect, write, host=0, values=(), after=()):
    rects = [[*rect, int(write)]]
    return ("o", time, stream, host, name, time + 1, -1, 4, 0, rects, list(values), list(after))


DATA = [0, 1024, 16, 1, 0]


def test_two_writes_without_order_are_a_race():
    found = find([log(access(1, 0, "a", DATA, True), access(2, 1, "b", DATA, True))])
    assert [f.kind for f in found] == ["race"]
    assert {o.name for o in found[0].operations} == {"a", "b"}


def test_two_reads_are_none():
    assert find([log(access(1, 0, "a", DATA, False), access(2, 1, "b", DATA, False))]) == []


def test_one_stream_is_an_order():
    assert find([log(access(1, 0, "a", DATA, True), access(2, 0, "b", DATA, True))]) == []


def test_an_event_is_an_order_only_for_what_came_before_it():
    before = log(
        access(1, 0, "a", DATA, True),
        ("r", 2, 0, 0, "record", 7),
        ("w", 3, 1, 0, "wait", 7),
        access(4, 1, "b", DATA, True),
    )
    late = log(
        ("r", 1, 0, 0, "record", 7),
        access(2, 0, "a", DATA, True),
        ("w", 3, 1, 0, "wait", 7),
        access(4, 1, "b", DATA, True),
    )
    assert find([before]) == []
    assert len(find([late])) == 1


def test_issue_order_is_no_order_but_a_wait_of_the_host_is():
    """The host has issued both; only if it waited in between does the second come after."""
    lines = [access(1, 0, "a", DATA, True), ("r", 2, 0, 0, "record", 7)]
    waited = log(*lines, ("h", 3, 1, "mark", 7), access(4, 1, "b", DATA, True, host=1))
    issued_before = log(*lines, ("h", 3, 1, "mark", 7), access(4, 1, "b", DATA, True, host=0))
    assert find([waited]) == []
    assert len(find([issued_before])) == 1


def test_hosts_learn_from_each_other_where_they_meet():
    first = [access(1, 0, "a", DATA, True), ("r", 2, 0, 0, "record", 7), ("h", 3, 1, "mark", 7)]
    second = access(6, 0, "b", DATA, True, host=2)
    meets = [("h", 4, 1, "enter", "k"), ("h", 5, 2, "leave", "k", [0, 1])]
    assert find([log(*first, ("h", 4, 2, "enter", "k")), log(*meets, second)]) == []
    assert len(find([log(*first), log(*meets, second)])) == 1


def test_a_word_orders_by_the_value_that_was_waited_for():
    writes = [access(1, 0, "a", DATA, True), ("p", 2, 0, 0, "post", [*WORD, 1], 1)]
    more = [access(3, 0, "later", DATA, True), ("p", 4, 0, 0, "post", [*WORD, 1], 2)]

    def reader(value):
        return [("f", 9, 1, 0, "wait", [*WORD, 0], value, 0), access(10, 1, "b", DATA, False)]

    assert find([log(*writes, *reader(1))]) == []
    # The word is 2 already, but a wait for 1 may have ended before the second write.
    assert len(find([log(*writes, *more, *reader(1))])) == 1
    assert find([log(*writes, *more, *reader(2))]) == []


def test_a_word_that_still_holds_from_the_last_time_orders_nothing():
    """A captured epoch: the second replay's wait is satisfied by the first replay's post."""
    turn = [
        access(1, 0, "a", DATA, True),
        ("p", 2, 0, 0, "post", [*WORD, 1], 1),
        ("f", 3, 1, 0, "wait", [*WORD, 0], 1, 0),
        access(4, 1, "b", DATA, False),
        ("r", 5, 1, 0, "record", 7),
        ("w", 6, 0, 0, "wait", 7),
    ]
    again = [(k, t + 10, *r) for k, t, *r in turn]
    again = [(k, t, *([*r[:3], r[3] + 10, *r[4:]] if k == "o" else r)) for k, t, *r in again]
    reset = [("p", 7, 1, 0, "reset", [*WORD, 1], 0)]
    assert len(find([log(*turn, *again)])) == 1
    ordered = [("r", 8, 1, 0, "record", 8), ("w", 9, 0, 0, "wait", 8)]
    assert find([log(*turn, *reset, *ordered, *again)]) == []


def test_data_and_a_flag_may_not_share_a_word_without_order():
    zero = access(5, 2, "zero", [0, 64, 32, 1, 0], True)
    post = ("p", 2, 0, 0, "post", [*WORD, 1], 1)
    assert len(find([log(post, zero)])) == 1


def test_memory_that_is_used_after_it_was_freed():
    """Also in the order of one stream, unless it has been allocated again."""
    freed, used = access(1, 0, "free", DATA, True), access(3, 0, "add", DATA, False)
    again = access(2, 0, "alloc", DATA, True)
    assert [f.kind for f in find([log(freed, used)])] == ["reuse"]
    assert find([log(freed, again, used)]) == []
    # Another stream that writes must still come after the one that freed it.
    other = access(3, 1, "copy", DATA, True)
    assert [f.kind for f in find([log(freed, again, other)])] == ["reuse"]


def test_of_two_posts_of_a_word_that_nothing_orders_one_is_lost():
    first, reset = ("p", 1, 0, 0, "post", [*WORD, 1], 1), ("p", 5, 1, 0, "reset", [*WORD, 1], 0)
    wait = ("f", 4, 1, 0, "wait", [*WORD, 0], 1, 1)
    assert [f.kind for f in find([log(first, reset)])] == ["lost"]
    assert find([log(first, wait, reset)]) == []
    # The next post must come after the word has been reset.
    again = ("p", 8, 0, 0, "post", [*WORD, 1], 1)
    ordered = [("r", 6, 1, 0, "record", 7), ("w", 7, 0, 0, "wait", 7)]
    assert [f.kind for f in find([log(first, wait, reset, again)])] == ["lost"]
    assert find([log(first, wait, reset, *ordered, again)]) == []


def test_memory_that_is_freed_while_used_is_told_apart():
    used = [access(1, 1, "add", DATA, False), ("r", 2, 1, 0, "record", 7)]
    assert find([log(*used, access(3, 0, "free", DATA, True))])[0].kind == "reuse"
    assert find([log(*used, access(3, 0, "free", DATA, True, after=[7]))]) == []


def test_order_of_freed_memory_does_not_order_the_stream():
    """That the allocator saw the end of a use orders that memory, and nothing else."""
    other = [0, 4096, 16, 1, 0]
    lines = [
        access(1, 1, "use", DATA, False),
        access(2, 1, "result", other, True),
        ("r", 3, 1, 0, "record", 7),
        access(4, 0, "free", DATA, True, after=[7]),
        access(5, 0, "read", other, False),
    ]
    assert [f.kind for f in find([log(*lines)])] == ["race"]


def test_a_log_that_was_cut_short_is_read_to_its_end():
    whole = log(access(1, 0, "a", DATA, True), access(2, 1, "b", DATA, True))
    assert len(read([whole[:-5]])) == 1


rects = st.builds(
    lambda offset, width, rows, gap: Rect(0, offset, width, rows, width + gap),
    st.integers(0, 60),
    st.integers(1, 9),
    st.integers(1, 5),
    st.integers(0, 12),
)


@settings(max_examples=400, deadline=None)
@given(rects, rects)
def test_overlap_of_rectangles_is_exact(a, b):
    def bytes_of(r):
        return {r.offset + i * r.pitch + j for i in range(r.rows) for j in range(r.width)}

    assert overlap(a, b) == bool(bytes_of(a) & bytes_of(b))


@pytest.mark.parametrize("seed", range(4))
def test_races_are_found_whatever_the_times(seed):
    """Random programs of streams, events and accesses, at random legal times: what is found is the
    same for all, and is what the order alone says."""
    random = np.random.default_rng(seed)
    program = [(int(random.integers(3)), int(random.integers(4))) for _ in range(14)]
    waits = {i: int(random.integers(i)) for i in range(1, 14) if random.random() < 0.5}
    before = _before(program, waits)
    expected = {
        tuple(sorted((f"op{i}", f"op{j}")))
        for j in range(14)
        for i in range(j)
        if program[i][1] == program[j][1] and i not in before[j] and j not in before[i]
    }
    for shuffle in range(5):
        order = _legal_order(before, np.random.default_rng(100 * seed + shuffle))
        lines = []
        for time, i in enumerate(order):
            stream, place = program[i]
            if i in waits:
                lines.append(("w", 10 * time + 1, stream, 0, "wait", waits[i]))
            lines.append(access(10 * time + 2, stream, f"op{i}", [0, 64 * place, 64, 1, 0], True))
            lines.append(("r", 10 * time + 5, stream, 0, "record", i))
        found = {tuple(sorted(o.name for o in f.operations)) for f in find([log(*lines)])}
        # An access that is ordered after one side of a race may stand for that side.
        assert found <= expected
        assert bool(found) == bool(expected)


def _before(program, waits):
    before = {}
    for i, (stream, _) in enumerate(program):
        known = set()
        for j in range(i):
            if program[j][0] == stream or waits.get(i) == j:
                known |= before[j] | {j}
        before[i] = known
    return before


def _legal_order(before, random):
    left, order = set(before), []
    while left:
        ready = sorted(i for i in left if not before[i] & left)
        choice = int(random.choice(ready))
        order.append(choice)
        left.remove(choice)
    return order
