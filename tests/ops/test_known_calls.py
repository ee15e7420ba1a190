"""Known calls: whatever changes between calls, a call that is recognised gives what it should."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from ranks import integers, product

import weft
from weft import Unsupported
from weft.ops import all_gather_matmul, operator_call
from weft.ops.known import Known, again, key_of
from weft.run import session as sessions
from weft.select.guard import MOST_CALLS


def _session():
    return sessions.of(weft.fabric.of(None))


def _calls(x, w, part):
    """Every operator whose calls repeat, with its exact result. All ranks hold the same x and w."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sizes = [len(one) for one in x.tensor_split(world)]
    y = product(x, w)
    summed = world * y
    mine = x.tensor_split(world)[rank]
    sent, taken = sizes, [sizes[rank]] * world
    rows = y.tensor_split(world)[rank]
    return {
        "all_gather_matmul": (lambda s: weft.all_gather_matmul(mine, w, schedule=s), y),
        "matmul_reduce_scatter": (
            lambda s: weft.matmul_reduce_scatter(x, w, schedule=s),
            summed.tensor_split(world)[rank],
        ),
        "matmul_all_reduce": (lambda s: weft.matmul_all_reduce(x, w, schedule=s), summed),
        "all_to_all_matmul": (
            lambda s: weft.all_to_all_matmul(x, w, sent, taken, schedule=s),
            torch.cat([rows] * world),
        ),
        "matmul_all_to_all": (
            lambda s: weft.matmul_all_to_all(x, w, sent, taken, schedule=s),
            torch.cat([rows] * world),
        ),
        "gather_contract": (
            lambda s: torch.ops.weft.gather_contract(
                mine, [part], None, None, dist.group.WORLD.group_name, schedule=s
            )[0],
            product(x.t(), part),
        ),
    }


MOST_STEPS = 35_000
"""Functions that may begin or end in the first call of a size on 4 ranks, in which it is chosen,
planned, proved and prepared: about 3 ms. The most that an operator takes is about 20,000."""


def new_sizes():
    """Sizes that change in every call, as when prompts differ: the first call of each plans anew.
    Its work is counted, because its time depends on what else runs."""
    w = integers((48, 640), torch.float32, 1)
    for turn in range(3):
        for rows in (40 + turn, 600 + turn):
            x, part = integers((rows, 48), torch.float32, turn), torch.ones(rows, 3)
            for name, (call, want) in _calls(x, w, part).items():
                dist.barrier()
                steps, got = _counted(lambda call=call: call("auto"))
                assert torch.equal(got, want), (name, rows)
                if turn:  # the first call of an operator meets its peers and reads descriptions
                    assert steps < MOST_STEPS, (name, rows)


def _counted(function):
    """The functions that began or ended while one was called, and its result."""
    count = 0

    def step(*_):
        nonlocal count
        count += 1

    sys.setprofile(step)
    try:
        result = function()
    finally:
        sys.setprofile(None)
    return count, result


def test_new_sizes(ranks):
    ranks(4).run(new_sizes)


def other_values_and_layouts():
    """Values, strides and schedules change; a layout that was seen before is a known call."""
    known = _session().known
    known.clear()
    for turn in range(6):
        x = integers((47, 6), torch.float32, turn)
        w = integers((6, 5), torch.float32, turn + 9)
        part = integers((47, 3), torch.float32, turn + 20)
        if turn % 2:
            w = w.t().contiguous().t()
        for schedule in ("serial@dma", "hetero-unfused-1d@dma", "hetero-unfused-1d@direct"):
            for name, (call, want) in _calls(x, w, part).items():
                assert torch.equal(call(schedule), want), (name, schedule, turn)
                assert weft.explain().asked == schedule
        if turn == 1:
            count = len(known)
            assert sum(type(one) is Known for one in known.values()) == count
            assert count == 3 * (5 * 2 + 1), "six operators, two layouts of w"
    assert len(known) == count, "no layout is new any more"


@pytest.mark.parametrize("world", [1, 2, 3])
def test_other_values_and_layouts(ranks, world):
    ranks(world).run(other_values_and_layouts)


