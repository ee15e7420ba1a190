"""The fused paths of `matmul_all_reduce` (few rows) and `matmul_all_to_all` against plain torch."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from conformance import Case, same
from ranks import integers, product

import weft
from weft import Mismatch, PeerLost, Unsupported
from weft.fabric import _native
from weft.fabric.host import packing
from weft.run import session as sessions
from weft.select import auto

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def summed(m, k, n, dtype, seed, schedule="in-kernel", transposed=False, **options):
    """One call against the exact sum over ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    xs = [integers((m, k), dtype, seed + 2 * r) for r in range(world)]
    ws = [integers((k, n), dtype, seed + 2 * r + 1) for r in range(world)]
    w = ws[rank].t().contiguous().t() if transposed else ws[rank]
    got = weft.matmul_all_reduce(xs[rank], w, schedule=schedule, **options)
    want = sum(product(x.double(), w.double()) for x, w in zip(xs, ws, strict=True))
    assert torch.equal(got.double(), want), (m, k, n, dtype, schedule)
    return got


def all_reduce():
    for seed, (m, k, n) in enumerate(
        [
            (1, 64, 128),
            (1, 7, 5),
            (3, 0, 9),
            (8, 33, 130),
            (32, 5, 1),
            (0, 4, 3),
            (33, 6, 40),
            (40, 6, 331),
        ]
    ):
        for dtype in DTYPES:
            for schedule in (
                "auto",
                "in-kernel",
                "in-kernel:1",
                "in-kernel:5",
                "serial@dma",
                "serial@cores",
            ):
                summed(m, k, n, dtype, seed, schedule, transposed=bool(seed % 2))


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_all_reduce(ranks, world):
    ranks(world).run(all_reduce)


