"""Operators inside torch's modes: autocast gives the dtypes of torch.mm, second derivatives are
those of one process, and what is not supported is refused while the group goes on."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from ranks import check_call, integers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import weft
from weft.ops.concurrent import matmul_beside

EVEN = [2, 2]


def gathered(x, w):
    return weft.all_gather_matmul(x, w)


def gathered_many(x, w):
    first, second = weft.all_gather_matmul(x, [w, 2 * w])
    return torch.cat([first, second], 1)


def scattered(x, w):
    return weft.matmul_reduce_scatter(x, w)


def reduced(x, w):
    return weft.matmul_all_reduce(x, w)


def averaged(x, w):
    return weft.matmul_all_reduce(x, w, reduce_op="avg")


def dispatched(x, w):
    return weft.all_to_all_matmul(x, w, EVEN, EVEN)


def combined(x, w):
    return weft.matmul_all_to_all(x, w, EVEN, EVEN)


CALLS = {
    call.__name__: call
    for call in (gathered, gathered_many, scattered, reduced, averaged, dispatched, combined)
}


def autocast(name, dtype, grad):
    """A call under autocast beside torch.mm: the dtype of the result, and those of gradients."""
    x = integers((4, 6), torch.float32, 1).requires_grad_(grad)
    w = integers((6, 8), torch.float32, 2).requires_grad_(grad)
    with torch.autocast("cpu", dtype=dtype):
        y, plain = CALLS[name](x, w), x @ w
        assert y.dtype == plain.dtype == dtype
        if name != "averaged":
            double = CALLS[name](x.detach().double(), w.detach().double())
            assert double.dtype == torch.float64
    assert torch.equal(y.float(), CALLS[name](x.detach(), w.detach()))  # small whole numbers
    if grad:
        y.float().sum().backward()
        assert x.grad.dtype == w.grad.dtype == torch.float32
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
        mixed = CALLS[name](x.to(dtype), w)
        assert torch.equal(mixed, y)


@pytest.mark.parametrize("name", CALLS)
def test_autocast_gives_the_dtype_of_torch(ranks, name):
    ranks(2).run(autocast, name, torch.bfloat16, True)
    ranks(2).run(autocast, name, torch.float16, False)


def in_inference_mode():
    """Memory that weft keeps from a call in inference mode serves calls outside of it."""
    x, w = integers((4, 10), torch.float32, 1), integers((10, 14), torch.float32, 2)
    for call in CALLS.values():
        with torch.inference_mode():
            got = call(x.clone(), w.clone())
        for _ in range(2):
            a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
            want = call(a, b)
            assert torch.equal(got, want)
            assert not want.is_inference()
            (want * want).sum().backward()
        with torch.inference_mode():
            assert torch.equal(got, call(x, w))
        with torch.no_grad():
            assert torch.equal(got, call(x, w).mul_(1))


def test_inference_mode(renewed_ranks):
    renewed_ranks(2).run(in_inference_mode)


def whole_function(name, xs, ws):
    """The calls of all ranks together, in one process: the results of all ranks."""
    products = [x @ w for x, w in zip(xs, ws, strict=True)]
    if name == "gathered":
        return [torch.cat(xs) @ w for w in ws]
    if name == "gathered_many":
        return [torch.cat(xs) @ torch.cat([w, 2 * w], 1) for w in ws]
    if name == "scattered":
        return list(sum(products).chunk(2))
    if name in ("reduced", "averaged"):
        return [sum(products) / (2 if name == "averaged" else 1)]
    if name == "dispatched":
        return [torch.cat([x.chunk(2)[r] for x in xs]) @ w for r, w in enumerate(ws)]
    return [torch.cat([p.chunk(2)[r] for p in products]) for r in range(2)]


def penalty(ys, xs, ws):
    """The sum of squared gradients of a loss that is not linear."""
    loss = sum((y**3).sum() for y in ys)
    return loss, torch.autograd.grad(loss, [*xs, *ws], create_graph=True)


def second_derivatives(name):
    """The gradient of a gradient penalty, beside that of one process that makes all calls."""
    rank = dist.get_rank()
    make = lambda shape, seed: torch.randn(  # noqa: E731
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).requires_grad_()
    xs, ws = [make((4, 6), 1 + r) for r in range(2)], [make((6, 8), 5 + r) for r in range(2)]
    loss, first = penalty(whole_function(name, xs, ws), xs, ws)
    want = torch.autograd.grad(loss + sum(g.square().sum() for g in first), [*xs, *ws])

    x, w = (t[rank].detach().clone().requires_grad_() for t in (xs, ws))
    loss, own = penalty([CALLS[name](x, w)], [x], [w])
    for got, expected in zip(own, (first[rank], first[2 + rank]), strict=True):
        torch.testing.assert_close(got, expected)
    got = torch.autograd.grad(loss + sum(g.square().sum() for g in own), [x, w])
    for mine, expected in zip(got, (want[rank], want[2 + rank]), strict=True):
        torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize("name", CALLS)
def test_second_derivatives(ranks, name):
    ranks(2).run(second_derivatives, name)


def no_second_derivative():
    table = torch.ones(4, 3, requires_grad=True)
    index = torch.tensor([0, 1, 2, 3])
    y = weft.embedding_all_to_all([table], [index], [index])
    (gradient,) = torch.autograd.grad((y**2).sum(), table, create_graph=True)
    with pytest.raises(weft.Unsupported, match="no second derivatives"):
        gradient.sum().backward()
    check_call(4, 4, 4)


def test_second_derivatives_of_embeddings_are_refused(ranks):
    ranks(2).run(no_second_derivative)


def transformed(name, kind):
    """A transform refuses the call on every rank, in one sentence; the next call works."""
    call, w = CALLS[name], torch.ones(6, 8)
    x = torch.ones(4, 6)
    attempts = {
        "vmap": lambda: torch.vmap(lambda x: call(x, w))(torch.ones(3, 4, 6)),
        "grad": lambda: torch.func.grad(lambda x: call(x, w).sum())(x),
        "jvp": lambda: torch.func.jvp(lambda x: call(x, w), (x,), (x,)),
        "jacrev": lambda: torch.func.jacrev(lambda x: call(x, w))(x),
    }
    with pytest.raises(weft.Unsupported, match=r"transform of torch\.func"):
        attempts[kind]()
    if kind == "jvp":
        with forward_ad.dual_level(), pytest.raises(weft.Unsupported, match="tangent"):
            call(forward_ad.make_dual(x, x), w)
        with forward_ad.dual_level():
            call(x, w)  # no tangent: nothing is lost
    check_call(4, 4, 4)


@pytest.mark.parametrize("kind", ["vmap", "grad", "jvp", "jacrev"])
@pytest.mark.parametrize("name", CALLS)
def test_transforms_are_refused_and_the_group_goes_on(ranks, name, kind):
    ranks(2).run(transformed, name, kind)


def one_rank_transforms():
    """A rank alone in a transform: the others hear of it in the call that they make."""
    x, w = torch.ones(4, 6), torch.ones(6, 8)
    call = torch.vmap(gathered, (0, None)) if dist.get_rank() == 0 else gathered
    x = x.expand(3, 4, 6) if dist.get_rank() == 0 else x
    with pytest.raises(weft.Error, match=r"transform of torch\.func"):
        call(x, w)
    check_call(4, 4, 4)


def test_a_refusal_on_one_rank_reaches_all(ranks):
    ranks(2).run(one_rank_transforms)


def recorded_beside_dispatched(name):
    """Autograd without the dispatcher gives what autograd gives through it: results, gradients,
    what is saved, and which arguments need a gradient."""
    call = CALLS[name]
    for trained_x, trained_w in ((True, True), (True, False), (False, True)):
        found = []
        for through in (contextlib.nullcontext, _Seen):
            x = integers((4, 6), torch.float32, 1).requires_grad_(trained_x)
            w = integers((6, 8), torch.float32, 2).requires_grad_(trained_w)
            packed = []

            def pack(tensor, packed=packed):
                packed.append(tuple(tensor.shape))
                return tensor

            with through(), torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
                y = call(x, w)
            (y * torch.arange(y.numel()).view(y.shape)).sum().backward()
            found.append((y.detach(), x.grad, w.grad, packed))
        for ours, theirs in zip(found[0][:3], found[1][:3], strict=True):
            assert (ours is None) == (theirs is None)
            assert ours is None or torch.equal(ours, theirs)
        assert found[0][3] == found[1][3]


class _Seen(TorchDispatchMode):
    """Looks at every operator, so that calls go through the dispatcher."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CALLS)
