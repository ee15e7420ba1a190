"""Bad input: every rank hears of it, in one sentence, nothing hangs, and the group goes on."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from ranks import check_call, integers, shard_of
from torch._subclasses.fake_tensor import FakeTensorMode

import weft
from weft import Mismatch, Unsupported
from weft.ops.concurrent import matmul_beside

ROWS, K, N = 6, 4, 3


def disagree(change: dict) -> str:
    """A call in which the last rank means something else than the others."""
    last = dist.get_rank() == dist.get_world_size() - 1
    sizes = {"rows": ROWS, "k": K, "n": N, "dtype": torch.float32, "w": 1, "options": {}}
    sizes.update(change if last else {})
    x = torch.ones(sizes["rows"], sizes["k"], dtype=sizes["dtype"])
    w = [torch.ones(sizes["k"], sizes["n"], dtype=sizes["dtype"]) for _ in range(sizes["w"])]
    check_call(12, 5, 7, schedule="adaptive@dma")
    for _ in range(2):  # the second time with what was kept from the first
        with pytest.raises(Mismatch) as refused:
            weft.all_gather_matmul(x, w, **{"schedule": "adaptive@dma", **sizes["options"]})
    for name in ("adaptive@dma", "serial@cores", "adaptive@direct"):
        check_call(12, 5, 7, schedule=name)
    return str(refused.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rows": ROWS + 2}, "rows of x_shard"),
        ({"k": K + 1}, "K is 4 on rank 0 and 5 on rank 2"),
        ({"n": N + 2}, "columns of w"),
        ({"dtype": torch.bfloat16}, "dtype is float32 on rank 0 and bfloat16 on rank 2"),
        ({"w": 2}, "the number of w is 1 on rank 0 and 2 on rank 2"),
        ({"w": 0}, "the number of w is 1 on rank 0 and 0 on rank 2"),
        ({"options": {"return_gathered": True}}, "return_gathered"),
        ({"options": {"schedule": "serial"}}, "the schedule is adaptive@dma on rank 0"),
        ({"options": {"shard_rows": [ROWS] * 3}}, "shard_rows"),
    ],
    ids=str,
)
def test_ranks_that_disagree(ranks, change, said):
    messages = ranks(3).run(disagree, change)
    assert len(set(messages)) == 1, "every rank is told the same"
    assert said in messages[0]
    assert "\n" not in messages[0]


def disagree_in_dimensions() -> str:
    shape = (2, 3, K) if dist.get_rank() else (3, 2, K)
    with pytest.raises(Mismatch) as refused:
        weft.all_gather_matmul(torch.ones(shape), torch.ones(K, N))
    check_call(12, 5, 7)
    return str(refused.value)


def test_ranks_that_disagree_in_other_dimensions(ranks):
    messages = ranks(2).run(disagree_in_dimensions)
    assert "shape of x_shard" in messages[0]


def mismatch_moves_nothing() -> None:
    """Before anything moves: an output given by the caller is untouched on a first call."""
    rank = dist.get_rank()
    out = torch.full((4, 2), 7.0)
    k = 3 + rank
    with pytest.raises(Mismatch):
        weft.all_gather_matmul(torch.ones(2, k), torch.ones(k, 2), out=out, schedule="shard-p2p")
    assert (out == 7).all()


def test_nothing_moves_when_ranks_disagree(ranks):
    ranks(2).run(mismatch_moves_nothing)


def freed(*shape: int) -> torch.Tensor:
    """A tensor whose storage has been freed, as FSDP frees parameters."""
    tensor = torch.ones(shape)
    tensor.untyped_storage().resize_(0)
    return tensor


def bad_calls() -> dict:
    """Calls that are wrong on one rank alone: what to call, what it says there."""
    x, w = torch.ones(ROWS, K), torch.ones(K, N)
    out = torch.empty(2 * ROWS, N)
    many = [torch.ones(K, 100) for _ in range(2000)]
    with FakeTensorMode():
        fake_x, fake_w = torch.ones(ROWS, K), torch.ones(K, N)
    return {
        "1-D x": (((torch.ones(K), w), {}), "dimensions, not 1"),
        "5-D x": (((torch.ones(1, 1, 1, 1, K), w), {}), "dimensions, not 5"),
        "0-D x": (((torch.tensor(1.0), w), {}), "dimensions, not 0"),
        "3-D w": (((x, torch.ones(1, K, N)), {}), "w must have 2 dimensions"),
        "mixed dtypes": (((x, w.double()), {}), "x_shard is float32 and w is float64"),
        "mixed w": (((x, [w, w.half()]), {}), r"w\[1\] is float16"),
        "integers": (((x.int(), w.int()), {}), "int32 cannot be multiplied here"),
        "complex": (((x.cfloat(), w.cfloat()), {}), "complex64 cannot be multiplied"),
        "K": (((x, torch.ones(K + 1, N)), {}), "w has 5 rows, but x_shard has 4 columns"),
        "sparse x": (((x.to_sparse(), w), {}), "x_shard is sparse or nested; pass a dense tensor"),
        "sparse rows": (((x.to_sparse_csr(), w), {}), "x_shard is sparse"),
        "sparse w": (((x, w.to_sparse()), {}), "w is sparse"),
        "nested x": (((torch.nested.nested_tensor([x, x]), w), {}), "x_shard is sparse or nested"),
        "meta x": (((x.to("meta"), w), {}), "x_shard is on meta"),
        "meta w": (((x, w.to("meta")), {}), "w is on meta"),
        "fake x": (((fake_x, w), {}), "x_shard has no values in memory"),
        "fake w": (((x, fake_w), {}), "w has no values in memory"),
        "fake out": (((x, w), {"out": fake_x}), "out has no values in memory"),
        "freed x": (((freed(ROWS + 1, K), w), {}), "x_shard has no values in memory"),
        "freed w": (((x, freed(K, N + 1)), {}), "w has no values in memory"),
        "freed x of a known call": (((freed(ROWS, K), w), {}), "x_shard has no values in memory"),
        "freed w of a known call": (((x, freed(K, N)), {}), "w has no values in memory"),
        "no tensor": ((([[1.0]], w), {}), "x_shard must be a tensor, not list"),
        "no w": (((x, None), {}), "w must be a tensor, not NoneType"),
        "schedule": (((x, w), {"schedule": "adaptve"}), "did you mean adaptive"),
        "long name": (((x, w), {"schedule": "\u00e9\U0001f600" * 2000}), "no schedule name"),
        "no schedule": (((x, w), {"schedule": None}), "schedule"),
        "gather_dim": (((x, w), {"gather_dim": 1}), "gather_dim must be from 0 to 0"),
        "gather_dim word": (((x, w), {"gather_dim": "0"}), "gather_dim must be from 0 to 0"),
        "return_gathered": (((x, w), {"return_gathered": object()}), "object is not"),
        "endless rows": (((x, w), {"shard_rows": [math.inf, ROWS]}), "list with one size per rank"),
        "shard_rows": (((x, w), {"shard_rows": [ROWS]}), "has 1 sizes, but the group has 2"),
        "own rows": (((x, w), {"shard_rows": [5, 5]}), "its tensor has 6"),
        "no sizes": (((x, w), {"shard_rows": ["six", "six"]}), "six"),
        "out rows": (((x, w), {"out": torch.empty(5, N)}), "out on rank . has 5 rows"),
        "out columns": (((x, w), {"out": torch.empty(2 * ROWS, 9)}), "out has 9 columns"),
        "out dtype": (((x, w), {"out": out.int()}), "out is int32, but the result is float32"),
        "out is meta": (((x, w), {"out": out.to("meta")}), "out is on meta"),
        "out 1-D": (((x, w), {"out": torch.empty(3)}), "out must have 2 dimensions"),
        "out expanded": (
            ((x, w), {"out": torch.empty(2 * ROWS, 1).expand(2 * ROWS, N)}),
            "out is an expanded view",
        ),
        "out no list": (((x, [w, w]), {"out": 5}), "out must be a list"),
        "outs": (((x, [w, w]), {"out": [out]}), "out has 1 tensors for 2 w"),
        "out of 3-D": (((x[None], w), {"out": out}), "2-D x_shard only"),
        "out wants grad": (((x, w), {"out": out.clone().requires_grad_()}), "requires grad"),
        "huge header": (((x, many), {}), "too many tensors"),
    }


def one_bad_rank(bad: int) -> None:
    rank = dist.get_rank()
    for name, ((arguments, options), said) in bad_calls().items():
        warm = torch.empty(2 * ROWS, N) if name == "out rows" else None
        weft.all_gather_matmul(torch.ones(ROWS, K), torch.ones(K, N), out=warm)
        if rank == bad:
            with pytest.raises(Exception, match=said) as error:
                weft.all_gather_matmul(*arguments, **options)
            assert "\n" not in str(error.value)
            assert isinstance(error.value, weft.Error), name
        else:
            with pytest.raises(Mismatch, match=f"rank {bad}") as error:
                weft.all_gather_matmul(torch.ones(ROWS, K), torch.ones(K, N), out=warm)
            assert "\n" not in str(error.value)
        check_call(7, 3, 5, schedule="adaptive@dma")


@pytest.mark.parametrize("bad", [0, 1])
def test_bad_input_on_one_rank(ranks, bad):
    ranks(2).run(one_bad_rank, bad)


def bad_everywhere() -> None:
    for (arguments, options), said in bad_calls().values():
        with pytest.raises(Exception, match=said):
            weft.all_gather_matmul(*arguments, **options)
        check_call(7, 3, 5)


@pytest.mark.parametrize("world", [2])
def test_bad_input_on_every_rank(ranks, world):
    ranks(world).run(bad_everywhere)


def other_operators() -> dict:
    """Calls of the other operators that are wrong on one rank alone, what it says there, and what
    its peers call."""
    x, w = torch.ones(4, 6), torch.ones(6, 5)
    table, index, offset = torch.ones(4, 3), torch.tensor([0, 1, 2, 3]), torch.tensor([0, 2])
    eight = torch.ones(16, 16).to(torch.float8_e4m3fn)
    meta = torch.tensor([2, 2], device="meta")

    def routed(splits=(2, 2), out=None):
        return weft.all_to_all_matmul(x, w, splits, [2, 2], out=out)

    def combined(taken=(2, 2)):
        return weft.matmul_all_to_all(x, w, [2, 2], taken)

    def kept(own=2):
        return weft.matmul_reduce_scatter(x, w, own_rows=own)

    def summed(scale=None):
        return weft.matmul_all_reduce(x, w, scale=scale)

    def beside(rows=x, out=None):
        return matmul_beside(x, w, rows, out=out)

    def looked_up(tables=(table,), **options):
        given = {"include_last_offset": False, **options}
        return weft.embedding_all_to_all(tables, [index], [offset], **given)

    def scaled(several=False):
        one, weights = torch.ones(()), [eight.t(), eight.t()] if several else eight.t()
        return weft.all_gather_scaled_matmul(eight, weights, one, one)

    return {
        "endless splits": (routed, ([math.inf, 2],), "list with one size per rank"),
        "splits without values": (routed, (meta,), "list with one size per rank"),
        "huge splits": (combined, ([2, 2**61],), "cannot hold"),
        "own_rows": (kept, ("2",), "own_rows must be"),
        "freed scale": (summed, (freed(5),), "scale has no values in memory"),
        "beside": (beside, (5,), "x must be a tensor"),
        "beside out": (beside, (x, 5), "out must be a tensor"),
        "tables": (looked_up, (table,), "tables must be a list"),
        "no tables": (looked_up, (None,), "tables must be a list"),
        "scales": (scaled, (True,), "one w_scale"),
    }


def other_bad_calls() -> None:
    for name, (call, arguments, said) in other_operators().items():
        call()
        if dist.get_rank() == 1:
            with pytest.raises(Unsupported, match=said) as error:
                call(*arguments)
        else:
            with pytest.raises(Mismatch, match=said) as error:
                call()
        assert "\n" not in str(error.value), name
        check_call(7, 3, 5)


def test_bad_input_of_other_operators(ranks):
    ranks(2).run(other_bad_calls)


def impossible() -> None:
    x, w = torch.ones(2, 2), torch.ones(2, 2)
    for schedule in ("serial@direct", weft.Schedule(depth=0, engine="direct")):
        with pytest.raises(Unsupported, match="direct never moves anything"):
            weft.all_gather_matmul(x, w, schedule=schedule)
    with pytest.raises(Unsupported, match="outside 0 to"):
        weft.all_gather_matmul(x, w, schedule=weft.Schedule(depth=10**6))
    check_call(7, 3, 5)


def test_impossible_schedules(ranks):
    ranks(2).run(impossible)


def ahead_of_a_slow_rank() -> None:
    """A rank whose calls fail at once must not run ahead over what a slow peer still reads."""
    import time

    rank = dist.get_rank()
    w = torch.eye(4)
    x = [integers((8, 4), torch.float32, seed) for seed in range(4)]
    out = torch.empty(8, 4)
    weft.all_gather_matmul(shard_of(x[0]), w, out=out)
    for turn in range(4):
        if rank == 1:
            time.sleep(0.05)
        wrong = torch.empty(9, 4) if rank == 0 else out
        with pytest.raises(weft.Error):
            weft.all_gather_matmul(shard_of(x[turn]), w, out=wrong)
    weft.all_gather_matmul(shard_of(x[2]), w, out=out)
    assert torch.equal(out, x[2])


def test_a_failing_rank_does_not_run_ahead(ranks):
    ranks(2).run(ahead_of_a_slow_rank)


# -- no group, not a member ------------------------------------------------------------------------


def test_no_process_group():
    assert not dist.is_initialized()
    with pytest.raises(Unsupported, match="init_process_group"):
        weft.all_gather_matmul(torch.ones(2, 2), torch.ones(2, 2))
    with pytest.raises(Unsupported, match="init_process_group"):
        weft.symmetric_empty(2)
    with pytest.raises(Unsupported, match="init_process_group"):
        weft.configure(deadline=3)


def outsider() -> None:
    group = dist.new_group([0])
    x, w = torch.ones(2, 2), torch.ones(2, 2)
    if dist.get_rank() == 0:
        assert torch.equal(weft.all_gather_matmul(x, w, group=group), x @ w)
    else:
        with pytest.raises(Unsupported, match="not in the group"):
            weft.all_gather_matmul(x, w, group=group)
        with pytest.raises(Unsupported, match="not in the group"):
            weft.symmetric_empty(3, group=group)


def test_not_a_member(ranks):
    ranks(2).run(outsider)


def configured() -> None:
    for wrong in ("fast", "0GB/s", "-1GB/s", "1GB", "1e999GB/s", ""):
        with pytest.raises(Unsupported):
            weft.configure(link=wrong)
    check_call(7, 3, 5)


def test_configure_refuses_nonsense(ranks):
    ranks(2).run(configured)