def ranks_without_rows_of_w():
    """Ranks differ in K, and one has none; all must choose the same schedule, however many rows."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for m in (1, 32, 33, 70):
        ks = [(0, 5, 9)[(r + m) % 3] for r in range(world)]
        xs = [integers((m, k), torch.float32, r) for r, k in enumerate(ks)]
        ws = [integers((k, 7), torch.float32, r + 10) for r, k in enumerate(ks)]
        want = sum(product(x, w) for x, w in zip(xs, ws, strict=True))
        for _ in range(3):
            assert torch.equal(weft.matmul_all_reduce(xs[rank], ws[rank]), want)


def test_ranks_without_rows_of_w(ranks):
    ranks(3).run(ranks_without_rows_of_w)


def all_to_all():
    for seed in range(5):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            for schedule in ("auto", "in-kernel", "in-kernel:1", "in-kernel:3"):
                same(Case("matmul_all_to_all", seed, dtype), schedule)
    case = Case("matmul_all_to_all", 3)
    case.weft()
    assert weft.explain().schedule == "in-kernel:1@direct"
    for empty in (torch.empty, weft.symmetric_empty):
        out = empty(*case.plain().shape)
        assert case.weft(out=out).data_ptr() == out.data_ptr()
        assert torch.equal(out.double(), case.plain())


@pytest.mark.parametrize("world", [2, 3])
def test_all_to_all(ranks, world):
    ranks(world).run(all_to_all)


def ways_of_a_call():
    summed(2, 16, 24, torch.float32, 1, "auto")
    assert weft.explain().schedule == "in-kernel@direct"
    assert "rows" in weft.explain().why
    out = torch.empty(2, 24)
    assert summed(2, 16, 24, torch.float32, 1, "auto", out=out) is out
    shared = weft.symmetric_empty(2, 24)
    assert summed(2, 16, 24, torch.float32, 1, "auto", out=shared) is shared
    x = integers((2, 3, 8), torch.float32, 3)
    y = weft.matmul_all_reduce(x, torch.ones(8, 5), reduce_op="avg")
    assert torch.equal(y, x @ torch.ones(8, 5))
    kept = [weft.matmul_all_reduce(x, torch.full((8, 5), float(i))) for i in range(5)]
    assert all(torch.equal(y, i * world_sum(x)) for i, y in enumerate(kept))


def world_sum(x):
    return dist.get_world_size() * (x @ torch.ones(8, 5))


def test_ways_of_a_call(ranks):
    ranks(2).run(ways_of_a_call)


def narrow_weights():
    world = dist.get_world_size()
    x = integers((4, 12), torch.float32, 5)
    w, scale = integers((12, 9), torch.float32, 6), torch.arange(9) % 4 + 1.0
    want = world * (x @ w)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(weft.matmul_all_reduce(x, w.to(dtype)), want)
    for schedule in ("auto", "in-kernel", "serial@dma", "adaptive@dma"):
        got = weft.matmul_all_reduce(x, w.to(torch.int8), scale=scale, schedule=schedule)
        assert torch.equal(got, want * scale)
    half = weft.matmul_all_reduce(x.bfloat16(), w.to(torch.int8), scale=scale)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half.float(), (want * scale).bfloat16().float())
    many = integers((40, 12), torch.float32, 7)
    got = weft.matmul_all_reduce(many, w.to(torch.int8), scale=scale)
    assert torch.equal(got, world * (many @ w) * scale)
    x.requires_grad_()
    weft.matmul_all_reduce(x, w.to(torch.int8), scale=scale).sum().backward()
    assert torch.equal(x.grad, torch.ones(4, 9) @ (w * scale).t())


@pytest.mark.parametrize("world", [1, 2])
def test_narrow_weights(ranks, world):
    ranks(world).run(narrow_weights)


def refused():
    x, w = torch.ones(2, 4), torch.ones(4, 3)
    cases = [
        ((x, w.to(torch.int8)), {}, "needs its scale"),
        ((x, w.to(torch.int8)), {"scale": torch.ones(4)}, r"it must be \(3,\)"),
        ((x, w.to(torch.int8)), {"scale": torch.ones(3).double()}, "float32"),
        ((x.bfloat16(), w), {}, "narrower"),
        ((x, w.double()), {}, "narrower"),
        ((x, torch.ones(5, 3)), {}, "both are K"),
        ((x, w), {"schedule": "in-kernel@dma"}, "no engine moves them"),
    ]
    for arguments, options, said in cases:
        with pytest.raises(Unsupported, match=said):
            weft.matmul_all_reduce(*arguments, **options)
    with pytest.raises(Mismatch, match="M is"):
        weft.matmul_all_reduce(torch.ones(2 + dist.get_rank(), 4), w)
    assert torch.equal(weft.matmul_all_reduce(x, w), dist.get_world_size() * (x @ w))


def test_bad_input(ranks):
    ranks(2).run(refused)


def graph():
    x, w = torch.randn(2, 8, requires_grad=True), torch.randn(8, 6, requires_grad=True)
    group = dist.group.WORLD.group_name
    for arguments in ((x, w, "sum", group), (x, w, "sum", group, torch.ones(6))):
        torch.library.opcheck(
            torch.ops.weft.matmul_all_reduce,
            arguments,
            test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
        )


def test_operator(ranks):
    ranks(1).run(graph)


def on_a_paced_link():
    weft.configure(link="0.01GB/s")
    try:
        for schedule in ("in-kernel", "in-kernel:4", "serial@dma"):
            summed(2, 40, 300, torch.float32, 1, schedule)
            summed(34, 40, 30, torch.float32, 1, schedule)
            same(Case("matmul_all_to_all", 4), schedule)
        start = time.perf_counter()
        summed(8, 4, 4096, torch.float32, 1, "in-kernel")
        # Half of the sums and of their parts cross each link: 8 x 4096 x 4 bytes at 10 MB/s.
        assert time.perf_counter() - start > 0.95 * 8 * 4096 * 4 / 1e7
    finally:
        weft.configure(link="memory")


def test_a_paced_link(ranks):
    ranks(2).run(on_a_paced_link)


def packed(w):
    tensor, (pointer, _, by_columns, pitch, rows) = packing.packed(w)
    assert (pointer, rows) == (tensor.data_ptr(), w.shape[0])
    assert pitch == tensor.stride(1 if by_columns else 0) * w.element_size()
    return tensor


def test_packs():
    """A weight is packed at its second call; a write to it is seen, and its end frees the pack."""
    w = torch.randn(40, 30)
    assert packed(w) is w
    first = packed(w)
    assert first.stride(0) == 1
    assert torch.equal(first, w)
    assert packed(w).data_ptr() == first.data_ptr()
    w.add_(1)
    assert packed(w) is w
    assert torch.equal(packed(w), w)
    w.data.mul_(2)  # leaves no trace in the version counter
    assert torch.equal(packed(w), w)
    assert packed(w.t().contiguous().t()).stride(0) == 1
    view = w[:, :11]
    assert packed(view) is view
    assert torch.equal(packed(w[:, :11]), view), "another view of the same memory"
    count = len(packing._packs)
    del w, view, first
    packed(torch.randn(4, 4))
    assert len(packing._packs) <= count


def views():
    """Operands of which neither rows nor columns lie together, and such as repeat themselves."""

    def of(*shape):
        return integers(shape, torch.float32, sum(shape))

    xs = [
        of(8, 4).t(), of(4, 16)[:, ::2], of(1, 8).expand(4, 8), of(4, 1).expand(4, 8),
        of(2, 3, 8), of(3, 2, 8).transpose(0, 1), of(2, 2, 16)[..., ::2],
    ]  # fmt: skip
    ws = [
        of(8, 12)[:, ::2], of(16, 6)[::2], of(6, 16)[:, ::2].t(), of(12, 8)[::2].t(),
        of(1, 6).expand(8, 6), of(8, 1).expand(8, 6), of(8, 3)[:, 1:2], of(1, 8).t(),
    ]  # fmt: skip
    pairs = [(x, of(8, 6)) for x in xs] + [(of(4, 8), w) for w in ws]
    pairs += [(of(4, 1), of(1, 6)), (of(4, 1), of(1, 12)[:, ::2]), (of(4, 2)[:, ::2], of(6, 1).t())]
    for x, w in pairs:
        for _ in range(3):  # looked at closely, packed, known
            assert torch.equal(weft.matmul_all_reduce(x, w), dist.get_world_size() * (x @ w))
    out = torch.empty(6, 4).t()
    for _ in range(3):
        assert weft.matmul_all_reduce(of(4, 8), of(8, 6), out=out.fill_(7)) is out
        assert torch.equal(out, dist.get_world_size() * (of(4, 8) @ of(8, 6)))


def test_views(ranks):
    ranks(2).run(views)


def known_calls(m, n, schedule):
    """Calls like earlier ones take a shorter way; what they give is the same, whatever changes."""
    rank, world = dist.get_rank(), dist.get_world_size()
    fabric = weft.fabric.of(None)
    os.environ["WEFT_GUARD"] = "0"  # the schedule is settled from the first call on
    auto.of(sessions.of(fabric)).forget()
    w, scale = integers((12, n), torch.float32, 1), torch.arange(n) % 3 + 1.0
    with torch.inference_mode():  # what is kept there serves outside of it, too
        for _ in range(2):
            weft.matmul_all_reduce(integers((m, 12), torch.float32, 0), w)
    made = []
    for turn in range(12):
        x = integers((m, 12), torch.float32, turn)
        if turn % 4 == 3:
            w.add_(1)
        y = weft.matmul_all_reduce(x, w)
        assert torch.equal(y, world * (x @ w))
        assert weft.explain().schedule == schedule
        made.append((y, y.clone()))
    assert all(torch.equal(y, copy) for y, copy in made), "a result stays what it was"
    known = sessions.of(fabric).known
    count = len(known)
    for turn in range(6):
        x = integers((1, 3, 12), torch.bfloat16, turn)
        y = weft.matmul_all_reduce(x, w.to(torch.int8), scale=scale)
        assert torch.equal(y.float(), (world * (x.float() @ w) * scale).bfloat16().float())
        out = weft.symmetric_empty(m, n) if turn % 2 else torch.empty(m, n)
        x = integers((m, 12), torch.float32, turn)
        assert weft.matmul_all_reduce(x, w, out=out) is out
        assert torch.equal(out, world * (x @ w))
    assert len(known) == count + 2, "the shorter way was taken"
    # A rank whose K changes: its peers have entered the call they knew, and plan it anew.
    for turn in range(8):
        k = 12 if turn % 3 or rank else 5
        x, part = integers((m, 12), torch.float32, turn), slice(0, k)
        y = weft.matmul_all_reduce(x[:, part], w[part])
        first = 12 if turn % 3 else 5
        assert torch.equal(y, (world - 1) * (x @ w) + x[:, :first] @ w[:first])
    with weft.record() as recording:
        weft.matmul_all_reduce(x, w)
    assert recording.timelines[0].spans, "recorded calls have their spans"
    for _ in range(2):
        with pytest.raises(Mismatch, match="M is"):
            weft.matmul_all_reduce(x if rank else x[:1], w)
        with pytest.raises((Mismatch, Unsupported), match="both are K"):
            weft.matmul_all_reduce(x, w if rank else w[:3])
        assert torch.equal(weft.matmul_all_reduce(x, w), world * (x @ w))
    os.environ["WEFT_SCHEDULE"] = "serial"
    try:
        assert torch.equal(weft.matmul_all_reduce(x, w), world * (x @ w))
        assert weft.explain().schedule == "serial@dma"
    finally:
        del os.environ["WEFT_SCHEDULE"], os.environ["WEFT_GUARD"]


def a_heap_that_is_full():
    """A known call for whose result there is no room on one rank: all hear it, and go on."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x, w = integers((2, 16), torch.float32, 3), integers((16, 30_000), torch.float32, 4)
    for _ in range(4):
        weft.matmul_all_reduce(x, w)
    fabric = weft.fabric.of(None)
    land = fabric.memory.outputs.make

    def refuse(*arguments):
        raise Unsupported("the symmetric heap cannot hold more")

    for _ in range(2):
        if rank == 1:
            fabric.memory.outputs.make = refuse
        with pytest.raises((Unsupported, Mismatch), match="heap cannot hold more"):
            weft.matmul_all_reduce(x, w)
        fabric.memory.outputs.make = land
        assert torch.equal(weft.matmul_all_reduce(x, w), world * (x @ w))