def test_autograd_without_the_dispatcher(ranks, name):
    ranks(2).run(recorded_beside_dispatched, name)


def checkpointed(name):
    """A checkpointed call is made again in the backward pass, with the same gradients."""
    grads = []
    for run in (CALLS[name], lambda x, w: checkpoint(CALLS[name], x, w, use_reentrant=False)):
        x = integers((4, 6), torch.float32, 1).requires_grad_()
        w = integers((6, 8), torch.float32, 2).requires_grad_()
        (run(x, w) ** 2).sum().backward()
        grads.append((x.grad, w.grad))
    assert torch.equal(grads[0][0], grads[1][0])
    assert torch.equal(grads[0][1], grads[1][1])


@pytest.mark.parametrize("name", CALLS)
def test_checkpoint(ranks, name):
    ranks(2).run(checkpointed, name)


def what_a_mode_sees(name):
    """A mode of torch sees a call that is recorded, and a call that is not."""
    for grad in (True, False):
        seen = []

        class Seen(_Seen):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None, seen=seen):
                seen.append(str(function))
                return super().__torch_dispatch__(function, types, args, kwargs)

        with Seen():
            w = torch.ones(6, 8, requires_grad=grad)
            torch.ops.weft.matmul_reduce_scatter(
                torch.ones(4, 6), w, "sum", 0, dist.group.WORLD.group_name
            )
            if grad:
                CALLS[name](torch.ones(4, 6), w)
        assert sum(one.startswith("weft.") for one in seen) == (2 if grad else 1), seen