def choices_that_change():
    """A chosen schedule follows the environment and the link, also in a known call."""
    fabric, known = weft.fabric.of(None), _session().known
    x, w = integers((24, 6), torch.float32, 1), integers((6, 5), torch.float32, 2)
    mine = x.tensor_split(dist.get_world_size())[dist.get_rank()]
    key = key_of("all_gather_matmul", "auto", (mine, [w], 0, False, None, None))

    def call():
        assert torch.equal(weft.all_gather_matmul(mine, w), product(x, w))
        return weft.explain()

    for _ in range(80):
        call()
    assert type(known.get(key)) is Known, "it has settled on every rank"
    os.environ["WEFT_SCHEDULE"] = "shard-p2p@dma"
    try:
        for _ in range(2):
            found = call()
            assert (found.schedule, found.why) == ("shard-p2p@dma", "WEFT_SCHEDULE is set")
    finally:
        del os.environ["WEFT_SCHEDULE"]
    assert call().asked == "auto"
    decision = known[key].decision
    fabric.set_link(weft.Link.parse("1GB/s"))
    try:
        call()
        still = known[key].still
        assert fabric.rank or still(known[key].sizes) is not decision, "it is chosen again"
    finally:
        fabric.set_link(weft.Link())
    call()


def test_choices_that_change(renewed_ranks):
    renewed_ranks(2).run(choices_that_change)


def peers_that_settle():
    """Rank 0 settles, and its header says another reason than before. The other ranks decide
    nothing; native code must take the new plan of such a call, and not plan it in every call."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x, w = integers((2, 6), torch.float32, 1), integers((6, 5), torch.float32, 2)
    full = product(torch.cat([x] * world), w)
    begun: list[str] = []

    def see(frame, event, _):
        if event == "call":
            begun.append(frame.f_code.co_name)

    for _ in range(MOST_CALLS + 5):
        assert torch.equal(weft.all_gather_matmul(x, w), full)
    begun.clear()
    sys.setprofile(see)
    for _ in range(3):
        y = weft.all_gather_matmul(x, w)
    sys.setprofile(None)
    assert torch.equal(y, full)
    assert "run" not in begun, (rank, begun)
    assert "otherwise" not in begun, (rank, begun)


def test_peers_that_settle(renewed_ranks):
    renewed_ranks(2).run(peers_that_settle)


def native_calls_leave_what_is_unusual_to_python():
    """Native code makes a known call only where nothing but its arguments decides."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x, w = integers((2, 6), torch.float32, 1), integers((6, 5), torch.float32, 2)
    full = product(torch.cat([x] * world), w)
    name = all_gather_matmul.OPERATOR.name

    def native(x=x, w=w, schedule="serial"):
        made = again(None, (name, schedule, x, [w], 0, False, None, None))
        assert made is None or torch.equal(made, full)
        return made is not None

    for _ in range(3):
        weft.all_gather_matmul(x, w, schedule="serial")
    assert native()
    assert native(x.clone(), torch.nn.Parameter(w, requires_grad=False))
    with torch.inference_mode():
        assert native()
    assert native()
    weight = w.clone().requires_grad_()
    assert not native(w=weight)
    with torch.no_grad():
        assert native(w=weight)
    with torch.autocast("cpu"):
        assert not native()
    with torch.profiler.profile():
        assert not native()
    with weft.record():
        assert not native()
    with torch.autograd.forward_ad.dual_level():
        assert not native()
    assert not native(x=x.double(), w=w.double())
    assert not native(x=torch.cat([x, x])[::2])
    assert not native(schedule="serial@cores")
    os.environ["WEFT_SCHEDULE"] = "serial"
    try:
        assert not native()
    finally:
        del os.environ["WEFT_SCHEDULE"]
    # One rank has other rows: the others have entered a call that must be planned again.
    more = torch.cat([x, x[:1]]) if rank == 0 else x
    y = weft.all_gather_matmul(more, w, schedule="serial")
    assert torch.equal(y, product(torch.cat([torch.cat([x, x[:1]])] + [x] * (world - 1)), w))
    y = weft.all_gather_matmul(x, w, schedule="serial")
    assert torch.equal(y, full)