def test_a_heap_that_is_full(ranks):
    ranks(2).run(a_heap_that_is_full)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    ("m", "n", "schedule"), [(2, 20, "in-kernel@direct"), (40, 200, "in-kernel:1@direct")]
)
def test_known_calls(ranks, world, m, n, schedule):
    ranks(world).run(known_calls, m, n, schedule)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
def test_kernels_of_all_processors(dtype, transposed):
    types = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
    for m in (1, 2, 3, 4, 5, 7, 8, 32):
        for k, n in ((7, 5), (64, 48), (129, 67), (0, 4)):
            x, w = integers((m, k), torch.float32, m), integers((k, n), dtype, k)
            lying = w.t().contiguous() if transposed else w.contiguous()
            pitch = max(lying.shape[1], 1) * dtype.itemsize
            for name in _native.kernel_names():
                out = torch.full((m, n), float("nan"))
                _native.multiply(
                    x.data_ptr(), m, lying.data_ptr(), types[dtype], transposed, pitch, k, 0, n,
                    out.data_ptr(), kernels=name,
                )  # fmt: skip
                assert torch.equal(out, x @ w.float()), (name, m, k, n)


def endless(victim):
    x, w = torch.ones(1, 512), torch.ones(512, 256)
    if dist.get_rank() == victim:
        weft.matmul_all_reduce(x, w)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()

    def go_on():
        while True:
            weft.matmul_all_reduce(x, w)

    with pytest.raises(PeerLost) as lost:
        go_on()
    return lost.value.rank, time.monotonic() - start


def test_a_killed_peer_is_named(fresh_ranks):
    outcomes = fresh_ranks(3).outcomes(endless, 1)
    assert outcomes[1].died
    for rank in (0, 2):
        assert outcomes[rank].error is None, outcomes[rank].trace
        who, seconds = outcomes[rank].value
        assert who == 1
        assert seconds < 5


def a_peer_that_does_not_come():
    weft.configure(deadline=0.5)
    x, w = torch.ones(1, 64), torch.ones(64, 32)
    weft.matmul_all_reduce(x, w)
    if dist.get_rank() == 1:
        return None
    with pytest.raises(weft.Timeout) as late:
        weft.matmul_all_reduce(x, w)
    return str(late.value)


def test_the_deadline(renewed_ranks):
    said = renewed_ranks(2).run(a_peer_that_does_not_come)[0]
    assert "for rank 1 to enter the call" in said