@pytest.mark.parametrize("name", ["gathered", "reduced"])
def test_modes_of_torch_see_calls(ranks, name):
    ranks(2).run(what_a_mode_sees, name)


def in_a_fake_mode(name):
    """Known calls too: their results would be fake."""
    x, w = torch.ones(4, 6), torch.ones(6, 8)
    for _ in range(4):
        CALLS[name](x, w)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for fake_x, fake_w in ((x, w), (torch.ones(4, 6), torch.ones(6, 8))):
            with pytest.raises(weft.Unsupported, match=r"mode of fake tensors|no values"):
                CALLS[name](fake_x, fake_w)
    check_call(4, 4, 4)


@pytest.mark.parametrize("name", CALLS)
def test_modes_of_fake_tensors_are_refused(ranks, name):
    ranks(2).run(in_a_fake_mode, name)


def transformed_with_out():
    """Known calls, and operators without a kernel for transforms, are refused as others are."""
    x, w, out = torch.ones(4, 6), torch.ones(6, 8), torch.zeros(8, 8)
    for _ in range(3):
        weft.all_gather_matmul(x, w, out=out)
    for call in (
        lambda x: weft.all_gather_matmul(x, w, out=out),
        lambda x: weft.all_gather_matmul(x, w, out=torch.empty(8, 8)),
        lambda x: matmul_beside(x, w, torch.ones(4, 6))[0],
    ):
        with pytest.raises(weft.Unsupported, match=r"transform of torch\.func"):
            torch.vmap(call)(x.expand(3, 4, 6))
        with pytest.raises(weft.Unsupported, match=r"transform of torch\.func"):
            torch.func.grad(lambda x: call(x).sum())(x)  # noqa: B023
    check_call(4, 4, 4)


def test_transforms_are_refused_with_out(ranks):
    ranks(2).run(transformed_with_out)


def _looked_up(x, w, out):
    index, bags = torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 2, 3])
    return weft.embedding_all_to_all([w], [index], [bags], include_last_offset=False, out=out)


OUTS = {
    "gathered": (lambda x, w, out: weft.all_gather_matmul(x, w, out=out), (8, 8)),
    "scattered": (lambda x, w, out: weft.matmul_reduce_scatter(x, w, out=out), (2, 8)),
    "reduced": (lambda x, w, out: weft.matmul_all_reduce(x, w, out=out), (4, 8)),
    "averaged": (
        lambda x, w, out: weft.matmul_all_reduce(x, w, out=out, reduce_op="avg"),
        (4, 8),
    ),
    "dispatched": (lambda x, w, out: weft.all_to_all_matmul(x, w, EVEN, EVEN, out=out), (4, 8)),
    "combined": (lambda x, w, out: weft.matmul_all_to_all(x, w, EVEN, EVEN, out=out), (4, 8)),
    "beside": (lambda x, w, out: matmul_beside(x, w, x, out=out), (4, 8)),
    "looked up": (_looked_up, (2, 16)),
    "experts": (
        lambda x, w, out: weft.all_to_all_matmul(x, w[None], [[2], [2]], [[2], [2]], out=out),
        (4, 8),
    ),
    "many": (
        lambda x, w, outs: weft.all_gather_matmul(x, [w, w], out=list(outs.unbind())),
        (2, 8, 8),
    ),
}


def overwritten(name):
    """The backward pass needs what `out` was: in the first call, in known ones, in shared memory,
    and in inference mode, whose tensors have no version."""
    call, shape = OUTS[name]
    x, w = torch.ones(4, 6), torch.ones(6, 8)
    for empty in (torch.empty, weft.symmetric_empty):
        for _ in range(4):
            out, factor = empty(shape).zero_(), torch.ones(shape, requires_grad=True)
            loss = (factor * out).sum()
            with torch.no_grad():
                call(x, w, out)
            assert float(out.abs().sum()) > 0
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
    with torch.inference_mode():
        for _ in range(3):
            call(x, w, torch.empty(shape))
    check_call(4, 4, 4)


@pytest.mark.parametrize("name", OUTS)
def test_autograd_hears_of_what_out_overwrites(ranks, name):
    ranks(2).run(overwritten, name)
