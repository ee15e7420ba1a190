"""Collectives inside torch's modes and graphs: compiled functions are cut around them, transforms
and fake tensors are refused on every rank, and autograd hears of what `out=` overwrites."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import integers
from torch._subclasses.fake_tensor import FakeTensorMode

import weft


def check_group():
    world = dist.get_world_size()
    assert torch.equal(weft.all_reduce(torch.ones(3)), torch.full((3,), float(world)))


CALLS = {
    "all_reduce": lambda x: weft.all_reduce(x),
    "reduce_scatter": lambda x: weft.reduce_scatter(x),
    "all_gather": lambda x: weft.all_gather(x),
    "gather": lambda x: weft.gather(x),
    "broadcast": lambda x: weft.broadcast(x, 1),
    "all_to_all": lambda x: weft.all_to_all(x),
    "scatter": lambda x: weft.scatter(x),
    "out": lambda x: weft.all_reduce(x, out=torch.empty_like(x)),
    "handle": lambda x: weft.all_reduce(x, async_op=True).wait(),
}


def compiled(name):
    """More shapes than torch compiles a function for."""
    call = CALLS[name]
    torch._dynamo.reset()
    quick = torch.compile(lambda x: _plus(call(x * 2)), backend="aot_eager")
    for rows in (4, 4, 8, 2, 0, 6, 10, 12, 14, 16, 18, 20):
        x = integers((rows, 3), torch.float32, rows + dist.get_rank())
        got, want = quick(x), _plus(call(x * 2))
        assert got is want is None or torch.equal(got, want)
    check_group()


def _plus(y):
    return None if y is None else y + 1


@pytest.mark.parametrize("name", CALLS)
def test_compiled_functions(ranks, name):
    ranks(2).run(compiled, name)


def transformed(name):
    call, x = CALLS[name], torch.ones(4, 6)
    for attempt in (
        lambda: torch.vmap(call)(torch.ones(3, 4, 6)),
        lambda: torch.func.grad(lambda x: call(x).sum())(x),
        lambda: torch.func.jvp(call, (x,), (x,)),
    ):
        with pytest.raises(weft.Unsupported, match=r"transform of torch\.func") as error:
            attempt()
        assert "\n" not in str(error.value)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for given in (x, torch.ones(4, 6)):
            with pytest.raises(weft.Unsupported, match=r"mode of fake tensors|no values"):
                call(given)
    check_group()


@pytest.mark.parametrize("name", [name for name in CALLS if name != "out"])
def test_transforms_and_fake_modes_are_refused(ranks, name):
    ranks(2).run(transformed, name)


def one_rank_transforms():
    x = torch.ones(3, 4)
    call = torch.vmap(weft.all_reduce) if dist.get_rank() == 0 else weft.all_reduce
    with pytest.raises(weft.Error, match=r"transform of torch\.func"):
        call(x)
    check_group()


def test_a_refused_transform_reaches_all(ranks):
    ranks(2).run(one_rank_transforms)


def into(name, x, out, **options):
    rows, world = x.shape[0], dist.get_world_size()
    if name == "all_gather":
        return weft.all_gather(x, out=out[: rows * world], **options)
    if name == "reduce_scatter":
        return weft.reduce_scatter(x, out=out[: rows // world], **options)
    if name == "scatter":
        return weft.scatter(x, out=out[: rows // world], **options)
    if name == "scatter without x":
        given = x if dist.get_rank() == 0 else None
        return weft.scatter(given, out=out[: rows // world], **options)
    if name == "gather":
        return weft.gather(x, out=out[: rows * world], **options)
    return getattr(weft, name)(x, out=out[:rows], **options)


def overwritten(name):
    """The backward pass needs what `out` was. Quick calls, calls that are checked, and handles."""
    x = torch.ones(4, 6)
    for options in ({}, {"engine": "cores"}, {"async_op": True}):
        out, w = torch.zeros(8, 6), torch.ones(8, 6, requires_grad=True)
        loss = (w * out).sum()
        made = into(name, x, out, **options)
        if options.get("async_op"):
            made = made.wait()
        with torch.inference_mode():
            into(name, x, torch.zeros(8, 6))  # such tensors have no version
        if made is None:  # of a gather, and not its root
            loss.backward()
            continue
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    assert torch.empty(3)._version == weft.all_reduce(torch.ones(3))._version
    check_group()


WITH_OUT = ["all_gather", "all_reduce", "all_to_all", "broadcast", "gather", "reduce_scatter"]


@pytest.mark.parametrize("name", [*WITH_OUT, "scatter", "scatter without x"])
def test_autograd_hears_of_what_is_overwritten(ranks, name):
    ranks(2).run(overwritten, name)


def any_truth():
    """Whatever is true or false, on one rank alone."""
    x, one = torch.ones(3), dist.get_rank() == 1
    for value in (1, None, np.bool_(False), np.bool_(True), 0, [], "yes"):
        flag = value if one else False
        for call in (weft.all_reduce, weft.all_gather, weft.scatter, weft.gather):
            made = call(x, async_op=flag)
            assert isinstance(made, weft.Handle) == bool(flag)
            assert not isinstance(made, weft.Handle) or made.wait() is made.wait()
        made = weft.all_reduce(x, out=torch.empty(3), async_op=flag)
        assert torch.equal(made.wait() if flag else made, torch.full((3,), 2.0))
    check_group()


def test_async_op_is_any_truth(ranks):
    ranks(2).run(any_truth)