def test_native_calls_leave_what_is_unusual_to_python(renewed_ranks):
    renewed_ranks(2).run(native_calls_leave_what_is_unusual_to_python)


def named_by_the_environment():
    """A schedule that WEFT_SCHEDULE names is not that of later calls."""
    x, w = torch.ones(2, 6), torch.ones(6, 5)
    os.environ["WEFT_SCHEDULE"] = "serial"
    try:
        for _ in range(3):
            weft.matmul_all_reduce(x, w)
    finally:
        del os.environ["WEFT_SCHEDULE"]
    for _ in range(3):
        weft.matmul_all_reduce(x, w)
        assert "WEFT_SCHEDULE" not in weft.explain().why


def test_a_schedule_that_the_environment_named(renewed_ranks):
    renewed_ranks(2).run(named_by_the_environment)


def after_the_group():
    """Calls that were known to a group are refused when the group is destroyed."""
    x, w = torch.ones(2, 6), torch.ones(6, 5)
    for _ in range(3):
        weft.matmul_all_reduce(x, w, schedule="serial")
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()
    with pytest.raises(Unsupported):
        weft.matmul_all_reduce(x, w, schedule="serial")


def test_known_calls_end_with_their_group(fresh_ranks):
    fresh_ranks(2).run(after_the_group)


def _interrupted_after(delay, call):
    signal.setitimer(signal.ITIMER_REAL, delay)
    call()


def interrupted_natively(delay):
    """An interrupt that arrives while a known call waits in native code ends the call, and peers
    hear of it at once; later calls of this rank are refused."""
    rank = dist.get_rank()
    x, w = torch.ones(64, 64), torch.ones(64, 64)
    for _ in range(4):
        weft.matmul_all_reduce(x, w, schedule="serial")
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        while weft.fabric.of().broken is None:  # on a busy machine it may come before the call
            with pytest.raises(KeyboardInterrupt):
                _interrupted_after(delay, lambda: weft.matmul_all_reduce(x, w, schedule="serial"))
        store.set("interrupted", "")
        kept = [torch.full((64, 64), 7.0) for _ in range(20)]
        with pytest.raises(weft.Error, match="interrupted"):
            weft.matmul_all_reduce(x, w, schedule="serial")
        assert all((one == 7).all() for one in kept)
        return
    store.wait(["interrupted"])
    began = time.monotonic()
    with pytest.raises(weft.PeerLost) as lost:
        weft.matmul_all_reduce(x, w, schedule="serial")
    assert lost.value.rank == 0
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("delay", [0.005, 0.02, 0.1])
def test_an_interrupt_in_native_code(fresh_ranks, delay):
    fresh_ranks(2).run(interrupted_natively, delay)


def interrupted_between_steps(operator):
    """The ranks do not agree on a known call, so it is planned again. Rank 0 is interrupted when it
    has entered the call, and before the fabric goes on with it."""
    rank = dist.get_rank()
    w = torch.ones(16, 8)

    def call(rows):
        if operator == "few rows":
            return weft.matmul_all_reduce(torch.ones(rows, 16), w, schedule="in-kernel")
        return weft.all_gather_matmul(torch.ones(rows, 16), w, schedule=operator)

    for _ in range(4):
        call(2)
    dist.barrier()
    began = time.monotonic()
    if rank == 1:
        with pytest.raises(weft.Error):  # few rows must be the same everywhere, others may differ
            call(3)
        with pytest.raises(weft.PeerLost) as lost:
            call(3)
        assert lost.value.rank == 0
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(operator_call, "_carry_out", _interrupt)
            with pytest.raises(KeyboardInterrupt):
                call(2)
        with pytest.raises(weft.Error, match="interrupted"):
            call(2)
    assert time.monotonic() - began < 10


def _interrupt(*arguments, **options):
    raise KeyboardInterrupt


@pytest.mark.parametrize("operator", ["serial", "adaptive@dma", "few rows"])
def test_an_interrupt_after_a_known_call_was_entered(fresh_ranks, operator):
    fresh_ranks(2).run(interrupted_between_steps, operator)


def negated(schedule):
    """A weight of one column that is a negated view, after calls with a plain one of its layout."""
    world = dist.get_world_size()
    z = torch.complex(integers((16,), torch.float32, 1), integers((16,), torch.float32, 2))
    plain, w = z.imag.unsqueeze(1), z.conj().imag.unsqueeze(1)
    assert plain.stride() == w.stride() == (2, 1)
    assert w.is_neg()
    x = integers((4, 16), torch.float32, 3)
    for _ in range(4):
        assert torch.equal(
            weft.all_gather_matmul(x, plain, schedule=schedule),
            torch.cat([product(x, plain)] * world),
        )
    for _ in range(2):
        assert torch.equal(
            weft.all_gather_matmul(x, w, schedule=schedule), torch.cat([-product(x, plain)] * world)
        )
        assert torch.equal(
            weft.matmul_all_reduce(x, w, schedule=schedule), -world * product(x, plain)
        )


@pytest.mark.parametrize("schedule", ["serial", "adaptive@dma", "auto"])
def test_a_negated_view_is_no_known_call(ranks, schedule):
    ranks(2).run(negated, schedule)


def what_a_known_call_must_refuse():
    """What the key does not show, or shows as another call, is checked as before."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x, w = integers((4, 6), torch.float32, 1), integers((6, 5), torch.float32, 2)
    out = torch.empty(4 * world, 5)
    for _ in range(3):
        weft.all_gather_matmul(x, w, schedule="serial", out=out)
    weight = w.clone().requires_grad_()
    with pytest.raises(Unsupported, match="requires grad"):
        weft.all_gather_matmul(x, weight, schedule="serial", out=out)
    with torch.no_grad():
        weft.all_gather_matmul(x, weight, schedule="serial", out=out)
    with pytest.raises((Unsupported, weft.Mismatch, RuntimeError)):
        weft.all_gather_matmul(x.to_sparse() if rank == 0 else x, w, schedule="serial")
    with pytest.raises((Unsupported, weft.Mismatch), match="both are K"):
        weft.all_gather_matmul(x[:, :3] if rank == 0 else x, w, schedule="serial")
    y = weft.all_gather_matmul(x, w, schedule="serial")
    assert torch.equal(y, product(torch.cat([x] * world), w))


def test_what_a_known_call_must_refuse(renewed_ranks):
    renewed_ranks(2).run(what_a_known_call_must_refuse)


def tensors_are_not_kept():
    x, w = torch.randn(40, 6), torch.randn(6, 5)
    for call, _ in _calls(x, w, torch.randn(40, 3)).values():
        for _ in range(2):
            call("serial@dma")
    gone = [weakref.ref(x), weakref.ref(w)]
    del x, w, call
    gc.collect()
    assert [one() for one in gone] == [None, None]


def test_tensors_are_not_kept(ranks):
    ranks(2).run(tensors_are_not_kept)


def small_and_large_copies(small, others, large):
    """Copies of 64 KiB in all are made by the waiting thread, others by engines; explain() says so.
    Sizes that take turns use the same workspace, whose tensors are kept."""
    world, w = dist.get_world_size(), torch.ones(8, 3)
    for _ in range(3):
        for rows in (small, others, large):
            x = integers((rows, 8), torch.float32, rows)
            y = weft.all_gather_matmul(x, w, schedule="hetero-unfused-1d@dma")
            assert torch.equal(y, product(torch.cat([x] * world), w))
            if (os.cpu_count() or 1) >= world:  # otherwise waiting threads do not spin
                assert ("small" in weft.explain().way) == (rows != large)
            y = weft.matmul_reduce_scatter(
                torch.cat([x] * world), w, schedule="hetero-unfused-1d@dma"
            )
            assert torch.equal(y, world * product(x, w))


def test_small_and_large_copies(ranks):
    ranks(2).run(small_and_large_copies, 64, 2000, 2100)  # 2048 rows of 8 floats are 64 KiB


def test_lists_and_values_have_other_keys() -> None:
    assert key_of("name", "serial", (2, 5, 6)) != key_of("name", "serial", ([5, 6],))
    assert key_of("name", "serial", ([5], [6])) != key_of("name", "serial", ([5, 6], []))
    assert key_of("name", "serial", (0, None)) != key_of("name", "serial", ([], None))


def test_what_has_no_key() -> None:
    x = torch.ones(2, 3)
    assert key_of("name", "serial", (x, 1, None, [2, 3])) is not None
    assert key_of("name", "serial", (x, [x, x])) == key_of("name", "serial", (x + 1, [x, x]))
    assert key_of("name", "serial", (x,)) != key_of("name", "serial", (x.double(),))
    assert key_of("name", "serial", (x,)) != key_of("name", "serial", (x.t().contiguous().t(),))
    assert key_of("name", "serial", (x,)) != key_of("other", "serial", (x,))
    for other in (1.0, object(), x.to_sparse(), x.clone().requires_grad_(), [x, 2.0]):
        assert key_of("name", "serial", (other,)) is None
    assert key_of("name", None, (x,)) is None


def lookups_of_other_lengths():
    """How many indices a call has, and of what kind they are, does not make it another call."""
    rank, session = dist.get_rank(), _session()
    make = torch.Generator().manual_seed(rank)
    table = integers((50, 8), torch.float32, rank)
    plain = torch.nn.functional.embedding_bag

    def check(index, offset, weight=None):
        y = weft.embedding_all_to_all(
            [table], [index], [offset], per_sample_weights=None if weight is None else [weight]
        )
        given = weight if weight is None else weight.contiguous()
        want = plain(index.long(), table, offset, mode="sum", per_sample_weights=given)
        parts = [torch.empty_like(want) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, want)
        rows = [part.tensor_split(len(parts))[rank] for part in parts]
        assert torch.equal(y, torch.cat(rows, 1))

    offset = torch.arange(12)
    for _ in range(3):
        check(torch.randint(50, (12,), generator=make), offset)
    known = len(session.known)
    for count in (13, 40, 12, 25):
        check(torch.randint(50, (count,), generator=make), offset)
    check(torch.randint(50, (30,), generator=make).int(), offset)
    check(torch.randint(50, (60,), generator=make)[::2], offset)
    assert len(session.known) == known
    for count in (20, 31):
        check(
            torch.randint(50, (count,), generator=make),
            offset,
            integers((2 * count,), torch.float32, rank)[::2],
        )
    assert len(session.known) == known + 1
    for bad, why in ((torch.full((12,), 50), "has 50 rows"), (torch.zeros(12), "int32 or int64")):
        with pytest.raises(weft.Error, match=why):
            weft.embedding_all_to_all([table], [bad if rank == 0 else offset], [offset])
    check(torch.randint(50, (19,), generator=make), offset)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_lookups_of_other_lengths_are_known(ranks, world):
    ranks(world).run(lookups_of_other_lengths)


def tables_of_a_peer_change():
    """A known call of a rank whose peer has other tables now learns the new size."""
    rank, world = dist.get_rank(), dist.get_world_size()
    index, offset = torch.arange(12), torch.arange(12)
    own = integers((20, 4), torch.float32, rank)
    for columns in (4, 4, 4, 9, 9, 4, 9):
        table = integers((20, columns), torch.float32, columns) if rank == 1 else own
        y = weft.embedding_all_to_all([table], [index], [offset])
        assert y.shape == (12 // world, 4 * (world - 1) + columns)
        first = 4 * rank + (columns - 4 if rank > 1 else 0)
        mine = table[:12].tensor_split(world)[rank]
        assert torch.equal(y[:, first : first + table.shape[1]], mine)


@pytest.mark.parametrize("world", [2, 3])
def test_tables_of_a_peer_change(ranks, world):
    ranks(world).run(tables_of_a_peer_change)
